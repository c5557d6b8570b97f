"""Evaluations use the right weights: with several data sets, at the start, when interrupted."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from mfwrap.callbacks import EMACallback, MetricsRecorder, TrainingStateMonitor
from mfwrap.records.evaluations import last_has_averages, named
from mfwrap.records.json_lines import read_json_lines
from mfwrap.trainer import MFTrainer
from support.averaged_training import (
    DECAY,
    EPOCHS,
    KINDS,
    STEPS,
    WEIGHT,
    Follower,
    evaluated_by_hand,
    weights_of,
)
from support.resumed_training import (
    NUM_STEPS,
    PLAIN,
    StopAfter,
    logged,
    new_trainer,
    spoil_random_states,
)
from support.spoilt.gpt2 import Rows
from support.training_state import assert_same_state

TWO = {"one": Rows(), "two": Rows((0,))}
"""Two data sets; the loss on the second one is NaN."""

SHORT = STEPS | {"max_steps": 6}
SHORT_EPOCHS = EPOCHS | {"max_steps": -1}
BEST = {"save_strategy": "best"}


class Seen(TrainerCallback):
    """Keep copies of the weights at every evaluation, in order."""

    def __init__(self) -> None:
        self.evaluated = []

    def on_evaluate(self, _args, state, _control, model=None, **_) -> None:
        """Keep the step and a copy of the weights."""
        self.evaluated.append((state.global_step, weights_of(model)))


class At(TrainerCallback):
    """Call functions at events of one step.

    Args:
        step: Number of updates done when the functions are called.
        actions: Functions by the name of their event, called with control and model.
    """

    def __init__(self, step, **actions: Callable) -> None:
        self._step = step
        for event, action in actions.items():
            setattr(self, event, self._only_at_step(action))

    def _only_at_step(self, action):
        def act(_args, state, control, model=None, **_):
            if state.global_step == self._step:
                action(control, model)

        return act


def trainer_of(folder, kind, *, after=(), before=(), data=None, evaluate=True, **keywords):
    """Return an untrained trainer, its `Follower` and `Seen`, and the tested callback."""
    trainer_kind, callback_arguments, extras = KINDS[kind]
    callback = EMACallback(**callback_arguments, evaluate=evaluate)
    follower, seen = Follower(), Seen()
    best = {"metric_for_best_model": "eval_one_loss"} if data else {}
    trainer = new_trainer(
        folder,
        PLAIN,
        kind=trainer_kind,
        callbacks=[follower, seen, *before, callback, *after],
        **extras,
        **(SHORT | keywords | best),
    )
    if data:
        trainer.eval_dataset = data
    return trainer, follower, seen, callback


def assert_seen(seen, follower, num_datasets):
    """Check that each data set was evaluated with the averages of its step."""
    steps = [step for step, _ in seen.evaluated]
    assert len(steps) == num_datasets * len(set(steps)) > 0
    for step, weights in seen.evaluated:
        assert_same_state(follower.averages[step], weights)


def losses_without_callback(folder, kind, *, after=(), data=None, **keywords):
    """Return the losses of a run with the same evaluations and without the callback."""
    trainer, _, _, callback = trainer_of(folder, kind, after=after, data=data, **keywords)
    trainer.remove_callback(callback)
    trainer.train()
    return losses(trainer)


def losses(trainer):
    """Return the logged losses of training."""
    return [entry["loss"] for entry in logged(trainer) if "loss" in entry]


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("kind", ["its average", "stock"])
@pytest.mark.parametrize("arguments", [{}, BEST, SHORT_EPOCHS], ids=["steps", "best", "epochs"])
def test_several_datasets(tmp_path, kind, arguments):
    """Averages are evaluated on all data sets and loaded at the end; raw weights are saved."""
    trainer, follower, seen, _ = trainer_of(tmp_path, kind, data=TWO, **arguments)
    trainer.train()

    assert_seen(seen, follower, num_datasets=2)
    assert follower.saved
    for step in follower.saved:
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert_same_state(follower.raw[step], load_file(checkpoint / "model.safetensors"))
    best = trainer.state.best_global_step
    assert_same_state(follower.averages[best], weights_of(trainer.model))


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_training_between_evaluations_of_several_datasets(tmp_path, kind):
    """Training continues from the raw weights, even if nothing is saved in between."""
    arguments = {"data": TWO, "save_strategy": "no", "load_best_model_at_end": False}
    trainer, _, _, _ = trainer_of(tmp_path, kind, **arguments)
    trainer.train()

    assert losses(trainer) == losses_without_callback(tmp_path / "without", kind, **arguments)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_the_best_model_is_loaded_while_averages_are_held(tmp_path, kind):
    """The raw weights that were put aside do not overwrite the loaded best model."""
    # The first evaluation is the best, so only its checkpoint is saved. No save after the last
    # evaluation restores the raw weights before the best model is loaded.
    trainer, follower, _, _ = trainer_of(tmp_path, kind, data=TWO, **(SHORT_EPOCHS | BEST))
    trainer.args.greater_is_better = True
    trainer.train()

    assert list(follower.saved) == [6]
    assert trainer.state.global_step == NUM_STEPS
    assert_same_state(follower.averages[6], weights_of(trainer.model))


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [None, TWO], ids=["one dataset", "two datasets"])
def test_at_the_start(tmp_path, kind, data):
    """After a resume, the evaluation at the start uses averages; training uses raw weights."""
    stopped, follower, _, _ = trainer_of(tmp_path, kind, after=[StopAfter(4)], data=data)
    stopped.args.load_best_model_at_end = False
    stopped.train()
    again, resumed, seen, _ = trainer_of(
        tmp_path, kind, data=data, eval_on_start=True, max_steps=5, learning_rate=0.0
    )
    spoil_random_states()
    again.args.load_best_model_at_end = False
    again.train(resume_from_checkpoint=True)

    at_start = [weights for step, weights in seen.evaluated if step == 4]
    assert len(at_start) == (2 if data else 1)
    for weights in at_start:
        assert_same_state(follower.averages[4], weights)
    assert not torch.equal(follower.averages[4][WEIGHT], follower.raw[4][WEIGHT])
    assert_same_state(dict(resumed._before), resumed.raw[5])


def test_at_the_start_without_averages(tmp_path):
    """With ``evaluate=False``, the evaluation at the start uses raw weights."""
    callback, seen = EMACallback(DECAY, evaluate=False), Seen()
    trainer = new_trainer(
        tmp_path, PLAIN, kind=Trainer, callbacks=[seen, callback], max_steps=1, eval_on_start=True
    )
    begun = weights_of(trainer.model)
    trainer.train()

    assert_same_state(begun, seen.evaluated[0][1])


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_an_evaluation_that_is_called_off(tmp_path, kind):
    """If a later callback cancels an evaluation, saving and training use the raw weights."""

    def call_off(control, _model):
        control.should_evaluate = False

    arguments = {"after": [At(4, on_step_end=call_off)], "load_best_model_at_end": False}
    trainer, follower, seen, _ = trainer_of(tmp_path, kind, **arguments)
    trainer.train()

    assert [step for step, _ in seen.evaluated] == [2, 6]
    assert_same_state(follower.raw[4], load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    assert losses(trainer) == losses_without_callback(tmp_path / "without", kind, **arguments)


def interrupt(_control, _model):
    """Raise KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_an_evaluation_that_is_interrupted(tmp_path, kind):
    """After an interrupted evaluation the same trainer resumes exactly from its checkpoint."""
    begun = []

    def begin(_control, model):
        begun.append(weights_of(model))
        begun.append({name: each.clone() for name, each in callback.ema.named_averages()})
        raise KeyboardInterrupt

    after = [At(4, on_prediction_step=interrupt), At(2, on_train_begin=begin)]
    trainer, follower, _, callback = trainer_of(tmp_path, kind, after=after)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    expected = [follower.raw[2], follower.averages[2]]

    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=True)

    assert_same_state(expected[0], begun[0])
    assert_same_state(expected[1], begun[1])


@pytest.mark.parametrize("kind", ["own average", "stock"])
def test_raw_weights_after_an_interruption(tmp_path, kind):
    """If an evaluation is interrupted, an `MFTrainer` restores the raw weights by itself.

    After a stock Trainer ``put_weights_back`` restores them.
    """
    trainer, follower, _, callback = trainer_of(
        tmp_path, kind, after=[At(4, on_prediction_step=interrupt)]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    if kind == "stock":
        assert_same_state(follower.averages[4], weights_of(trainer.model))
        callback.put_weights_back()
    assert_same_state(follower.raw[4], weights_of(trainer.model))


def test_an_evaluation_by_hand_after_an_evaluation_that_failed(tmp_path):
    """It evaluates the weights of the model, not the averages that the training requested."""
    trainer, follower, _, _ = trainer_of(
        tmp_path, "its average", after=[At(4, on_prediction_step=interrupt)]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.state.global_step = 0  # do not interrupt again

    expected = evaluated_by_hand(tmp_path / "hand", follower.raw[4])
    assert [trainer.evaluate()["eval_loss"] for _ in range(2)] == [expected] * 2


def test_a_state_that_is_asked_for_between_two_datasets(tmp_path):
    """``state_dict`` between two data sets returns raw weights, and a warning says so."""
    asked = []

    class Asking(TrainerCallback):
        def on_evaluate(self, _args, _state, _control, metrics=None, model=None, **_) -> None:
            if "eval_one_loss" in metrics:
                asked.append(model.state_dict()[WEIGHT].clone())

    trainer, follower, _, _ = trainer_of(
        tmp_path, "stock", after=[Asking()], data=TWO, max_steps=2, load_best_model_at_end=False
    )
    with pytest.warns(UserWarning, match="a data set was evaluated with raw weights"):
        trainer.train()

    assert torch.equal(asked[0], follower.raw[2][WEIGHT])


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_an_evaluation_by_hand_in_the_middle(tmp_path, kind):
    """``trainer.evaluate()`` in a callback uses the raw weights and leaves them in place."""
    by_hand = []

    def evaluate(_control, _model):
        by_hand.append(trainer.evaluate()["eval_loss"])

    trainer, follower, _, _ = trainer_of(
        tmp_path, kind, after=[At(3, on_step_end=evaluate)], load_best_model_at_end=False
    )
    trainer.train()

    assert by_hand == [evaluated_by_hand(tmp_path / "hand", follower.raw[3])]
    assert_same_state(follower.raw[6], weights_of(trainer.model))


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("kind", ["its average", "stock"])
@pytest.mark.parametrize("evaluate", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_records_say_which_weights_were_evaluated(tmp_path, kind, evaluate, is_first):
    """Results of averaged weights are called ``ema_eval_...`` in each record, others ``eval_...``.

    The names are the same if the monitors are called before the averages are put back, and after.
    """
    by_hand = []
    monitors = [
        MetricsRecorder(tmp_path),
        TrainingStateMonitor(folder=tmp_path, local_loss_format=["jsonl"]),
        At(3, on_step_end=lambda _control, _model: by_hand.append(trainer.evaluate()["eval_loss"])),
    ]
    trainer, follower, _, _ = trainer_of(
        tmp_path,
        kind,
        **{"before" if is_first else "after": monitors},
        load_best_model_at_end=False,
        metric_for_best_model=None,
        eval_on_start=True,
        evaluate=evaluate,
    )
    trainer.train()
    name, weights = (
        ("ema_eval_loss", follower.averages) if evaluate else ("eval_loss", follower.raw)
    )
    expected = {
        step: {name: evaluated_by_hand(tmp_path / "hand", weights[step])}
        for step in follower.evaluated
        if step not in {0, 3}
    }

    assert len(expected) > 1
    log = trainer.state.log_history
    marked = {
        entry["step"]: last_has_averages(log[: index + 2])
        for index, entry in enumerate(log)
        if "eval_loss" in entry
    }
    assert marked == {0: evaluate, 3: False} | dict.fromkeys(expected, evaluate)
    for file in ("metrics", "training_state"):
        found = {
            record["step"]: {key: value for key, value in record.items() if "eval_loss" in key}
            for record in read_json_lines(tmp_path / f"{file}.jsonl")
            if any("eval_loss" in key for key in record)
        }
        assert list(found.pop(0)) == [name]
        assert found.pop(3) == {"eval_loss": by_hand[0]}
        assert found == expected


@pytest.mark.parametrize("is_first", [False, True])
def test_a_log_of_the_users_own_after_an_evaluation(tmp_path, is_first):
    """What another callback logs does not hide which weights were evaluated."""
    log = At(2, on_evaluate=lambda *_: trainer.log({"own": 1.0}))
    place = {"before" if is_first else "after": [log]}
    trainer, _, _, _ = trainer_of(
        tmp_path, "its average", **place, max_steps=2, load_best_model_at_end=False
    )
    trainer.train()

    (found,) = [one for one in named(trainer.state.log_history) if "ema_eval_loss" in one]
    assert found["step"] == 2


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_second_evaluation_of_the_same_step(tmp_path, is_swapped):
    """What is evaluated by hand after an evaluation of averages has the name of its weights.

    Results that are equal to those of this step are not recorded again. A callback that asks for
    the model's state within ``on_evaluate`` changes no name.
    """

    def evaluate(*_):
        with callback.ema.swap() if is_swapped else contextlib.nullcontext():
            trainer.evaluate()

    recorder = MetricsRecorder(tmp_path)
    trainer, _, _, callback = trainer_of(
        tmp_path,
        "stock",
        before=[At(2, on_evaluate=lambda _, model: model.state_dict()), recorder],
        after=[At(2, on_save=evaluate)],
        load_best_model_at_end=False,
        metric_for_best_model=None,
        max_steps=2,
    )
    # The callback says that a further data set would be evaluated with raw weights.
    with pytest.warns(UserWarning, match="a data set was evaluated with raw weights"):
        trainer.train()

    records = [one for one in read_json_lines(tmp_path / "metrics.jsonl") if "step" in one]
    names = [key for record in records for key in record if "eval_loss" in key]
    assert names == ["ema_eval_loss"] + ["eval_loss"] * (not is_swapped)
    assert last_has_averages(trainer.state.log_history) == is_swapped


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_evaluation_and_prediction_after_training(tmp_path, kind):
    """After training, ``evaluate`` and ``predict`` use the best averages, bit for bit.

    The log and the card say so.
    """
    trainer, follower, _, callback = trainer_of(tmp_path, kind)
    trainer.train()
    best = follower.averages[trainer.state.best_global_step]

    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    assert last_has_averages(trainer.state.log_history)
    if kind != "stock":
        trainer.create_model_card()
        card = Path(trainer.args.output_dir, "README.md").read_text(encoding="utf-8")
        assert f"{trainer.state.best_metric:.4f}"[:4] in card
        assert "which this model does not have" not in card
    assert trainer.predict(Rows()).metrics["test_loss"] == trainer.state.best_metric
    with callback.ema.swap():
        averaged = trainer.predict(Rows()).metrics["test_loss"]
    assert averaged == evaluated_by_hand(tmp_path / "hand", follower.averages[6])
    assert_same_state(best, weights_of(trainer.model))


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_two_trainings(tmp_path, kind):
    """A second training starts a new average from the final weights of the first training."""
    trainer, follower, seen, callback = trainer_of(tmp_path, kind)
    trainer.train()
    first = dict(callback.ema.named_averages())[WEIGHT].clone()
    seen.evaluated.clear()
    trainer.train()

    assert_seen(seen, follower, num_datasets=1)
    assert_same_state(follower.averages[6], dict(callback.ema.named_averages()))
    assert not torch.equal(first, follower.averages[6][WEIGHT])


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_two_callbacks(tmp_path, kind):
    """Two EMACallbacks in one Trainer raise an error at the start of training."""
    trainer_kind, arguments, extras = KINDS[kind]
    callbacks = [EMACallback(**arguments), EMACallback(**arguments, evaluate=False)]
    trainer = new_trainer(tmp_path, PLAIN, kind=trainer_kind, callbacks=callbacks, **extras)
    begun = weights_of(trainer.model)

    with pytest.raises(ValueError, match="a Trainer can have only one EMACallback, got two"):
        trainer.train()

    assert_same_state(begun, weights_of(trainer.model))
    trainer.remove_callback(callbacks[1])
    trainer.args.max_steps = 1
    trainer.train()


def test_one_callback_after_another(tmp_path):
    """After a Trainer has failed, a new Trainer of the same model can use a new callback."""
    failed, _, _, _ = trainer_of(tmp_path, "stock", after=[At(1, on_step_end=interrupt)])
    with pytest.raises(KeyboardInterrupt):
        failed.train()
    callback = EMACallback(DECAY)
    arguments = {"kind": MFTrainer, "callbacks": [callback], "model": failed.model}
    new_trainer(tmp_path, PLAIN, max_steps=1, **arguments).train()

    assert callback.ema.follows(failed.model.parameters())


@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_a_swap_of_the_users_own_within_an_evaluation(tmp_path, kind):
    """`swap` and `save_model` in ``on_evaluate`` have the averages, in any order of callbacks."""

    class Saving(TrainerCallback):
        def on_evaluate(self, args, _state, _control, model=None, **_):
            with callback.ema.swap():
                seen.append(weights_of(model))
                trainer.save_model(f"{args.output_dir}/swapped")

    seen = []
    trainer, follower, _, callback = trainer_of(
        tmp_path, kind, before=[Saving()], after=[Saving()], max_steps=2
    )
    trainer.args.load_best_model_at_end = False
    trainer.train()

    assert len(seen) == 2
    for weights in seen:
        assert_same_state(follower.averages[2], weights)
    saved = load_file(tmp_path / "swapped" / "model.safetensors")
    assert torch.equal(follower.averages[2][WEIGHT], saved[WEIGHT])
    assert_same_state(follower.raw[2], weights_of(trainer.model))


class OwnEvaluation(MFTrainer):
    """A trainer that calls `evaluate` itself when the training requests an evaluation."""

    def _maybe_log_save_evaluate(self, *args, **keywords):
        if self.control.should_evaluate:
            self._determine_best_metric(metrics=self.evaluate(), trial=None)
            self.control.should_evaluate = False
        super()._maybe_log_save_evaluate(*args, **keywords)


@pytest.mark.parametrize("data", [None, TWO], ids=["one dataset", "two datasets"])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_trainer_that_evaluates_by_itself(tmp_path, data, strategy):
    """It evaluates the averages, and an evaluation by a callback at the same step raw weights."""
    by_hand = []

    def evaluate(_control, _model):
        before = len(seen.evaluated)
        trainer.evaluate()
        by_hand.extend(seen.evaluated[before:])
        del seen.evaluated[before:]

    callback, follower, seen = EMACallback(DECAY), Follower(), Seen()
    settings = (SHORT if strategy == "steps" else SHORT_EPOCHS) | {"load_best_model_at_end": False}
    by_callback = At(4, on_step_end=evaluate)
    trainer = new_trainer(
        tmp_path,
        PLAIN,
        kind=OwnEvaluation,
        callbacks=[follower, seen, callback, by_callback],
        **settings | {"metric_for_best_model": "eval_one_loss" if data else "loss"},
    )
    trainer.eval_dataset = data or trainer.eval_dataset
    trainer.train()

    assert_seen(seen, follower, num_datasets=2 if data else 1)
    assert by_hand
    for number, weights in by_hand:
        assert number == 4
        assert_same_state(follower.raw[4], weights)


class Converting(torch.optim.SGD):
    """An optimizer that converts the weights for an evaluation and back, as schedule-free ones."""

    is_converted = False

    def _convert(self, *, into: bool) -> None:
        for weight in self.param_groups[0]["params"] if into != self.is_converted else ():
            weight.data.mul_(2.0 if into else 0.5)
        self.is_converted = into

    def eval(self) -> None:
        """Convert the weights for an evaluation."""
        self._convert(into=True)

    def train(self) -> None:
        """Convert the weights for the training."""
        self._convert(into=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_converts_the_weights(tmp_path, kind):
    """It converts the weights of the training, never averages, so the training is the same.

    The averages are those of the weights that the training updates.
    """
    weights, averages = [], []
    for evaluate in (False, True):
        trainer, _, seen, callback = trainer_of(
            tmp_path / str(evaluate),
            kind,
            evaluate=evaluate,
            save_strategy="no",
            load_best_model_at_end=False,
            metric_for_best_model=None,
        )
        trainer.optimizer = Converting(trainer.model.parameters(), lr=0.1)
        trainer.train()
        trainer.optimizer.train()
        averages.append(dict(callback.ema.named_averages()))
        weights.append(weights_of(trainer.model))

    assert_same_state(*weights)
    assert_same_state(*averages)
    assert_same_state(averages[1], seen.evaluated[-1][1])
    assert [step for step, _ in seen.evaluated] == [2, 4, 6]


def test_an_optimizer_that_converts_the_weights_within_a_swap(tmp_path):
    """An evaluation of averages by hand evaluates the averages, and converts the weights."""
    trainer, _, seen, callback = trainer_of(
        tmp_path,
        "its average",
        save_strategy="no",
        eval_strategy="no",
        load_best_model_at_end=False,
        metric_for_best_model=None,
    )
    trainer.optimizer = Converting(trainer.model.parameters(), lr=0.1)
    trainer.train()
    before = weights_of(trainer.model)
    with callback.ema.swap():
        trainer.evaluate()

    assert_same_state(dict(callback.ema.named_averages()), seen.evaluated[-1][1])
    trainer.optimizer.train()
    assert_same_state(before, weights_of(trainer.model))


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("kind", ["its average", "stock"])
def test_weights_that_are_loaded_after_training(tmp_path, kind):
    """Their evaluation is not marked as one of averages; a copy of the model changes no mark."""
    trainer, _, _, _ = trainer_of(tmp_path, kind)
    trainer.train()
    raw = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    copy.deepcopy(trainer.model).load_state_dict(raw, strict=False)
    trainer.evaluate()
    assert last_has_averages(trainer.state.log_history)

    trainer.model.load_state_dict(raw, strict=False)
    trainer.evaluate()
    assert not last_has_averages(trainer.state.log_history)
