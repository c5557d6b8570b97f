"""A run that is saved and resumed in a new process equals the uninterrupted run."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.attached_runs import (
    FACTORS,
    LOSS_SCALES,
    OPTIMIZERS,
    AttachedRun,
    RunSettings,
    resume_in_a_new_process,
)
from support.training_state import assert_same_state

AFTER_APPLIED, AFTER_SKIPPED = 3, 5
JOBS = {
    "fused": (RunSettings(), AFTER_APPLIED),
    "after a skip": (RunSettings(), AFTER_SKIPPED),
    "after a first skip": (RunSettings(schedule="warm restarts"), 2),
    "before the first": (RunSettings(loss_scale="adaptive"), 0),
    "accumulation": (RunSettings(accumulation=2), AFTER_APPLIED),
    "accumulation, after a skip": (RunSettings(accumulation=2), AFTER_SKIPPED),
    "not fused": (RunSettings(optimizer="foreach AdamW", accumulation=2), AFTER_APPLIED),
    "not fused, after a skip": (RunSettings(optimizer="foreach AdamW"), AFTER_SKIPPED),
    "fused SGD, after a skip": (RunSettings(optimizer="fused SGD"), AFTER_SKIPPED),
    "SGD": (RunSettings(optimizer="SGD", schedule="warm restarts"), AFTER_APPLIED),
    "spikes are clipped": (RunSettings(spike_policy="clip"), AFTER_SKIPPED),
    "adaptive scale": (RunSettings(loss_scale="adaptive"), AFTER_SKIPPED),
    "bf16, fixed scale": (RunSettings(precision="bf16", loss_scale="fixed"), AFTER_APPLIED),
    "bf16, no scale": (RunSettings(precision="bf16", loss_scale="none"), AFTER_SKIPPED),
    "fp16, accelerate's scale": (RunSettings(precision="fp16", loss_scale="none"), AFTER_SKIPPED),
    "no average, no clipping": (RunSettings(ema=False, max_norm=None), AFTER_APPLIED),
}
"""Settings of each run, and the number of updates after which it is stopped."""


def stop(job, folder):
    """Train a job's run for its number of updates and save a checkpoint in the folder."""
    run_settings, first = job
    stopped = AttachedRun(run_settings)
    stopped.train(0, first)
    stopped.accelerator.save_state(folder)


def from_other_weights(jobs):
    """Return the jobs with another seed, so that all state must come from the checkpoint."""
    return {name: (replace(each, seed=1), first) for name, (each, first) in jobs.items()}


def assert_resumed(job, resumed):
    """Check that losses and final state equal those of the uninterrupted run."""
    run_settings, first = job
    unbroken = AttachedRun(run_settings)
    expected = unbroken.train(0, len(FACTORS))[first * run_settings.accumulation :]

    torch.testing.assert_close(resumed["losses"], expected, rtol=0, atol=0, equal_nan=True)
    assert_same_state(unbroken.state(), resumed["state"])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the results of a new process that resumes all jobs."""
    folder = tmp_path_factory.mktemp("resumed")
    for name, job in JOBS.items():
        stop(job, folder / name)
    return resume_in_a_new_process(folder, from_other_weights(JOBS))


@pytest.mark.parametrize("name", JOBS)
def test_a_resumed_run_is_the_unbroken_run(resumed, name):
    """Losses and final state of a resumed run equal those of the uninterrupted run bitwise."""
    assert_resumed(JOBS[name], resumed[name])


def test_these_runs_skip_change_their_scale_and_move_their_average():
    """The compared runs skip updates, change the loss scale and move the average."""
    run = AttachedRun(RunSettings())
    begin = run.state()

    run.train(0, len(FACTORS))

    end = run.state()
    assert end["/step/updates/0/applied_updates"] == 6
    assert end["/step/updates/0/skipped_updates"] == 4
    assert end["schedule/last_epoch"] == 6
    assert end["/step/loss_scale/value"] != begin["/step/loss_scale/value"]
    average = "/step/ema/averages/layers.0.weight"
    assert not torch.equal(begin[average], end[average])
    assert not torch.equal(end[average], end["/network/layers.0.weight"])


@pytest.mark.slow
@settings(max_examples=10)
@given(data=st.data())
def test_whatever_a_run_consists_of_it_can_be_stopped_anywhere(data, tmp_path_factory):
    """A run with any settings, stopped after any update and resumed, equals an uninterrupted run.

    One new process resumes all five runs of an example, because starting a process is slow.
    """
    run_settings = st.builds(
        RunSettings,
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        schedule=st.sampled_from(["inverse", "warm restarts"]),
        loss_scale=st.sampled_from(sorted(LOSS_SCALES)),
        precision=st.sampled_from(["no", "bf16", "fp16"]),
        accumulation=st.integers(1, 3),
        max_norm=st.sampled_from([None, 0.5]),
        ema=st.booleans(),
    )
    stops = st.integers(0, len(FACTORS) - 1)
    drawn = data.draw(st.lists(st.tuples(run_settings, stops), min_size=5, max_size=5))
    jobs = {str(number): job for number, job in enumerate(drawn)}
    folder = tmp_path_factory.mktemp("drawn")
    for name, job in jobs.items():
        stop(job, folder / name)

    resumed = resume_in_a_new_process(folder, from_other_weights(jobs))

    for name, job in jobs.items():
        assert_resumed(job, resumed[name])
