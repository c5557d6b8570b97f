"""The tests marked ``cuda``, those of captured steps in a process of their own."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device.environment import FOLDER, ROOT
from device.recording import Recording
from device.setup import Setup

TEST_SECONDS = 60
"""Seconds after which a test is stopped."""

MARK = "mark.cuda"

PROTOTYPE = "ignore:Synchronization debug mode is a prototype"
"""torch's warning at the first use of the mode, which the tests would take for an error."""


def files_with_cuda_tests(tests: Path) -> list[Path]:
    """Return the test files that use the mark, or a module of tests/support that has it.

    The others need not be imported: that takes half a minute, and packages that may be absent.

    Args:
        tests: Folder of the tests.
    """

    def has(file: Path, *words: str) -> bool:
        text = file.read_text(encoding="utf-8")
        return any(word in text for word in words)

    helpers = (file for file in (tests / "support").rglob("*.py") if has(file, MARK))
    modules = [".".join(file.relative_to(tests).with_suffix("").parts) for file in helpers]
    return sorted(file for file in tests.rglob("test_*.py") if has(file, MARK, *modules))


def start_tests(files: Sequence[Path], outcomes: Path, workers: int) -> "subprocess.Popen[bytes]":
    """Start the tests marked ``cuda`` in files.

    Args:
        files: Test files.
        outcomes: File that gets a line of JSON for each outcome (`device.outcomes`).
        workers: Number of processes.
    """
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--tb=short", "-rfE"]
    command += ["-p", "device.outcomes", "-p", "no:cacheprovider", "-W", PROTOTYPE]
    command += ["--continue-on-collection-errors"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]
    if importlib.util.find_spec("xdist"):
        # One worker, too, has a process of its own: a test that kills it does not end the others.
        command += ["-n", str(workers), "--dist", "worksteal"]
    command += [str(file.relative_to(ROOT)) for file in files]
    variables = {**os.environ, "DEVICE_OUTCOMES": str(outcomes), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=variables)


def read_outcomes(file: Path) -> list[dict[str, Any]]:
    """Return the outcomes in a file, without a last line that is still being written."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def summary(name: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a group of tests."""
    counts = Counter(each["outcome"] for each in found)
    reasons = Counter(each["reason"] for each in found if each["outcome"] == "skipped")
    return {
        "tests": name,
        **{key: counts[key] for key in ("passed", "failed", "skipped", "error")},
        "reasons for skips": "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(5)),
    }


def measure(recording: Recording, setup: Setup) -> None:
    """Run all of them, and record how many passed, failed and were skipped."""
    files = files_with_cuda_tests(ROOT / "tests")
    captured = [file for file in files if "captur" in file.stem]
    others = [file for file in files if file not in captured]
    workers = min(12, len(os.sched_getaffinity(0)))
    # A capture that fails may leave CUDA unusable for the tests after it, so one file at a time.
    groups = {"all but captured steps": others} | {
        file.relative_to(ROOT).as_posix(): [file] for file in captured
    }
    outcomes = {name: FOLDER / f"outcomes_{number}.jsonl" for number, name in enumerate(groups)}
    running = {
        name: start_tests(group, outcomes[name], workers if group is others else 1)
        for name, group in groups.items()
    }
    rows: dict[str, dict[str, Any]] = {}
    num_seen = Counter[str]()
    while running:  # outcomes are recorded at once, since the section may be cut
        time.sleep(1.0)
        for name, process in list(running.items()):
            has_ended = process.poll() is not None
            found = read_outcomes(outcomes[name])
            rows[name] = summary(name, found)
            for each in found[num_seen[name] :]:
                if each["outcome"] in {"failed", "error"}:
                    recording.fail(each["test"], each["reason"])
            num_seen[name] = len(found)
            if has_ended:
                del running[name]
                if not found:
                    recording.fail(name, f"no test ran; pytest ended with {process.returncode}")
        recording.table("tests", [rows[name] for name in groups])
    names = ("passed", "failed", "error", "skipped")
    totals = {key: sum(row[key] for row in rows.values()) for key in names}
    recording.summarize(", ".join(f"{count} {key}" for key, count in totals.items() if count))
    if not setup.on_cuda:
        recording.leave_out("the tests themselves", "they need a CUDA device")
