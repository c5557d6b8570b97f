"""Measure what the tests notice: plant small faults into the core, and count those that fail tests.

    python .ci/mutants.py                    # as `make mutants` does
    python .ci/mutants.py --resume           # go on with an interrupted run
    python .ci/mutants.py --only step/update # only mutants whose key contains this text

`mutations.py` makes the mutants. First, the tests of the core run on unmutated code, to measure how
long each file takes and which functions it calls. Then each mutant runs the fast tests that call
its function, until a test fails: those of its module's name first, then the others.

Starting Python, torch and transformers takes many times longer than most of the tests, so a server
process imports the libraries once and forks a process per mutant. The forked process imports mfwrap
itself, from a folder of links in which the mutated file replaces its link. Processes that a test
starts get the same folder through PYTHONPATH, so ranks run the mutant, too.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mutations import Mutant, mutants_of, sampled

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
PACKAGES = ("step", "loss_scale", "average", "tensors", "accelerate", "trainer")
SEED = 17
SIZE = 400
SECONDS = 45.0
"""Largest sum of the durations of a mutant's test files, measured on unmutated code."""
PATIENCE, LEAST_PATIENCE = 4, 30.0
"""A mutant's tests may take this many times longer than on unmutated code, plus these seconds."""
GOAL = 0.95
LIBRARIES = ("torch", "numpy", "transformers", "accelerate", "safetensors", "hypothesis", "pytest")


class Overlay:
    """A folder in which mfwrap is a tree of links to the source files, to be put on the path.

    Args:
        folder: Folder to make anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mutated: Path | None = None
        shutil.rmtree(folder, ignore_errors=True)
        for top in ("mfwrap", "callbacks", "recipes"):
            for path in (ROOT / top).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    link = self.link(path)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(path)
        compile_all = [sys.executable, "-m", "compileall", "-q", str(folder / "mfwrap")]
        subprocess.run(compile_all, check=True)

    def link(self, path: Path) -> Path:
        """Return the place of a source file in this folder."""
        parts = path.relative_to(ROOT).parts
        return self.folder.joinpath(*(() if parts[0] == "mfwrap" else ("mfwrap",)), *parts)

    def hold(self, mutant: Mutant | None) -> None:
        """Put a mutant in the place of the link to its file, and take away the mutant before it."""
        if self._mutated is not None:
            self._replace(self._mutated, None)
        self._mutated = None if mutant is None else ROOT / mutant.path
        if mutant is not None:
            self._replace(ROOT / mutant.path, mutant)

    def _replace(self, original: Path, mutant: Mutant | None) -> None:
        link = self.link(original)
        link.unlink()
        if mutant is None:
            link.symlink_to(original)
        else:
            link.write_bytes(mutant.source(original.read_bytes()))


@dataclass
class Job:
    """Test files to run on one mutant, or on unmutated code."""

    mutant: Mutant | None
    tests: Sequence[str]
    seconds: float
    """Time after which the job's process and all that it has started are killed."""


def outcomes(jobs: Iterable[Job], overlays: Sequence[Overlay]) -> Iterator[tuple[Job, str, Path]]:
    """Run each job in a forked process, one at a time in each overlay.

    Yields:
        A job, "passed", "failed" or "hung", and the job's overlay folder, which names its output.
    """
    waiting, free = iter(jobs), list(overlays)
    running: dict[int, tuple[Job, Overlay, float]] = {}
    while True:
        while free and (job := next(waiting, None)) is not None:
            overlay = free.pop()
            overlay.hold(job.mutant)
            process = os.fork()
            if process == 0:
                _run(overlay.folder, job)
            running[process] = (job, overlay, time.monotonic() + job.seconds)
        if not running:
            return
        time.sleep(0.02)
        for process, (job, overlay, deadline) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and time.monotonic() < deadline:
                continue
            # The process leads its session: this also ends ranks that wait for a failed rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            if not ended:
                os.waitpid(process, 0)
            del running[process]
            overlay.hold(None)
            free.append(overlay)
            outcome = "hung" if not ended else "passed" if status == 0 else "failed"
            yield job, outcome, overlay.folder


def _run(folder: Path, job: Job) -> NoReturn:
    """Run a job in this process, which was forked for it."""
    status = 70
    try:
        os.setsid()
        status = _test(folder, job)
    except BaseException:  # noqa: BLE001  (the process must end here in any case)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _test(folder: Path, job: Job) -> int:
    import pytest

    output = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    if job.mutant is not None:
        # Compiled files of unmutated code exist already, and those of a mutant must not remain.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    else:
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    durations, calls = _Durations(), _Calls(folder)
    if job.mutant is None:
        threading.setprofile(calls)
        sys.setprofile(calls)
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    # hypothesis is imported already; pytest warns that it cannot rewrite the plugin's asserts.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments += ["-m", "not slow and not cuda", f"--basetemp={folder.with_suffix('.tmp')}"]
    # Most mutants fail a test of the first file, so do not collect the other files before.
    for tests in filter(None, (job.tests[:1], job.tests[1:])):
        status = pytest.main([*arguments, *tests], plugins=[durations])
        # A file may hold slow tests only: then pytest runs no test.
        if status not in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            return int(status)
    sys.setprofile(None)
    if job.mutant is None:
        libraries = [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]
        found = {
            "seconds": sum(durations.seconds.values()),
            "called": sorted(calls.functions),
            "libraries": libraries,
        }
        folder.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")
    return 0


class _Durations:
    """Add up the durations of the tests of each file."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the duration of setup, call or teardown of a test."""
        path = report.nodeid.partition("::")[0]
        self.seconds[path] = self.seconds.get(path, 0.0) + report.duration


class _Calls:
    """Note which functions of mfwrap are called, as a profile function.

    Args:
        folder: Folder from which mfwrap is imported.
    """

    def __init__(self, folder: Path) -> None:
        self.functions: set[str] = set()
        """For each function: path of its file in the repository, and dotted name."""
        self._prefix = f"{folder}/"

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._prefix):
            self.functions.add(f"{code.co_filename.removeprefix(self._prefix)} {code.co_qualname}")


def module_of(path: Path) -> str:
    """Return the name of a source file in imports."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "mfwrap" else ("mfwrap", *parts)).removesuffix(".__init__")


def users() -> dict[str, list[Path]]:
    """Return the source files that import each module, by the module's name."""
    found: dict[str, list[Path]] = {}
    for top in ("mfwrap", "callbacks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    found.setdefault(node.module, []).append(path)
    return found


def tests_of(path: Path) -> list[Path]:
    """Return the test files of a source file's name, those in the folder of its package first."""
    own = ROOT.joinpath("tests", "unit", *path.relative_to(ROOT).parts[1:-1])
    named = [
        test
        for pattern in (f"test_{path.stem}.py", f"test_{path.stem}_*.py")
        for test in (ROOT / "tests" / "unit").rglob(pattern)
    ]
    return sorted(named, key=lambda test: (test.parent != own, len(test.name), test))


def candidates(path: Path, importers: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return the test files of a module, then those of its users, then those of its package."""
    chosen = tests_of(path)
    for user in importers.get(module_of(path), ()):
        chosen += tests_of(user)
    chosen += sorted((ROOT / "tests" / "unit" / path.parent.name).glob("test_*.py"))
    return list(dict.fromkeys(test.relative_to(ROOT).as_posix() for test in chosen))


def tests_for(mutant: Mutant, files: Sequence[str], baseline: Mapping[str, Any]) -> list[str]:
    """Return the test files that a mutant must pass to survive, in the order in which they run.

    Args:
        mutant: Mutant of a module.
        files: Result of `candidates` for the module.
        baseline: Result of `measured`.

    Returns:
        Files whose tests call the mutated function: first those of the module's name, then the
        others, the fastest first. Then files that start ranks, because calls in other processes
        are not noted: the candidates, then the others. Files that exceed `SECONDS` in all are left
        out.
    """
    seconds, called = baseline["seconds"], baseline["called"]
    function = f"{mutant.path} {mutant.function}"
    own = {test.relative_to(ROOT).as_posix() for test in tests_of(ROOT / mutant.path)}
    calling = [file for file, functions in called.items() if function in functions]
    calling.sort(key=lambda file: (file not in own, seconds[file]))
    on_ranks = [file for file in seconds if "ranks" in (ROOT / file).read_text(encoding="utf-8")]
    on_ranks.sort(key=lambda file: (file not in own, file not in files, seconds[file]))
    kept: list[str] = []
    left = SECONDS
    for file in dict.fromkeys([*calling, *on_ranks]):
        if not kept or seconds[file] <= left:
            kept.append(file)
            left -= seconds[file]
    return kept or list(files[:1])


def preload(modules: Iterable[str]) -> None:
    """Import libraries, so that forked processes need not import them."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def measured(files: Sequence[str], overlays: Sequence[Overlay]) -> dict[str, Any]:
    """Run test files on unmutated code.

    Returns:
        By file: its duration in "seconds", and the functions of mfwrap that it calls in "called".
        In "libraries": the modules of libraries that all files together import.
    """
    found: dict[str, Any] = {"seconds": {}, "called": {}, "libraries": []}
    libraries: set[str] = set()
    broken = []
    jobs = [Job(None, [file], 600.0) for file in files]
    for job, outcome, folder in outcomes(jobs, overlays):
        [file] = job.tests
        if outcome != "passed":
            print(folder.with_suffix(".log").read_text(encoding="utf-8"), flush=True)
            broken.append(file)
            continue
        result = json.loads(folder.with_suffix(".json").read_text(encoding="utf-8"))
        found["seconds"][file], found["called"][file] = result["seconds"], result["called"]
        libraries.update(result["libraries"])
        found["libraries"] = sorted(libraries)
    if broken:
        sys.exit(f"these tests must pass on unmutated code: {', '.join(broken)}")
    return found


def equivalents() -> dict[str, str]:
    """Return the reason for each mutant that no test can notice, by its key."""
    listed = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]
    return {f"{m['in']}: {m['before']} -> {m['after']}": m["reason"] for m in listed}


def summary(results: Mapping[str, str], reasons: Mapping[str, str]) -> tuple[str, float]:
    """Return the table of the scores by package, and the score of all packages."""
    lines = ["package      mutants  equivalent  killed  survived  score"]
    score = 1.0
    for package in (*PACKAGES, "all"):
        keys = [key for key in results if package in {"all", key.split("/")[1]}]
        if not keys:
            continue
        alive = [key for key in keys if results[key] == "passed"]
        equivalent = sum(key in reasons for key in alive)
        survived = len(alive) - equivalent
        killed = len(keys) - len(alive)
        score = killed / max(1, killed + survived)
        lines.append(
            f"{package:12} {len(keys):7} {equivalent:11} {killed:7} {survived:9} {score:6.1%}"
        )
    return "\n".join(lines), score


def main() -> None:
    """Run the sample, print the score, and exit with 1 if it is below the goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=SIZE, help="number of mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="which mutants are chosen")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="run only mutants whose key contains this text")
    parser.add_argument("--resume", action="store_true", help="keep the results of the last run")
    parser.add_argument("--folder", default="mutants", help="folder below build/ for the results")
    options = parser.parse_args()
    os.chdir(ROOT)
    folder = ROOT / "build" / options.folder
    os.environ |= {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)

    files = [path for name in PACKAGES for path in sorted((ROOT / "mfwrap" / name).rglob("*.py"))]
    found = [mutant for path in files for mutant in mutants_of(path, ROOT)]
    chosen = [m for m in sampled(found, options.size, options.seed) if options.only in m.key]
    record, timings = folder / "results.json", folder / "seconds.json"
    results: dict[str, str] = {}
    if options.resume and record.exists():
        results = json.loads(record.read_text(encoding="utf-8"))
    importers = users()
    tests = {m.path: candidates(ROOT / m.path, importers) for m in chosen}
    preload(LIBRARIES)
    overlays = [Overlay(folder / f"worker{number}") for number in range(options.workers)]
    if options.resume and timings.exists():
        baseline = json.loads(timings.read_text(encoding="utf-8"))
    else:
        needed = sorted({file for held in tests.values() for file in held})
        print(f"{len(needed)} test files on unmutated code", flush=True)
        baseline = measured(needed, overlays)
        timings.write_text(json.dumps(baseline), encoding="utf-8")
    preload(baseline["libraries"])
    jobs = []
    for mutant in chosen:
        if mutant.key not in results:
            held = tests_for(mutant, tests[mutant.path], baseline)
            expected = sum(baseline["seconds"][file] for file in held)
            jobs.append(Job(mutant, held, LEAST_PATIENCE + PATIENCE * expected))
    print(f"{len(jobs)} of {len(found)} mutants", flush=True)
    for number, (job, outcome, _) in enumerate(outcomes(jobs, overlays), 1):
        key = job.mutant.key if job.mutant else ""
        results[key] = outcome
        record.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"{number:4} {outcome:7} {key}", flush=True)
    report({mutant.key: results[mutant.key] for mutant in chosen})


def report(results: Mapping[str, str]) -> NoReturn:
    """Print survivors and scores; exit with 1 if the score is below the goal."""
    reasons = equivalents()
    for key, outcome in results.items():
        if outcome == "passed" and key not in reasons:
            print(f"survived: {key}")
        elif outcome != "passed" and key in reasons:
            print(f"listed as equivalent, but a test fails: {key}")
    table, score = summary(results, reasons)
    print(table)
    sys.exit(0 if score >= GOAL else f"the score must be at least {GOAL:.0%}")


if __name__ == "__main__":
    main()
