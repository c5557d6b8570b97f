"""`MonitoredRun` makes the records of a run, and `EpochMean` averages the losses of an epoch."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from mfwrap.callbacks.loss_monitor import LossMonitorSettings
from mfwrap.callbacks.loss_monitor.run import EpochMean, MonitoredRun, averages_loss
from support.monitored_loop import Clock, output


def new_run(
    emitted, *, global_step=0, is_main=True, saved_mean=None, flops=None, **settings
) -> MonitoredRun:
    """Return a run of six steps in two epochs, whose records are appended to a list."""
    state = TrainerState(max_steps=6, num_train_epochs=2, train_batch_size=4)
    state.is_world_process_zero = is_main
    return MonitoredRun(
        LossMonitorSettings(**settings),
        emitted.append,
        lambda _: flops,
        args=None,
        state=state,
        global_step=global_step,
        saved_mean=saved_mean,
    )


def test_records_come_a_step_later():
    """The record of a step is emitted once: at the end of the next step or at a flush."""
    records, counts = [], []
    run = new_run(records)
    for step in (1, 2, 3):
        run.end_step(step, output(float(step)))
        counts.append(len(records))
    run.flush()
    run.flush()

    assert counts == [0, 1, 2]
    assert [record.values.loss for record in records] == [1.0, 2.0, 3.0]
    assert [record.mean_loss for record in records] == [1.0, 1.5, 2.0]


def test_times_and_rates():
    """A record has the mean step time since the last record, rates and the time left."""
    records, clock = [], Clock()
    settings = {"per_print_times": 2, "peak_tflops": 8.0, "flops_per_step": 6e12}
    run = new_run(records, flops=6e12, clock=clock, **settings)
    run.clock.restart()
    for step in (1, 2):
        clock.now += 1.0 if step == 1 else 2.0
        run.end_step(step, output())
    run.flush()
    (record,) = records

    assert record.seconds == 1.5
    assert record.throughput == 4 / 1.5
    assert record.tflops == 6 / 1.5
    assert record.peak_tflops == 8.0
    # The first step counts as warm-up, so the estimate for the four remaining steps is two seconds
    # each.
    assert record.seconds_left == pytest.approx(8.0)


def test_a_run_on_another_rank_emits_nothing():
    """Only the main process makes records."""
    records = []
    run = new_run(records, is_main=False)
    run.end_step(1, output())
    run.flush()

    assert records == []


def test_a_logged_mean_counts_for_its_steps():
    """A logged loss is the mean since the last log, and is weighted by its number of steps."""
    records = []
    run = new_run(records)
    run.log(1, {"loss": 1.0})
    run.log(3, {"loss": 4.0})
    run.log(3, {"eval_loss": 9.0})

    assert [record.mean_loss for record in records] == [1.0, (1.0 + 2 * 4.0) / 3]


@pytest.mark.parametrize(("global_step", "mean"), [(2, 2.0), (1, 3.0)])
def test_a_saved_mean_is_used_at_its_own_step(global_step, mean):
    """A saved mean continues only in a run that starts at the step of the save."""
    records = []
    first = new_run(records)
    for step in (1, 2):
        first.end_step(step, output(1.5))
    first.flush()
    later = new_run(records, global_step=global_step, saved_mean=first.save_mean())
    later.begin_epoch()
    later.end_step(3, output(3.0))
    later.flush()

    assert records[-1].mean_loss == mean


def test_one_process_does_not_average():
    """A single process does not average losses over ranks."""
    assert not averages_loss(LossMonitorSettings())
    assert not averages_loss(LossMonitorSettings(loss_over_ranks=False))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_mean_of_an_epoch(losses):
    """The mean covers the losses of the epoch so far; a new epoch starts a new mean."""
    mean = EpochMean()
    mean.add(123.0, epoch=(1, 0))
    for number, loss in enumerate(losses, start=1):
        mean.add(loss, epoch=(2, 1))
        assert mean.value == pytest.approx(math.fsum(losses[:number]) / number, abs=1e-6)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss(loss):
    """A non-finite loss is counted but left out of the mean, which is nan without other losses."""
    mean = EpochMean()
    mean.add(loss, epoch=(1, 0))
    assert math.isnan(mean.value)

    mean.add(3.0, epoch=(1, 0))
    mean.add(loss, epoch=(1, 0))
    assert (mean.value, mean.num_not_finite) == (3.0, 2)


def test_a_loss_that_stands_for_several_steps():
    """A mean of several steps is weighted by their number."""
    mean = EpochMean()
    mean.add(1.0, epoch=(1, 0))
    mean.add(5.0, epoch=(1, 0), num_steps=3)

    assert mean.value == 4.0


def test_a_saved_mean_continues():
    """A saved mean continues within its epoch; the next epoch starts a new mean."""
    mean = EpochMean()
    assert mean.save(0) is None
    for loss in (1.0, math.nan, 2.0):
        mean.add(loss, epoch=(2, 1))
    saved = mean.save(7)
    assert saved == {
        "global_step": 7,
        "epoch": 2,
        "total": 3.0,
        "num_losses": 2,
        "num_not_finite": 1,
    }

    later = EpochMean(saved)
    later.add(6.0, epoch=(2, 0))
    assert (later.value, later.num_not_finite) == (3.0, 1)
    later.add(6.0, epoch=(3, 1))
    assert later.value == 6.0
