"""A training ends when its monitored value no longer improves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from mfwrap import Model
from mfwrap.callbacks import Callback, EarlyStopping, History, as_trainer_callback
from mfwrap.trainer import MFTrainer
from support.callback_runs import fit_with_values
from support.model_runs import Notes, batches, classifier, sgd


def epochs_of(values, name="eval_loss", **settings) -> int:
    """Return the number of epochs after which a training with these values ends."""
    notes = Notes()
    fit_with_values(values, [EarlyStopping(name, **settings), notes], name=name)
    return notes.calls.count("on_train_epoch_end")


@pytest.mark.parametrize(
    ("values", "settings", "epochs"),
    [
        ([3.0, 2.0, 1.0], {}, 3),
        ([3.0, 2.0, 2.0, 1.0], {}, 3),
        ([3.0, 2.0, 2.0, 1.0], {"patience": 1}, 3),
        ([3.0, 2.0, 2.0, 1.0, 1.0, 1.0], {"patience": 2}, 6),
        ([3.0, 2.9, 2.8, 1.0], {"min_delta": 0.5, "patience": 2}, 3),
        ([1.0, 0.0, 0.0], {}, 3),
        ([0.0, 1.0, 2.0], {"mode": "max"}, 3),
        ([3.0, 2.0, 1.0, 0.5], {"baseline": 0.1, "patience": 3}, 3),
        ([3.0, 2.0, 1.0, 0.5], {"baseline": 2.5, "patience": 2}, 4),
        ([1.0, float("nan"), 0.5], {}, 2),
    ],
)
def test_epochs(values, settings, epochs):
    """Training ends after `patience` epochs without an improvement; NaN never improves."""
    assert epochs_of(values, **settings) == epochs


@given(
    values=st.lists(st.integers(0, 5).map(float), min_size=1, max_size=8),
    patience=st.integers(0, 3),
)
def test_it_ends_after_patience_epochs_without_a_new_best(values, patience):
    """Training ends ``max(patience, 1)`` epochs after the first epoch with the best value."""
    expected = len(values)
    for epoch in range(1, len(values) + 1):
        since_best = epoch - 1 - min(range(epoch), key=lambda i: (values[i], i))
        if since_best >= max(patience, 1):
            expected = epoch
            break

    assert epochs_of(values, patience=patience) == expected


@pytest.mark.parametrize(("name", "downward"), [("mae", True), ("accuracy", False)])
def test_auto_knows_errors(name, downward):
    """With ``mode="auto"``, errors improve by falling and other metrics by rising."""
    assert epochs_of([1.0, 2.0, 3.0], name) == (2 if downward else 3)


def test_the_best_weights_are_restored(capsys):
    """The model ends with the weights of the best epoch, and a line shows the best value."""
    seen = []

    class Sees(Callback):
        def on_train_epoch_end(self, run_context):
            weights = run_context.original_args().network[0].weight
            seen.append(weights.detach().clone())

    stopping = EarlyStopping(patience=2, restore_best_weights=True, verbose=True)
    network = fit_with_values([2.0, 1.0, 3.0, 4.0, 5.0], [Sees(), stopping])

    assert len(seen) == 4
    assert torch.equal(network[0].weight, seen[1])
    assert stopping.stopped_epoch == 4
    assert capsys.readouterr().out == "Epoch 00004: early stopping, best eval_loss: 1.0\n"


def test_the_loss_of_the_last_step_needs_no_evaluation():
    """``monitor="loss"`` works in a training without evaluations."""
    network = classifier()
    notes = Notes()
    optimizer = sgd(network, lr=0.0)
    Model(network, nn.CrossEntropyLoss(), optimizer).train(
        5, batches(1), callbacks=[EarlyStopping("loss"), notes]
    )

    assert notes.calls.count("on_train_epoch_end") == 2


def test_an_unknown_value_does_not_count(caplog):
    """An epoch without the monitored value does not count, and a warning names the value."""
    with caplog.at_level("WARNING", logger="mfwrap"):
        fit_with_values([1.0, 1.0], [EarlyStopping("F1")], name="mse")

    assert "EarlyStopping ignores epoch 1: it has no value for `F1`" in caplog.messages


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"monitor": 3}, TypeError),
        ({"patience": -1}, ValueError),
        ({"min_delta": -1}, ValueError),
        ({"min_delta": "1"}, TypeError),
        ({"mode": "down"}, ValueError),
        ({"baseline": "1"}, TypeError),
        ({"verbose": 1}, TypeError),
        ({"restore_best_weights": 1}, TypeError),
    ],
)
def test_bad_arguments_are_refused_by_name(settings, error):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=f"`{next(iter(settings))}` must be"):
        EarlyStopping(**settings)


class OneWeight(nn.Module):
    """A network whose only weight is its loss on the evaluation data."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([5.0]))

    def forward(self, labels):
        loss = (self.weight - labels).square().mean() if self.training else self.weight.sum()
        return {"loss": loss}


class StopAt(TrainerCallback):
    """Save and stop after a step, as a signal does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, _args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def stopped_training(folder, *callbacks, strategy="epoch", patience=3, **settings):
    """Train for up to eight epochs of two steps; the best weights are those of the second."""
    arguments = TrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        num_train_epochs=8,
        per_device_train_batch_size=1,
        learning_rate=0.25,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        eval_strategy=strategy,
        **{"save_strategy": "epoch", "eval_steps": 2, **settings},
    )
    rows = [{"labels": torch.ones(1)}] * 2
    stopping = EarlyStopping(patience=patience, restore_best_weights=True)
    trainer = MFTrainer(
        OneWeight(),
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[as_trainer_callback(stopping), Rise(), *callbacks],
    )
    trainer.train(resume_from_checkpoint="auto")
    return trainer, stopping


class Rise(TrainerCallback):
    """Make the weight, which is the evaluation's loss, larger from the third epoch on."""

    def on_step_begin(self, _args, state, _control, *, model, **_):
        with torch.no_grad():
            if state.global_step >= 4:
                model.weight += 2.0


def losses(trainer):
    """Return the losses of the evaluations, by step."""
    return {
        one["step"]: one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one
    }


@pytest.mark.parametrize("stop", [4, 5, 8, 9])
def test_a_resumed_training_ends_at_the_same_step_with_the_same_weights(tmp_path, stop):
    """Best value, patience and best weights are in the checkpoints of `MFTrainer`."""
    histories = History(), History()
    adapted = [as_trainer_callback(history) for history in histories]
    whole, uninterrupted = stopped_training(tmp_path / "whole", adapted[0])
    stopped_training(tmp_path / "resumed", StopAt(stop), as_trainer_callback(History()))
    resumed, stopping = stopped_training(tmp_path / "resumed", adapted[1])

    assert (stopping.best, stopping.stopped_epoch) == (uninterrupted.best, 5)
    assert resumed.state.global_step == whole.state.global_step == 10
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert float(whole.model.weight.detach()) == pytest.approx(losses(whole)[4])
    assert histories[0].epoch == histories[1].epoch == {"epoch": [1, 2, 3, 4, 5]}
    for name in ("net_output", "eval_loss"):
        assert histories[0].history[name] == histories[1].history[name]


def test_auto_after_early_stopping_trains_no_further(tmp_path):
    """A training that patience has ended is not continued by the same command."""
    stopped_training(tmp_path)
    again, _ = stopped_training(tmp_path)

    assert again.state.global_step == 10


@pytest.mark.parametrize("stop", [3, 4, 5, 7, 8])
def test_evaluations_every_few_steps_count(tmp_path, stop, caplog):
    """With evaluations by steps, they are counted as transformers' own callback counts them."""
    every = {"strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    stock = EarlyStoppingCallback(early_stopping_patience=3)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    patient, _ = stopped_training(tmp_path / "stock", stock, patience=99, **every, **best)
    whole, uninterrupted = stopped_training(tmp_path / "whole", **every)
    stopped_training(tmp_path / "resumed", StopAt(stop), **every)
    resumed, stopping = stopped_training(tmp_path / "resumed", **every)
    again, _ = stopped_training(tmp_path / "resumed", **every)

    assert whole.state.global_step == patient.state.global_step == 7
    assert uninterrupted.best == stopping.best == losses(whole)[4]
    assert resumed.state.global_step == again.state.global_step == 7
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert torch.equal(whole.model.weight, patient.model.weight)
    assert "ignores epoch" not in caplog.text


def test_history_has_each_evaluation(tmp_path):
    """With evaluations by steps, the metrics of each are collected, and the losses of epochs."""
    history = History()
    adapted = as_trainer_callback(history)
    trainer, _ = stopped_training(tmp_path, adapted, strategy="steps", eval_steps=1)

    assert history.history["eval_loss"] == list(losses(trainer).values())
    assert len(history.history["net_output"]) == len(history.epoch["epoch"]) == 3
