"""A training ends when its monitored value no longer improves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfwrap import Model
from mfwrap.callbacks import Callback, EarlyStopping
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
