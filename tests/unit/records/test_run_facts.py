"""``run.json`` says what a run was, and ``progress.jsonl`` how long it took."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from mfwrap.records import read_json_lines
from mfwrap.records.run_facts import RunFacts
from mfwrap.records.run_files import resume_run, save_records
from mfwrap.records.run_record import has_ended, read_facts


class Clock:
    """A clock that is set by hand."""

    seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    """Return a clock."""
    return Clock()


def test_what_a_run_was(tmp_path, clock):
    """The file has settings, model, versions and machine, without secrets."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].weight.requires_grad_(requires_grad=False)
    facts = RunFacts(tmp_path, {"lr": 1.0, "api_key": "SECRET"}, model, max_steps=10, clock=clock)
    clock.seconds += 2.5
    facts.save()

    found = read_facts(tmp_path)
    assert found["configuration"] == {"lr": 1.0, "api_key": "***"}
    assert (found["model"], found["parameters"]) == ("Sequential", {"total": 21, "trainable": 9})
    assert found["versions"]["torch"] == torch.__version__
    assert found["hardware"]["ranks"] == 1
    assert (found["state"], found["seconds"]) == ("not ended", 2.5)
    assert "SECRET" not in (tmp_path / "run.json").read_text()
    assert not has_ended(tmp_path)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize(
    ("start", "shown"),
    [
        (["{folder}/train.py"], "train.py"),
        (["-m", "tasks.train"], "python -m tasks.train"),
        (["-m", "tasks"], "python -m tasks"),
    ],
)
def test_command(tmp_path, start, shown):
    """The command is that of the shell, without the path of the program and without secrets."""
    program = """
from pathlib import Path
from mfwrap.records.run_facts import RunFacts
RunFacts(Path("run"), {})
"""
    (tmp_path / "tasks").mkdir()
    for name in ("train.py", "tasks/train.py", "tasks/__main__.py"):
        (tmp_path / name).write_text(program)
    words = [word.format(folder=tmp_path) for word in start]
    # `-m` finds modules of the current folder only without PYTHONSAFEPATH.
    subprocess.run(
        [sys.executable, *words, "--token=SECRET", "--lr", "1"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        check=True,
    )

    assert read_facts(tmp_path / "run")["command"] == f"{shown} --token=*** --lr 1"


@pytest.mark.parametrize(
    ("step", "max_steps", "state"),
    [(10, 10, "finished"), (7, 10, "stopped by a signal at step 7 of 10"), (7, None, "finished")],
)
def test_how_a_run_ended(tmp_path, clock, step, max_steps, state):
    """A run that ends before its last step says so, and what ended it."""
    facts = RunFacts(tmp_path, {}, max_steps=max_steps, clock=clock)
    facts.end(step, "stopped by a signal")

    assert read_facts(tmp_path)["state"] == state
    assert has_ended(tmp_path)


class UnspeakableError(Exception):
    """An error that cannot be turned into text."""

    def __str__(self):
        raise RuntimeError


_OF_WORKER = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 3, in _worker_loop
    data = fetcher.fetch(index)
KeyError: 'text'
"""


def noted(error, *notes):
    """Return an error with notes."""
    error.__notes__ = list(notes)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad\n  row 3"), "ValueError: bad row 3"),
        (
            RuntimeError(_OF_WORKER),
            "RuntimeError: Caught KeyError in DataLoader worker process 0. KeyError: 'text'",
        ),
        (OSError("get https://me:pass@host"), "OSError: get https***host"),
        (ValueError("x" * 999), f"ValueError: {'x' * 388}..."),
        (
            noted(
                IndexError("Target 4 is out of bounds."),
                "row 3\nof the batch",
                "see https://me:pass@host",
            ),
            "IndexError: Target 4 is out of bounds; row 3 of the batch; see https***host",
        ),
        (UnspeakableError(), f"{__name__}.UnspeakableError: <exception str() failed>"),
    ],
)
def test_the_error_of_a_run(tmp_path, error, said):
    """Class, message and notes are in one short line, without secrets and tracebacks."""
    facts = RunFacts(tmp_path, {})
    facts.fail(error, 3)

    assert read_facts(tmp_path)["error"] == said


def test_the_command_of_a_run_that_was_resumed(tmp_path, monkeypatch):
    """The command that started the run stays, and that of the last resume is beside it."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    shown = []
    for step, words in ((0, ["--lr=1"]), (2, ["--resume"]), (4, ["--resume=4"]), (6, ["--lr=1"])):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        RunFacts(tmp_path, {}, first_step=step)
        facts = read_facts(tmp_path)
        shown.append((facts["command"], facts.get("resume_command")))

    resumed = [None, "train.py --resume", "train.py --resume=4", None]
    assert shown == [("train.py --lr=1", command) for command in resumed]


def test_time_and_tokens(tmp_path, clock):
    """A step is recorded once, with the time since the start and the tokens if they are known."""
    facts = RunFacts(tmp_path, {}, clock=clock)
    clock.seconds += 1
    facts.note(5, 1000)
    facts.note(5, 1000)
    clock.seconds += 1
    facts.note(7)

    assert read_json_lines(tmp_path / "progress.jsonl") == [
        {"step": 5, "seconds": 1.0, "tokens": 1000},
        {"step": 7, "seconds": 2.0},
    ]


def test_a_resumed_run_counts_on(tmp_path, clock):
    """The time goes on from the checkpoint; what came after it is not counted."""
    facts = RunFacts(tmp_path, {}, clock=clock)
    started = read_facts(tmp_path)["started"]
    clock.seconds += 10
    facts.note(5)
    save_records(tmp_path / "checkpoint-5", tmp_path)
    clock.seconds += 10
    facts.note(8)
    resume_run(tmp_path / "checkpoint-5", tmp_path, 5)
    clock.seconds += 1000
    facts = RunFacts(tmp_path, {}, first_step=5, max_steps=6, clock=clock)
    clock.seconds += 2
    facts.end(6)

    lines = read_json_lines(tmp_path / "progress.jsonl")
    assert [(line["step"], line["seconds"]) for line in lines] == [(5, 10.0), (6, 12.0)]
    found = read_facts(tmp_path)
    assert (found["seconds"], found["started"]) == (12.0, started)


def test_where_a_run_was_resumed(tmp_path, clock):
    """Each resume is noted; one from an older checkpoint undoes those after it."""

    def begun(first_step, **known):
        RunFacts(tmp_path, {}, first_step=first_step, clock=clock, **known)
        return read_facts(tmp_path).get("resumed")

    assert begun(0) is None
    # A training that goes back by itself is not resumed.
    assert begun(2, is_resume=False) is None
    assert [begun(step) for step in (4, 4, 8)] == [[4], [4], [4, 8]]
    assert begun(6, is_resume=False) == [4]
    assert [begun(step) for step in (6, 2)] == [[4, 6], [2]]


def test_what_a_resume_changes(tmp_path):
    """Each resume notes other settings, code or data; they hold from an older checkpoint on."""

    def begun(first_step, rate, digest, rows=8):
        code = {"folder": "..", "sha256": {"rewards": digest}}
        inputs = {"train": {"rows": rows}}
        RunFacts(tmp_path, {"lr": rate}, first_step=first_step, code=code, inputs=inputs)
        return read_facts(tmp_path).get("changes")

    first = {"step": 4, "settings": ["lr 1.0, now 2.0"]}
    second = {"step": 8, "settings": ["content of rewards.py", "content of train"]}
    assert begun(0, 1.0, "a") is None
    assert begun(2, 1.0, "a") is None
    assert begun(4, 2.0, "a") == [first]
    assert begun(8, 2.0, "b", rows=9) == [first, second]
    assert begun(6, 2.0, "b", rows=9) == [first, second | {"step": 6}]


def test_a_checkpoint_before_the_record_of_its_step(tmp_path, clock):
    """A run that was killed between its last checkpoint and its end records its last step."""
    facts = RunFacts(tmp_path, {}, clock=clock)
    facts.note(5)
    save_records(tmp_path / "checkpoint-6", tmp_path)
    facts.end(6)
    resume_run(tmp_path / "checkpoint-6", tmp_path, 6)
    RunFacts(tmp_path, {}, first_step=6, max_steps=6, clock=clock).end(6)

    assert [line["step"] for line in read_json_lines(tmp_path / "progress.jsonl")] == [5, 6]


def test_a_second_run_keeps_the_first(tmp_path, clock):
    """A run from the start renames the files of an earlier run in the folder."""
    RunFacts(tmp_path, {"lr": 1.0}, clock=clock).end(3)
    with pytest.warns(UserWarning, match=r"names of its files now end in \.1$"):
        RunFacts(tmp_path, {"lr": 2.0}, clock=clock)

    earlier = json.loads((tmp_path / "run.json.1").read_text())
    assert earlier["configuration"] == {"lr": 1.0}
    assert read_facts(tmp_path)["configuration"] == {"lr": 2.0}


def test_imported_code(tmp_path):
    """The user's own code is an entry of the file; a run without it has none."""
    code = {"folder": "..", "sha256": {"my_parts": "00ff"}}

    RunFacts(tmp_path / "own", {}, code=code)
    RunFacts(tmp_path / "other", {})

    assert read_facts(tmp_path / "own")["code"] == code
    assert "code" not in read_facts(tmp_path / "other")
