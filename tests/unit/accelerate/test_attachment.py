"""What was prepared is settled and dropped when an accelerator frees it or ends."""

from dataclasses import replace

import pytest

from support.attached_runs import FACTORS, AttachedRun, RunSettings
from support.deferral import late_results
from support.training_state import assert_same_state

PLAIN = RunSettings(loss_scale="none", max_norm=None)
"""Settings with which an attached run is bitwise equal to accelerate alone."""
APPLIED = (1.0,) * len(FACTORS)


@pytest.mark.parametrize("method", ["free_memory", "clear"])
def test_a_freed_accelerator_trains_what_is_prepared_next(method):
    """After `free_memory` or `clear`, a newly prepared training starts with fresh state."""
    fresh = AttachedRun(replace(PLAIN, seed=1))
    fresh.train(0, 4, APPLIED)
    expected = fresh.state()

    run = AttachedRun(PLAIN)
    run.train(0, 3)
    getattr(run.accelerator, method)()
    run.settings = replace(PLAIN, seed=1)
    run.prepare()
    run.train(0, 4, APPLIED)

    assert_same_state(expected, run.state())


@pytest.mark.parametrize("method", ["free_memory", "end_training"])
def test_freeing_and_ending_settle_what_is_pending(method):
    """`free_memory` and `end_training` apply the pending step of the schedule."""
    run = AttachedRun()
    schedule = run.schedule.scheduler
    with late_results():
        run.train(0, 3)
        behind = schedule.last_epoch

        getattr(run.accelerator, method)()

    assert (behind, schedule.last_epoch) == (1, 2)
