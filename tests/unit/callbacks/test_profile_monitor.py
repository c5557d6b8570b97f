"""Profiles hold the requested steps and no others."""

import json
import re

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap.callbacks import ProfileMonitor
from mfwrap.checkpoints.written_files import LIST


def run(monitor, *, num_steps=5, args=None):
    """Run some steps; each has a profiler range of its own."""
    state, control = TrainerState(), TrainerControl()
    monitor.on_train_begin(args, state, control)
    for step in range(1, num_steps + 1):
        with torch.profiler.record_function(f"step {step} itself"):
            torch.ones(3).sum()
        state.global_step = step
        monitor.on_step_end(args, state, control)
    monitor.on_train_end(args, state, control)


def steps_in(folder) -> set[int]:
    """Return the steps in a trace."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    found = (re.fullmatch(r"step (\d+) itself", event.get("name", "")) for event in events)
    return {int(match[1]) for match in found if match}


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(1, 1, {1}), (1, 3, {1, 2, 3}), (2, 3, {2, 3}), (4, 9, {4, 5})]
)
def test_steps(first, last, expected, tmp_path):
    """The profile has the steps up to `stop_step`, or to the end of a shorter run."""
    run(ProfileMonitor(first, last, tmp_path))

    assert steps_in(tmp_path / "rank_0") == expected
    assert "aten::sum" in (tmp_path / "rank_0" / "operators.txt").read_text()


def test_each_run_is_profiled(tmp_path):
    """If one callback is used in several trainings, each profile is in its own run folder."""
    monitor = ProfileMonitor(2, 2, profile_memory=True, with_stack=True)
    for name in ("first", "second"):
        run(monitor, args=TrainingArguments(str(tmp_path / name), use_cpu=True))

    for name in ("first", "second"):
        assert steps_in(tmp_path / name / "profile" / "rank_0") == {2}


@pytest.mark.parametrize("name", ["trace.json", "operators.txt"])
def test_files_of_others_stay(name, tmp_path, caplog):
    """An earlier profile is replaced; a file of somebody else is named, and nothing is written."""
    folder = tmp_path / "rank_0"
    run(ProfileMonitor(1, 1, tmp_path))
    run(ProfileMonitor(3, 3, tmp_path))
    assert steps_in(folder) == {3}
    for path in folder.iterdir():
        path.unlink()
    (folder / name).write_text("mine")
    run(ProfileMonitor(1, 1, tmp_path))

    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "mine")]
    assert f"Nothing is profiled: {folder} has {name}, which mfwrap has not written" in caplog.text


def test_a_profile_of_an_earlier_release(tmp_path):
    """A profile without a list is replaced, again and again; half a profile is not recognized."""
    folder = tmp_path / "rank_0"
    run(ProfileMonitor(1, 1, tmp_path))
    (folder / LIST).unlink()
    for step in (2, 3):
        run(ProfileMonitor(step, step, tmp_path))
        assert steps_in(folder) == {step}

    (folder / LIST).unlink()
    (folder / "operators.txt").unlink()
    run(ProfileMonitor(1, 1, tmp_path))
    assert steps_in(folder) == {3}


def test_other_ranks(tmp_path):
    """A rank that is not in `profile_rank_ids` writes nothing."""
    run(ProfileMonitor(1, 2, tmp_path / "profile", profile_rank_ids=[1, 2]))

    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"start_step": 0}, ValueError, "`start_step` must be >= 1, got 0"),
        ({"start_step": 5, "stop_step": 4}, ValueError, "`stop_step` must be >= 5, got 4"),
        ({"start_step": "1"}, TypeError, "`start_step` must be an int, got '1'"),
        ({"profile_memory": 1}, TypeError, "`profile_memory` must be a bool, got 1"),
        ({"profile_rank_ids": [-1]}, ValueError, "`profile_rank_ids` must be >= 0, got -1"),
        ({"output_path": 1}, TypeError, "`output_path` must be a path or None, got 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(settings, error, message):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=re.escape(message)):
        ProfileMonitor(**settings)


def test_a_folder_is_needed():
    """Without ``args.output_dir``, `output_path` is required."""
    with pytest.raises(ValueError, match="ProfileMonitor needs `output_path`"):
        run(ProfileMonitor())
