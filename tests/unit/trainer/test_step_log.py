"""Losses that are counted together, against a count one by one in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.trainer.log import StepLog

CPU = torch.device("cpu")
losses = st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(updates=st.lists(st.tuples(losses, losses, st.floats(0.01, 0.99)), max_size=90))
def test_the_sum_is_completed_by_the_share_that_was_left_out(updates):
    """However many losses there are, whether their shares are numbers or tensors."""
    log = StepLog(CPU)
    kept = total = torch.zeros((), dtype=torch.float64)
    left_out = 0
    for first, second, share in updates:
        shares = (share, torch.tensor(1 - share, dtype=torch.float64))
        for loss, part in zip((first, second), shares, strict=True):
            filtered = log.filtered(torch.tensor(loss), part)
            assert filtered.item() == (loss if math.isfinite(loss) else 0)
            total = total + filtered.double()
            kept = kept + (part if math.isfinite(loss) else 0)
            left_out += not math.isfinite(loss)
        log.num_steps += 1

    completed = log.completed_sum(total)

    if left_out == 2 * len(updates):
        assert completed == total
    else:
        expected = total * (len(updates) / kept)
        torch.testing.assert_close(completed, expected, rtol=1e-9, atol=1e-9)
    state = log.state_dict()
    assert (state["left_out"], state["non_finite_losses"]) == (left_out, left_out)
    assert state["num_losses"] == 2 * len(updates)


@pytest.mark.parametrize("waiting", [1, 63, 64, 65, 200])
def test_a_state_has_the_losses_that_wait(waiting):
    """Also after loading it, when what waited there is dropped."""
    log, other = StepLog(CPU), StepLog(CPU)
    for _ in range(waiting):
        log.filtered(torch.tensor(math.nan), 0.25)
        other.filtered(torch.tensor(math.inf), 0.5)

    other.load_state_dict(log.state_dict())

    assert other.state_dict() == log.state_dict()
    assert other.state_dict()["left_share"] == waiting / 4


def test_without_the_filter_losses_are_counted_as_they_are():
    """And none is left out."""
    log = StepLog(CPU)
    log.restart(filters=False)

    assert log.filtered(torch.tensor(math.inf), 0.5).isinf()
    state = log.state_dict()
    assert (state["non_finite_losses"], state["left_out"], state["left_share"]) == (1, 0, 0)
