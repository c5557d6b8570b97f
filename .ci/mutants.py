"""Measure what the tests notice: plant small faults into the core, and count those that fail tests.

    python .ci/mutants.py                    # as `make mutants` does
    python .ci/mutants.py --resume           # continue an interrupted run
    python .ci/mutants.py --only step/update # only mutants whose key contains this text
    python .ci/mutants.py --seed 2           # another sample; --size 100000 for all mutants

`mutations.py` makes the mutants. First, the tests of the core run on unmutated code, to measure how
long each file takes and which functions it calls, also in ranks and other processes that it starts.
Then each mutant runs the fast tests that call its function, until a test fails.

Starting Python, torch and transformers takes many times longer than most of the tests, so a server
process imports the libraries once and forks a process per mutant. The forked process imports mfwrap
itself, from a folder of links in which the mutated file replaces its link. Processes that a test
starts get the same folder through PYTHONPATH, so ranks run the mutant, too.

What a run has found stays in build/mutants/. After a kill, `--resume` runs only what is missing. A
new run begins with the test that killed a mutant in the run before.

The sample takes from each file in proportion to its number of mutants. A mutant is drawn by a hash
of its key, so it stays in the sample when other code changes; renamed files have other mutants.

The known tools do not fit. cosmic-ray starts a new Python for each mutant, and importing torch,
transformers and the tests takes longer than most of the tests. mutatest has had no release since
2022. mutmut 3 forks a prepared process, as this script does, but most of its mutants of this code
replace an argument or a value by None, leave out an argument, or change a text: nearly every test
notices the first two, and no test should depend on a text. It never negates a bare condition and
never leaves out a statement, and most faults that our tests once missed were of these two kinds.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mutations import Mutant, mutants_of, sampled
from overlays import ROOT, Overlay

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
LIBRARIES += ("datasets", "pandas", "peft", "pyarrow", "scipy", "sklearn", "trl")
TRAINER = ("transformers.trainer", "transformers.models.llama.modeling_llama")
"""Modules that transformers imports when they are first used."""


@dataclass
class Job:
    """Tests to run on one mutant, or on unmutated code."""

    mutant: Mutant | None
    tests: Sequence[str]
    """Test files, in the order in which they run."""
    seconds: float
    """Time after which the job's process and all that it has started are killed."""
    first: str = ""
    """A single test to run before the others; it need not exist any more."""


@dataclass
class Outcome:
    """What has become of a job."""

    word: str
    """The word "passed", "failed" or "hung"."""
    folder: Path
    """The job's overlay, which names its output."""
    seconds: float
    """Sum of the durations of the tests; 0 if the process has not reported them."""
    test: str
    """The test or file that failed, if any."""
    libraries: Sequence[str]
    """Modules of libraries that the tests have imported."""


def outcomes(jobs: Iterable[Job], overlays: Sequence[Overlay]) -> Iterator[tuple[Job, Outcome]]:
    """Run each job in a forked process, one at a time in each overlay.

    Yields:
        A job and its outcome.
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
            word = "hung" if not ended else "passed" if status == 0 else "failed"
            written = overlay.folder.with_suffix(".json")
            found = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
            seconds, test = found.get("seconds", 0.0), found.get("failed", "")
            yield job, Outcome(word, overlay.folder, seconds, test, found.get("libraries", ()))


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

    written = folder.with_suffix(".json")
    written.unlink(missing_ok=True)
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
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    # hypothesis is imported already; pytest warns that it cannot rewrite the plugin's asserts.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments += ["-m", "not slow and not cuda"]
    # pytest empties its folder at each start, and tests keep paths of an earlier start in caches.
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    results = _Results()
    ends = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    # Most mutants fail a test of the first file, so collect the other files only after it.
    parts = ([job.first] if job.first else [], job.tests[:1], job.tests[1:])
    for number, tests in enumerate(filter(None, parts)):
        basetemp = f"--basetemp={temporary / str(number)}"
        status = pytest.main([*arguments, basetemp, *tests], plugins=[results])
        is_missing = tests == [job.first] and status == pytest.ExitCode.USAGE_ERROR
        # A file may hold slow tests only: then pytest runs no test.
        if status not in ends and not is_missing:
            break
    libraries = [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]
    found = {"seconds": results.seconds, "failed": results.failed, "libraries": libraries}
    written.write_text(json.dumps(found), encoding="utf-8")
    return 0 if status in ends or is_missing else int(status)


class _Results:
    """Note how long the tests take, and which one fails."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note setup, call or teardown of a test."""
        self.seconds += report.duration
        if report.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.failed = report.nodeid


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
    """Return the test files that are named after a source file, those of its package first."""
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
        others, the fastest first. Files that exceed `SECONDS` in all are left out.
    """
    seconds, called = baseline["seconds"], baseline["called"]
    function = f"{mutant.path} {mutant.function}"
    own = {test.relative_to(ROOT).as_posix() for test in tests_of(ROOT / mutant.path)}
    calling = [file for file, functions in called.items() if function in functions]
    calling.sort(key=lambda file: (file not in own, seconds[file]))
    kept: list[str] = []
    left = SECONDS
    for file in calling:
        if not kept or seconds[file] <= left:
            kept.append(file)
            left -= seconds[file]
    return kept or list(files[:1])


def preload(modules: Iterable[str]) -> None:
    """Import libraries, so that forked processes need not import them."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def measured(
    files: Sequence[str], overlays: Sequence[Overlay], known: dict[str, Any], record: Path
) -> None:
    """Run test files on unmutated code.

    Args:
        files: Test files.
        overlays: Traced overlays.
        known: By file: its duration in "seconds", and the functions of mfwrap that it calls in
            "called". In "libraries": the modules of libraries that all files together import. Files
            that are missing are run and added.
        record: File to which `known` is written after each test file.
    """
    by_folder = {overlay.folder: overlay for overlay in overlays}
    broken = []
    jobs = [Job(None, [file], 600.0) for file in files if file not in known["seconds"]]
    print(f"{len(jobs)} test files on unmutated code", flush=True)
    for job, outcome in outcomes(jobs, overlays):
        [file] = job.tests
        calls = by_folder[outcome.folder].taken_calls()
        if outcome.word != "passed":
            print(outcome.folder.with_suffix(".log").read_text(encoding="utf-8"), flush=True)
            broken.append(file)
            continue
        known["seconds"][file], known["called"][file] = outcome.seconds, calls
        known["libraries"] = sorted({*known["libraries"], *outcome.libraries})
        record.write_text(json.dumps(known), encoding="utf-8")
    if broken:
        sys.exit(f"these tests must pass on unmutated code: {', '.join(broken)}")


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
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--folder", default="mutants", help="folder below build/ for the results")
    options = parser.parse_args()
    os.chdir(ROOT)
    folder = ROOT / "build" / options.folder
    os.environ |= {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    files = [path for name in PACKAGES for path in sorted((ROOT / "mfwrap" / name).rglob("*.py"))]
    found = [mutant for path in files for mutant in mutants_of(path, ROOT)]
    chosen = [m for m in sampled(found, options.size, options.seed) if options.only in m.key]
    record, timings = folder / "results.json", folder / "timings.json"
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    results = dict(before) if options.resume else {}
    baseline: dict[str, Any] = {"seconds": {}, "called": {}, "libraries": []}
    if options.resume and timings.exists():
        baseline = json.loads(timings.read_text(encoding="utf-8"))

    importers = users()
    tests = {m.path: candidates(ROOT / m.path, importers) for m in chosen}
    preload([*LIBRARIES, *TRAINER])
    folders = [folder / f"worker{number}" for number in range(options.workers)]
    needed = sorted({file for held in tests.values() for file in held})
    if not set(needed) <= baseline["seconds"].keys():
        measured(needed, [Overlay(each, traced=True) for each in folders], baseline, timings)
        print(f"measured in {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    preload(baseline["libraries"])

    jobs = []
    for mutant in chosen:
        if mutant.key not in results:
            held = tests_for(mutant, tests[mutant.path], baseline)
            seconds = LEAST_PATIENCE + PATIENCE * sum(baseline["seconds"][file] for file in held)
            jobs.append(Job(mutant, held, seconds, before.get(mutant.key, {}).get("test", "")))
    print(f"{len(jobs)} of {len(found)} mutants", flush=True)
    overlays = [Overlay(each) for each in folders]
    for number, (job, outcome) in enumerate(outcomes(jobs, overlays), 1):
        key = job.mutant.key if job.mutant else ""
        results[key] = {
            "outcome": outcome.word,
            "seconds": round(outcome.seconds, 1),
            "test": outcome.test,
        }
        record.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(f"{number:4} {outcome.word:7} {key}", flush=True)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    report({mutant.key: results[mutant.key]["outcome"] for mutant in chosen})


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
