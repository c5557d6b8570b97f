"""Counts of applied and skipped updates, on the device and later on the host."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import StepOutput, StepReport
from mfwrap.step.counts import UpdateCounts
from support.deferral import late_results
from support.host_reads import HostReads

CPU = torch.device("cpu")
NAMES = ("first", "second")
TRUE, FALSE = torch.tensor(True), torch.tensor(False)  # noqa: FBT003  (torch has no keyword)
FINITE = torch.ones(2)
UPDATES = st.lists(st.booleans(), max_size=12)


def report_of(counts, applied):
    """Return the report of the last update that was counted."""
    output = StepOutput(
        loss=torch.ones(()),
        overflow=~applied,
        loss_scale=torch.full((), 8.0),
        learning_rate=torch.ones(()),
        global_norm=None,
    )
    return StepReport(
        output=output,
        skipped=~applied,
        learning_rates=torch.ones(1),
        local_norm_names=NAMES,
        **counts.tensors(),
    )


def do(counts, updates, *, local_norm=FINITE):
    """Count and submit updates, with a flush before each update, as in a real step."""
    for is_applied in updates:
        applied = TRUE if is_applied else FALSE
        counts.flush()
        counts.count(applied, ~applied)
        counts.submit(report_of(counts, applied), lambda: local_norm)


@given(UPDATES)
def test_updates_are_counted(updates):
    """The counters count applied updates, skipped updates and the last skips in a row."""
    counts = UpdateCounts(CPU, None)

    do(counts, updates)

    in_a_row = 0
    for applied in updates:
        in_a_row = 0 if applied else in_a_row + 1
    assert {name: value.item() for name, value in counts.tensors().items()} == {
        "applied_updates": sum(updates),
        "skipped_updates": len(updates) - sum(updates),
        "consecutive_skips": in_a_row,
    }


@given(UPDATES)
def test_a_schedule_is_told_of_each_applied_update_once(updates):
    """``on_applied`` is called once for each applied update and never for a skipped update."""
    told = []
    counts = UpdateCounts(CPU, None, on_applied=lambda: told.append(1))

    do(counts, updates)
    counts.flush()
    counts.flush()

    assert len(told) == sum(updates)


@pytest.mark.parametrize("ask", [UpdateCounts.was_skipped, UpdateCounts.flush])
def test_a_result_on_the_device_is_known_after_the_first_question(ask):
    """A late result is unknown until `was_skipped` or `flush` has read it."""
    counts = UpdateCounts(CPU, None)
    with late_results():
        assert counts.outcome_is_known
        do(counts, [True, False])
        before = counts.outcome_is_known

        ask(counts)

        assert (before, counts.outcome_is_known) == (False, True)
    assert counts.was_skipped() is True


def test_a_result_on_a_cpu_is_known_at_once():
    """On a CPU nobody has to wait for a result."""
    counts = UpdateCounts(CPU, None)

    do(counts, [True, False])

    assert counts.outcome_is_known
    assert counts.was_skipped() is True


@pytest.mark.parametrize("skipped", [True, False])
def test_a_result_that_the_optimizer_has_read_is_known_at_once(skipped):
    """If the optimizer had to read the flag, nobody has to wait for the copy of it."""
    counts = UpdateCounts(CPU, None)
    applied = FALSE if skipped else TRUE
    counts.count(applied, ~applied)
    with late_results():
        counts.submit(report_of(counts, applied), lambda: FINITE, skipped=skipped)

        assert counts.outcome_is_known
        assert counts.was_skipped() is skipped
    assert len(counts._reads) == 1


def test_a_question_leaves_the_error_to_the_next_flush():
    """`was_skipped` answers at the limit of skips, and the next flush raises the error once."""
    counts = UpdateCounts(CPU, 1)
    do(counts, [False])

    assert counts.was_skipped() is True
    with pytest.raises(RuntimeError, match="1 updates in a row were skipped"):
        counts.flush()
    counts.flush()


def test_counting_reads_nothing_on_the_host():
    """Counting updates does not synchronize with the device."""
    counts = UpdateCounts(CPU, 3)

    with HostReads() as counted:
        do(counts, [True, False, True])

    assert counted.reads == []


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_of_skips_in_a_row_ends_training(limit):
    """Reaching the limit raises an error with the step, scale and non-finite groups."""
    counts = UpdateCounts(CPU, limit)
    updates = [False] * (limit - 1) + [True] + [False] * limit
    do(counts, updates, local_norm=torch.tensor([1.0, torch.nan]))

    message = rf"^{limit} updates .* at step {2 * limit}; the loss scale is 8 now; .*\['second'\]"
    with pytest.raises(RuntimeError, match=message):
        counts.flush()


def test_without_a_limit_training_may_skip_for_ever():
    """With a limit of ``None``, any number of consecutive skips is allowed."""
    counts = UpdateCounts(CPU, None)

    do(counts, [False] * 200)
    counts.flush()

    assert counts.consecutive_skips == 200


def test_where_nobody_asks_nothing_is_copied():
    """Without schedule, limit and reports, counting copies nothing to the host."""
    counts = UpdateCounts(CPU, None, reported=False)

    do(counts, [True, False])

    assert len(counts._reads) == 0
    assert counts.skipped_updates == 1


def test_a_report_keeps_its_values():
    """Later updates replace the counter tensors and leave earlier ones unchanged."""
    counts = UpdateCounts(CPU, None)
    do(counts, [True])
    before = counts.tensors()

    do(counts, [True, False])

    assert [value.item() for value in before.values()] == [1, 0, 0]


@given(UPDATES, UPDATES)
def test_counts_go_on_from_a_saved_state(before, after):
    """Counts resumed from a saved state equal those of an uninterrupted run."""
    unbroken, saved, resumed = (UpdateCounts(CPU, None) for _ in range(3))
    do(unbroken, before + after)
    do(saved, before)

    resumed.load_state_dict(saved.state_dict())

    last_was_skipped = bool(before) and not before[-1]
    assert resumed.was_skipped() is saved.was_skipped() is last_was_skipped
    do(resumed, after)
    assert resumed.state_dict() == unbroken.state_dict()


def test_loading_drops_what_is_pending():
    """Loading a state discards pending updates, which belong to another run."""
    told = []
    counts = UpdateCounts(CPU, None, on_applied=lambda: told.append(1))
    state = counts.state_dict()
    do(counts, [True])

    counts.load_state_dict(state)
    counts.flush()

    assert told == []
    assert counts.applied_updates == 0


BAD = {
    "missing": (KeyError, "skipped_updates", None),
    "a number": (TypeError, "must be a tensor of shape .* and dtype torch.int64, got", 3),
    "floats": (ValueError, "got shape .* and torch.float32", torch.zeros(())),
    "a vector": (ValueError, r"got shape \(1,\)", torch.zeros(1, dtype=torch.int64)),
}


@pytest.mark.parametrize("method", ["check", "load_state_dict"])
@pytest.mark.parametrize(("error", "message", "value"), BAD.values(), ids=BAD)
def test_a_state_that_does_not_fit_changes_nothing(error, message, value, method):
    """An invalid state raises an error and leaves the counters unchanged."""
    counts = UpdateCounts(CPU, None)
    do(counts, [True, False])
    before = counts.state_dict()
    state = copy.deepcopy(UpdateCounts(CPU, None).state_dict())
    if value is None:
        del state["skipped_updates"]
    else:
        state["skipped_updates"] = value

    with pytest.raises(error, match=message):
        getattr(counts, method)(state)

    assert counts.state_dict() == before
