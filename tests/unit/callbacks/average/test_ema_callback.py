"""Evaluation, choice and export with averaged weights, in both Trainers."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import distribute_module
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from mfwrap.trainer import MFTrainer
from support.resumed_training import NUM_STEPS, PLAIN, files, logged, new_trainer, trained
from support.spoilt.gpt2 import SpoiltGPT2
from support.training_state import assert_same_state

DECAY = 0.5
WEIGHT = "transformer.wte.weight"
STEPS = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    # So that it is not the last one.
    "greater_is_better": True,
    # So that averages differ from the first update on.
    "warmup_steps": 0,
}
EPOCHS = STEPS | {"eval_strategy": "epoch", "save_strategy": "epoch"}
SKIPPING = replace(PLAIN, spoilt_rows=(25, 40))
"""The 4th, 5th, 7th and 9th update are left out."""


class Follower(TrainerCallback):
    """Keep what the weights are at each event, and follow them as torch does.

    It stands before the callback that is tested, so it sees evaluated weights, and saved ones.
    """

    def __init__(self) -> None:
        self.raw, self.averages, self.evaluated, self.saved = {}, {}, {}, {}
        self._average = None

    def on_train_begin(self, _args, _state, _control, model=None, **_) -> None:
        """Begin with the weights as they are."""
        self._before = weights_of(model)
        self._average = weights_of(model)

    def on_step_end(self, _args, state, _control, model=None, **_) -> None:
        """Follow an update, unless it has changed nothing."""
        weights = weights_of(model)
        if not all(torch.equal(weights[name], value) for name, value in self._before.items()):
            averages, values = list(self._average.values()), list(weights.values())
            get_ema_multi_avg_fn(DECAY)(averages, values, torch.tensor(1))
        self._before = weights
        self.raw[state.global_step] = weights
        self.averages[state.global_step] = {k: v.clone() for k, v in self._average.items()}

    def on_evaluate(self, _args, state, _control, model=None, **_) -> None:
        """Keep what was evaluated."""
        self.evaluated[state.global_step] = weights_of(model)

    def on_save(self, _args, state, _control, model=None, **_) -> None:
        """Keep what was saved."""
        self.saved[state.global_step] = weights_of(model)


def weights_of(model):
    """Return copies of the parameters by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def average(model):
    """Return an average for the Trainer."""
    return ExponentialMovingAverage(model, DECAY)


KINDS = {
    "its average": (MFTrainer, {}, {"trainer_settings": {"ema": average}}),
    "own average": (MFTrainer, {"decay": DECAY}, {}),
    "stock": (Trainer, {"decay": DECAY}, {}),
}


def run(folder, kind, settings=PLAIN, arguments=STEPS, *, callbacks=(), **switches):
    """Return a trainer that has trained, what followed it, and the callback."""
    trainer_kind, callback_arguments, extras = KINDS[kind]
    follower, callback = Follower(), EMACallback(**callback_arguments, **switches)
    order = [follower, callback, *callbacks]
    trainer = trained(folder, settings, kind=trainer_kind, callbacks=order, **extras, **arguments)
    return trainer, follower, callback


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the run of a kind, which several tests look at."""

    @functools.cache
    def get(kind, *, epochs=False):
        folder = tmp_path_factory.mktemp("run")
        return run(
            folder, kind, SKIPPING if kind != "stock" else PLAIN, EPOCHS if epochs else STEPS
        )

    return get


def evaluated_by_hand(folder, weights):
    """Return the loss of these weights, in a Trainer that knows of no average."""
    trainer = new_trainer(folder, PLAIN, kind=Trainer)
    trainer.model.load_state_dict(weights, strict=False)
    return trainer.evaluate()["eval_loss"]


def evaluations(trainer):
    """Return the logged losses of evaluations by step."""
    return {e["step"]: e["eval_loss"] for e in logged(trainer) if "eval_loss" in e}


@pytest.mark.parametrize("kind", KINDS)
def test_the_average(runs, kind):
    """It follows applied updates as torch's own does."""
    _, follower, callback = runs(kind)

    assert_same_state(follower.averages[NUM_STEPS], dict(callback.ema.named_averages()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [False, True], ids=["steps", "epochs"])
def test_evaluation(runs, tmp_path, kind, epochs):
    """It sees the averages of its step, whenever it comes, and logs their loss."""
    trainer, follower, _ = runs(kind, epochs=epochs)
    steps = [6, 12] if epochs else [2, 4, 6, 8, 10, 12]

    assert list(follower.evaluated) == list(evaluations(trainer)) == steps
    for step, loss in evaluations(trainer).items():
        assert_same_state(follower.averages[step], follower.evaluated[step])
        assert loss == evaluated_by_hand(tmp_path, follower.averages[step])
    assert loss != evaluated_by_hand(tmp_path, follower.raw[step])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [False, True], ids=["steps", "epochs"])
def test_raw_weights(runs, kind, epochs):
    """They are back before anything is saved."""
    trainer, follower, _ = runs(kind, epochs=epochs)

    for step, weights in follower.saved.items():
        checkpoint = f"{trainer.args.output_dir}/checkpoint-{step}"
        assert_same_state(follower.raw[step], weights)
        assert_same_state(follower.raw[step], load_file(f"{checkpoint}/model.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_training_itself(runs, tmp_path, kind):
    """Its losses and weights are those of a run without the callback."""
    trainer, follower, _ = runs(kind)
    alone = Follower()
    settings = SKIPPING if kind != "stock" else PLAIN
    without = trained(tmp_path, settings, kind=KINDS[kind][0], callbacks=[alone], **STEPS)

    losses = [[e["loss"] for e in logged(each) if "loss" in e] for each in (trainer, without)]
    assert losses[0] == losses[1]
    assert_same_state(alone.raw[NUM_STEPS], follower.raw[NUM_STEPS])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [False, True], ids=["steps", "epochs"])
def test_export(runs, kind, epochs):
    """Each checkpoint holds the averages of its step as a model that can be loaded."""
    trainer, follower, _ = runs(kind, epochs=epochs)

    assert len(follower.saved) == (2 if epochs else 6)
    for step in follower.saved:
        folder = Path(trainer.args.output_dir) / f"checkpoint-{step}" / "ema"
        assert files(folder) == ["config.json", "generation_config.json", "model.safetensors"]
        loaded = SpoiltGPT2.from_pretrained(folder)
        assert_same_state(follower.averages[step], weights_of(loaded))


@pytest.mark.parametrize("kind", KINDS)
def test_best_model(runs, kind):
    """It is the one whose averages are the best, and the model ends with these."""
    trainer, follower, _ = runs(kind)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert trainer.state.best_global_step == best != NUM_STEPS
    assert trainer.state.best_metric == losses[best]
    assert not torch.equal(follower.averages[best][WEIGHT], follower.raw[best][WEIGHT])
    assert_same_state(follower.averages[best], weights_of(trainer.model))


def test_evaluation_without_averages(tmp_path):
    """With ``evaluate=False`` raw weights are evaluated, chosen and loaded; averages exported."""
    trainer, follower, _ = run(tmp_path, "own average", evaluate=False)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert losses[4] == evaluated_by_hand(tmp_path / "hand", follower.raw[4])
    assert_same_state(follower.raw[best], weights_of(trainer.model))
    loaded = SpoiltGPT2.from_pretrained(tmp_path / "checkpoint-4" / "ema")
    assert_same_state(follower.averages[4], weights_of(loaded))


def test_no_export(tmp_path):
    """With ``export=False`` there is no such folder, and the best raw weights are loaded."""
    trainer, follower, _ = run(tmp_path, "own average", export=False)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert losses[4] == evaluated_by_hand(tmp_path / "hand", follower.averages[4])
    assert not list(tmp_path.glob("checkpoint-*/ema*"))
    assert_same_state(follower.raw[best], weights_of(trainer.model))


def test_best_is_not_loaded(tmp_path):
    """With ``load_best=False`` the Trainer's choice by averages is loaded with raw weights."""
    trainer, follower, _ = run(tmp_path, "its average", load_best=False)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert_same_state(follower.raw[best], weights_of(trainer.model))


def test_nothing_is_loaded_that_the_trainer_does_not_load(tmp_path):
    """Without ``load_best_model_at_end`` the model ends with its last raw weights."""
    arguments = STEPS | {"load_best_model_at_end": False}
    trainer, follower, _ = run(tmp_path, "its average", arguments=arguments)

    assert_same_state(follower.raw[NUM_STEPS], weights_of(trainer.model))


def test_settings_of_its_own_average(tmp_path):
    """Warm-up and stride are those of an average that is made by hand."""
    by_hand = []

    class ByHand(TrainerCallback):
        def on_train_begin(self, _args, _state, _control, model=None, **_) -> None:
            by_hand.append(ExponentialMovingAverage(model, 0.9, warmup=True, update_every=2))

        def on_step_end(self, _args, _state, _control, **_) -> None:
            by_hand[0].update()

    callback = EMACallback(0.9, warmup=True, update_every=2)
    trained(tmp_path, PLAIN, kind=Trainer, callbacks=[ByHand(), callback])

    assert_same_state(dict(by_hand[0].named_averages()), dict(callback.ema.named_averages()))


def test_evaluation_by_hand(tmp_path):
    """A call of ``evaluate`` sees the weights as they are, and averages within their swap."""
    arguments = STEPS | {"load_best_model_at_end": False}
    trainer, follower, callback = run(tmp_path, "its average", arguments=arguments)
    raw = trainer.evaluate()["eval_loss"]
    with callback.ema.swap():
        averaged = trainer.evaluate()["eval_loss"]

    assert averaged == evaluated_by_hand(tmp_path / "hand", follower.averages[NUM_STEPS])
    assert raw == evaluated_by_hand(tmp_path / "hand", follower.raw[NUM_STEPS])


def test_loading_needs_evaluation_and_export():
    """What is loaded at the end must be chosen and kept."""
    for switches in ({"evaluate": False}, {"export": False}):
        with pytest.raises(ValueError, match="`load_best` must go with `evaluate` and `export`"):
            EMACallback(load_best=True, **switches)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"decay": 0.9}, "`decay`"),
        ({"warmup": True}, "`warmup`"),
        ({"warmup": False}, "`warmup`"),
        ({"update_every": 2}, "`update_every`"),
        ({"decay": 0.9, "update_every": 1}, "`decay`, `update_every`"),
    ],
)
def test_settings_beside_an_average(tmp_path, settings, names):
    """They are refused before anything is trained: the Trainer's average has its own."""
    trainer_kind, _, extras = KINDS["its average"]
    trainer = new_trainer(
        tmp_path, PLAIN, kind=trainer_kind, callbacks=[EMACallback(**settings)], **extras
    )
    before = weights_of(trainer.model)

    with pytest.raises(ValueError, match=f"{names} must be None where the Trainer has an average"):
        trainer.train()

    assert_same_state(before, weights_of(trainer.model))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"decay": 1.0}, ValueError, "`decay` must be in"),
        ({"decay": -0.1}, ValueError, "`decay` must be in"),
        ({"decay": "0.9"}, TypeError, "`decay` must be a number"),
        ({"warmup": 10}, TypeError, "`warmup` must be a bool"),
        ({"update_every": 0}, ValueError, "`update_every` must be"),
        ({"update_every": 1.5}, TypeError, "`update_every` must be"),
        ({"evaluate": 1}, TypeError, "`evaluate` must be a bool"),
        ({"export": None}, TypeError, "`export` must be a bool"),
        ({"load_best": "yes"}, TypeError, "`load_best` must be a bool"),
    ],
)
def test_bad_arguments(arguments, error, message):
    """They are refused at once."""
    with pytest.raises(error, match=message):
        EMACallback(**arguments)


def test_sharded_weights(tmp_path):
    """They are refused before anything is trained, and not at the first checkpoint."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        network = torch.nn.Linear(2, 2)
        distribute_module(network, mesh)
        trainer = new_trainer(tmp_path, PLAIN, kind=Trainer)
        with pytest.raises(ValueError, match=r"`model` must be whole on each rank .* sharded"):
            EMACallback().on_train_begin(
                trainer.args, trainer.state, trainer.control, model=network
            )
    finally:
        torch.distributed.destroy_process_group()


def test_before_training():
    """There is no average yet."""
    assert EMACallback().ema is None
