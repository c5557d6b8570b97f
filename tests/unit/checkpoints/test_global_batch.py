"""The accumulation steps of a resumed training keep its global batch, or it is refused."""

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.checkpoints.global_batch import GlobalBatch, resumed_accumulation

CHECKPOINT = Path("run/checkpoint-4")
ADVICE = "start 1, 2, 3, 4, 6 or 12 ranks"
small = st.integers(1, 12)


def new(num_ranks, batch_size, steps, configured=None):
    """Return a global batch whose accumulation is that of the settings by default."""
    return GlobalBatch(num_ranks, batch_size, steps, configured or steps)


@given(saved=st.tuples(small, small, small), num_ranks=small, batch_size=small)
def test_the_global_batch_stays_the_same_or_the_run_is_refused(saved, num_ranks, batch_size):
    """Only a number of ranks that does not divide the global batch is refused."""
    before = new(*saved)
    now = new(num_ranks, batch_size, before.accumulation_steps)
    fits = before.size % (num_ranks * batch_size) == 0
    if fits:
        steps = resumed_accumulation(before, now, CHECKPOINT)
        assert now._replace(accumulation_steps=steps).size == before.size
    elif num_ranks == before.num_ranks:
        with pytest.warns(UserWarning, match="updates train on"):
            assert resumed_accumulation(before, now, CHECKPOINT) == now.accumulation_steps
    else:
        with pytest.raises(ValueError, match="cannot resume from"):
            resumed_accumulation(before, now, CHECKPOINT)


@given(first=st.integers(1, 4), others=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), max_size=5))
def test_a_chain_of_resumes(first, others):
    """Resuming several times, with the same settings each time, keeps the global batch."""
    saved = new(first, 1, 12 // first, 12 // first)
    for num_ranks in others:
        now = new(num_ranks, 1, saved.configured_steps)
        steps = resumed_accumulation(saved, now, CHECKPOINT)
        saved = now._replace(accumulation_steps=steps)
    assert saved.size == 12


@pytest.mark.parametrize(
    ("saved", "now", "start", "advice"),
    [
        (new(2, 1, 6), new(5, 1, 6), "5 ranks: an update trains on 12 rows", ADVICE),
        (
            new(1, 4, 1),
            new(2, 4, 1),
            "2 ranks with a batch size of 4: an update trains on 4 rows",
            "start 1 rank",
        ),
        (
            new(2, 4, 1),
            new(1, 3, 1),
            "1 rank with a batch size of 3: an update trains on 8 rows",
            "set the batch size to a divisor of 8",
        ),
    ],
)
def test_a_refusal_says_which_numbers_of_ranks_fit(saved, now, start, advice):
    """The message names the global batch and the numbers of ranks that divide it."""
    with pytest.raises(ValueError, match="cannot resume") as caught:
        resumed_accumulation(saved, now, CHECKPOINT)

    assert str(caught.value) == (
        f"cannot resume from run/checkpoint-4 on {start}, which cannot be divided equally; {advice}"
    )


def test_a_change_is_logged_once(caplog):
    """Other accumulation steps than the configured ones are logged with all numbers."""
    assert resumed_accumulation(new(2, 1, 6), new(3, 1, 6), CHECKPOINT) == 4

    [message] = caplog.messages
    assert message == (
        "gradient_accumulation_steps is 4 instead of 6, so that updates still train on 12 rows: "
        "run/checkpoint-4 was written with 2 x 1 x 6 (ranks x batch size x accumulation), this run "
        "has 3 x 1 x 4"
    )


def test_the_user_may_change_the_accumulation(caplog):
    """Settings that were changed on purpose are used; a global batch that differs gives a warning.

    The checkpoint is of a run that was resumed on another number of ranks before, so that its
    accumulation steps differ from the configured ones.
    """
    saved = new(1, 1, 12, configured=6)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resumed_accumulation(saved, new(3, 1, 4), CHECKPOINT) == 4
    with pytest.warns(UserWarning, match="24 rows after .*, and on 12 rows before it"):
        assert resumed_accumulation(saved, new(3, 1, 8), CHECKPOINT) == 8
    assert not caplog.messages
