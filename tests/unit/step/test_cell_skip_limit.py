"""Too many skipped updates in a row raise an error."""

import pytest

from support.small_networks import labelled_batches
from support.spoilt.training import OPTIMIZERS, SpoiltTraining
from support.training_state import assert_same_state, training_state


def test_too_many_skips_in_a_row_are_an_error_one_step_late():
    """After too many skips in a row, the next step raises an error and changes nothing.

    The error names the last skipped step, its loss scale and the non-finite groups.
    """
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"], max_consecutive_skips=3, local_norm=True)
    [batch] = labelled_batches(1)
    training.step(batch)
    for _ in range(3):
        training.step(batch, bad=True)
    before = training_state(training.network, training.optimizer, training.schedule)
    averages_before = training.averages()

    message = r"3 updates in a row .* step 4; the loss scale is 256 now; .*\['layers.0.weight'\]"
    with pytest.raises(RuntimeError, match=message):
        training.step(batch)

    after = training_state(training.network, training.optimizer, training.schedule)
    assert_same_state(before, after)
    assert_same_state(averages_before, training.averages())
    assert all(parameter.grad is None for parameter in training.network.parameters())


def test_a_flush_tells_of_too_many_skips():
    """A flush at the end of training raises the error without a further step."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"], max_consecutive_skips=1)
    training.step(labelled_batches(1)[0], bad=True)

    with pytest.raises(RuntimeError, match="1 updates in a row were skipped"):
        training.cell.flush()


def test_skips_that_are_not_in_a_row_are_no_error():
    """An applied update resets the count of consecutive skips."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"], max_consecutive_skips=2)
    [batch] = labelled_batches(1)

    for _ in range(4):
        training.step(batch, bad=True)
        training.step(batch)
    training.cell.flush()

    assert training.cell.last_report.skipped_updates.item() == 4


def test_without_a_limit_training_may_skip_for_ever():
    """With ``max_consecutive_skips=None``, any number of skips is allowed."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"], max_consecutive_skips=None)
    [batch] = labelled_batches(1)

    for _ in range(120):
        training.step(batch, bad=True)
    training.cell.flush()

    assert training.cell.last_report.consecutive_skips.item() == 120
