"""Both Trainers evaluate and export averages, whose metric selects the best checkpoint."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import distribute_module
from transformers import Trainer, TrainerCallback

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback
from support.averaged_training import (
    EPOCHS,
    KINDS,
    SKIPPING,
    STEPS,
    WEIGHT,
    Follower,
    evaluated_by_hand,
    weights_of,
)
from support.resumed_training import NUM_STEPS, PLAIN, files, logged, new_trainer, trained
from support.spoilt.gpt2 import SpoiltGPT2
from support.training_state import assert_same_state


def run(folder, kind, settings=PLAIN, arguments=STEPS, *, callbacks=(), **switches):
    """Train; return the trainer, its `Follower` and the tested callback."""
    trainer_kind, callback_arguments, extras = KINDS[kind]
    follower, callback = Follower(), EMACallback(**callback_arguments, **switches)
    order = [follower, callback, *callbacks]
    trainer = trained(folder, settings, kind=trainer_kind, callbacks=order, **extras, **arguments)
    return trainer, follower, callback


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a function that runs a kind of training once and keeps the result for later calls."""

    @functools.cache
    def get(kind, *, epochs=False):
        folder = tmp_path_factory.mktemp("run")
        return run(
            folder, kind, SKIPPING if kind != "stock" else PLAIN, EPOCHS if epochs else STEPS
        )

    return get


def evaluations(trainer):
    """Return the logged losses of evaluations by step."""
    return {e["step"]: e["eval_loss"] for e in logged(trainer) if "eval_loss" in e}


@pytest.mark.parametrize("kind", KINDS)
def test_the_average(runs, kind):
    """The average over applied updates equals that of torch's own function."""
    _, follower, callback = runs(kind)

    assert_same_state(follower.averages[NUM_STEPS], dict(callback.ema.named_averages()))


class GradualUnfreezing(TrainerCallback):
    """Freeze the embedding for the first three steps."""

    def on_train_begin(self, _args, _state, _control, model=None, **_):
        model.get_parameter(WEIGHT).requires_grad_(requires_grad=False)

    def on_step_begin(self, _args, state, _control, model=None, **_):
        model.get_parameter(WEIGHT).requires_grad_(state.global_step >= 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_of_weights_that_are_unfrozen_later(tmp_path, kind):
    """It is what it would be if the weights had been averaged from the beginning."""
    trainer_kind, callback_arguments, extras = KINDS[kind]
    follower, callback = Follower(), EMACallback(**callback_arguments)
    callbacks = [GradualUnfreezing(), follower, callback]
    trained(tmp_path, PLAIN, kind=trainer_kind, callbacks=callbacks, **extras, **STEPS)

    averages = dict(callback.ema.named_averages())
    assert averages.keys() == follower.averages[NUM_STEPS].keys()
    for name, expected in follower.averages[NUM_STEPS].items():
        torch.testing.assert_close(averages[name], expected)
    assert torch.equal(follower.raw[3][WEIGHT], follower.raw[1][WEIGHT])
    assert not torch.equal(follower.raw[4][WEIGHT], follower.raw[3][WEIGHT])


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [False, True], ids=["steps", "epochs"])
def test_evaluation(runs, tmp_path, kind, epochs):
    """Every evaluation uses the averages of its step and logs their loss."""
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
    """The raw weights are restored before a checkpoint is saved."""
    trainer, follower, _ = runs(kind, epochs=epochs)

    for step, weights in follower.saved.items():
        checkpoint = f"{trainer.args.output_dir}/checkpoint-{step}"
        assert_same_state(follower.raw[step], weights)
        assert_same_state(follower.raw[step], load_file(f"{checkpoint}/model.safetensors"))


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_training_itself(runs, tmp_path, kind):
    """Losses and weights of the training equal those of a training without the callback."""
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
    """Each checkpoint holds the averages of its step as a loadable model."""
    trainer, follower, _ = runs(kind, epochs=epochs)

    assert len(follower.saved) == (2 if epochs else 6)
    for step in follower.saved:
        folder = Path(trainer.args.output_dir) / f"checkpoint-{step}" / "ema"
        assert files(folder) == ["config.json", "generation_config.json", "model.safetensors"]
        loaded = SpoiltGPT2.from_pretrained(folder)
        assert_same_state(follower.averages[step], weights_of(loaded))


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_best_model(runs, kind):
    """The metric of the averages selects the best checkpoint, and its averages are loaded."""
    trainer, follower, _ = runs(kind)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert trainer.state.best_global_step == best != NUM_STEPS
    assert trainer.state.best_metric == losses[best]
    assert not torch.equal(follower.averages[best][WEIGHT], follower.raw[best][WEIGHT])
    assert_same_state(follower.averages[best], weights_of(trainer.model))


def test_evaluation_without_averages(tmp_path):
    """With ``evaluate=False``, raw weights are evaluated and loaded; averages are exported."""
    trainer, follower, _ = run(tmp_path, "own average", evaluate=False)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert losses[4] == evaluated_by_hand(tmp_path / "hand", follower.raw[4])
    assert_same_state(follower.raw[best], weights_of(trainer.model))
    loaded = SpoiltGPT2.from_pretrained(tmp_path / "checkpoint-4" / "ema")
    assert_same_state(follower.averages[4], weights_of(loaded))


def test_no_export(tmp_path):
    """With ``export=False``, there is no ``ema`` folder, and the best raw weights are loaded."""
    trainer, follower, _ = run(tmp_path, "own average", export=False)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert losses[4] == evaluated_by_hand(tmp_path / "hand", follower.averages[4])
    assert not list(tmp_path.glob("checkpoint-*/ema*"))
    assert_same_state(follower.raw[best], weights_of(trainer.model))


def test_best_is_not_loaded(tmp_path):
    """With ``load_best=False``, the model ends with the raw weights of the best checkpoint."""
    trainer, follower, _ = run(tmp_path, "its average", load_best=False)
    losses = evaluations(trainer)
    best = max(losses, key=losses.get)

    assert_same_state(follower.raw[best], weights_of(trainer.model))


def test_nothing_is_loaded_that_the_trainer_does_not_load(tmp_path):
    """Without ``load_best_model_at_end``, the model ends with its last raw weights."""
    arguments = STEPS | {"load_best_model_at_end": False}
    trainer, follower, _ = run(tmp_path, "its average", arguments=arguments)

    assert_same_state(follower.raw[NUM_STEPS], weights_of(trainer.model))


def test_settings_of_its_own_average(tmp_path):
    """The callback creates its average with `decay`, `warmup` and `update_every`."""
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
    """``trainer.evaluate()`` uses raw weights after training, and averages inside ``swap()``."""
    arguments = STEPS | {"load_best_model_at_end": False}
    trainer, follower, callback = run(tmp_path, "its average", arguments=arguments)
    raw = trainer.evaluate()["eval_loss"]
    with callback.ema.swap():
        averaged = trainer.evaluate()["eval_loss"]

    assert averaged == evaluated_by_hand(tmp_path / "hand", follower.averages[NUM_STEPS])
    assert raw == evaluated_by_hand(tmp_path / "hand", follower.raw[NUM_STEPS])


def test_loading_needs_evaluation_and_export():
    """``load_best`` without ``evaluate`` or ``export`` raises an error."""
    for switches in ({"evaluate": False}, {"export": False}):
        with pytest.raises(ValueError, match="`load_best` needs evaluate=True and export=True"):
            EMACallback(load_best=True, **switches)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"decay": 0.9}, "decay=0.9"),
        ({"warmup": True}, "warmup=True"),
        ({"warmup": False}, "warmup=False"),
        ({"update_every": 2}, "update_every=2"),
        ({"decay": 0.9, "update_every": 1}, "decay=0.9, update_every=1"),
    ],
)
def test_settings_beside_an_average(tmp_path, settings, given):
    """Settings of the callback raise an error if the Trainer has an average of its own."""
    trainer_kind, _, extras = KINDS["its average"]
    trainer = new_trainer(
        tmp_path, PLAIN, kind=trainer_kind, callbacks=[EMACallback(**settings)], **extras
    )
    before = weights_of(trainer.model)

    with pytest.raises(ValueError, match=f"EMACallback got {given}, but the Trainer has"):
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
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=message):
        EMACallback(**arguments)


def test_sharded_weights(tmp_path):
    """Sharded weights raise an error at the start of training, before the first checkpoint."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        network = torch.nn.Linear(2, 2)
        distribute_module(network, mesh)
        trainer = new_trainer(tmp_path, PLAIN, kind=Trainer)
        with pytest.raises(ValueError, match="cannot average weights that are sharded over ranks"):
            EMACallback().on_train_begin(
                trainer.args, trainer.state, trainer.control, model=network
            )
    finally:
        torch.distributed.destroy_process_group()


def test_before_training():
    """Before training the callback's average is None."""
    assert EMACallback().ema is None
