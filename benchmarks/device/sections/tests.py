"""The tests marked ``cuda``, those of captured steps in a process of their own."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device.environment import FOLDER, ROOT
from device.recording import Recording
from device.setup import Setup

TEST_SECONDS = 60
"""Seconds after which a test is stopped."""

PROTOTYPE = "ignore:Synchronization debug mode is a prototype"
"""torch's warning at the first use of the mode, which the tests would take for an error."""


def files_with_cuda_tests() -> list[Path]:
    """Return the test files that use the mark. Others may need packages that are absent."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(file for file in files if "mark.cuda" in file.read_text(encoding="utf-8"))


def run_tests(files: Sequence[Path], outcomes: Path, workers: int) -> int:
    """Run the tests marked ``cuda`` in files, and return pytest's exit status.

    Args:
        files: Test files.
        outcomes: File that gets a line of JSON for each outcome (`device.outcomes`).
        workers: Number of processes.
    """
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--tb=short", "-rfE"]
    command += ["-p", "device.outcomes", "-p", "no:cacheprovider", "-W", PROTOTYPE]
    command += ["--continue-on-collection-errors"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", str(TEST_SECONDS)]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else ["-n", "0"]
    command += [str(file.relative_to(ROOT)) for file in files]
    variables = {**os.environ, "DEVICE_OUTCOMES": str(outcomes), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def read_outcomes(file: Path) -> list[dict[str, Any]]:
    """Return the outcomes in a file; none if it was not written."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def measure(recording: Recording, setup: Setup) -> None:
    """Run all of them, and record how many passed, failed and were skipped."""
    files = files_with_cuda_tests()
    captured = [file for file in files if "captur" in file.stem]
    others = [file for file in files if file not in captured]
    totals: Counter[str] = Counter()
    workers = min(4, len(os.sched_getaffinity(0)))
    # A capture that fails may leave CUDA unusable for the tests after it, so one file at a time.
    groups = {"all but captured steps": others} | {file.stem: [file] for file in captured}
    for name, group in groups.items():
        with recording.part(name):
            outcomes = FOLDER / f"{name.replace(' ', '_')}.jsonl"
            code = run_tests(group, outcomes, workers if group is others else 1)
            found = read_outcomes(outcomes)
            counts = Counter(each["outcome"] for each in found)
            totals += counts
            reasons = Counter(each["reason"] for each in found if each["outcome"] == "skipped")
            recording.row(
                "tests",
                {
                    "tests": name,
                    **{key: counts[key] for key in ("passed", "failed", "skipped", "error")},
                    "reasons for skips": "; ".join(f"{n} x {r}" for r, n in reasons.most_common(5)),
                },
            )
            for each in found:
                if each["outcome"] in {"failed", "error"}:
                    recording.fail(each["test"], each["reason"])
            if not found:
                recording.fail(name, f"no test ran; pytest ended with {code}")
    recording.summarize(", ".join(f"{count} {name}" for name, count in totals.items()))
    if not setup.on_cuda:
        recording.leave_out("the tests themselves", "they need a CUDA device")
