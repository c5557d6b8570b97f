"""Run accelerate's own tests with mfwrap in place of accelerate's classes; report what differs.

    python .ci/peers.py                      # as `make peers` does
    python .ci/peers.py --only test_sync     # only files whose name contains this text

The tests come with the source distribution of the installed version of accelerate. Each test file
runs twice: with accelerate's own classes, and with mfwrap's step attached to every accelerator that
a test constructs; see `substitution/sitecustomize.py`. Only tests with different outcomes are
reported. Each difference that is intended is listed in `peers_differences.toml`.

What a run makes stays in build/peers/: packages that only these tests need, the source
distribution, and the output of each test file.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "peers"
PACKAGES = BUILD / "packages"
SUBSTITUTION = Path(__file__).with_name("substitution")
DIFFERENCES = Path(__file__).with_name("peers_differences.toml")
TESTS = ("accelerator", "optimizer", "scheduler", "grad_sync", "state_checkpointing", "cpu")
"""Test files of the source distribution, without "test_"."""
SCRIPTS = ("test_script", "test_sync")
"""Scripts of the installed package that run on two ranks."""
NEEDED = ("parameterized", "torchdata")
"""Packages that only these tests need."""
TEST_SECONDS, FILE_SECONDS = 600, 3600
"""Seconds after which a test counts as failed, and after which a test file is stopped."""


@dataclass
class Run:
    """What one test file or script did."""

    outcomes: dict[str, str]
    """Word "passed", "failed" or "skipped" by the name of the test."""
    errors: dict[str, str]
    """Error of each failed test, one line."""
    objects: list[dict[str, Any]]
    """Accelerators, prepared optimizers and schedulers, as `substitution` recorded them."""
    log: Path
    """File with the output."""


@dataclass(frozen=True)
class Peer:
    """A test file or script of accelerate."""

    name: str
    """Name in reports, such as "tests/test_cpu.py"."""
    path: Path
    ranks: int = 0
    """Number of ranks of a script; 0 for a test file, which pytest runs."""

    def run(self, folder: Path, *, attach: bool) -> Run:
        """Run the file.

        Args:
            folder: Folder for output and records.
            attach: Whether mfwrap's step is attached to every accelerator.

        Returns:
            Outcomes of the tests. A file that is stopped or ends without a report has no outcomes
            but one failure of the whole file.
        """
        kind = "mfwrap" if attach else "stock"
        stem = folder / f"{kind}-{self.path.stem}"
        log, record, results = (stem.with_suffix(end) for end in (".log", ".jsonl", ".xml"))
        for old in (record, results):
            old.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        record.touch()
        status = _finished(self._command(results), log, self._environment(record, attach=attach))
        if self.ranks == 0 and results.exists():
            outcomes, errors = pytest_results(results, self.name)
        else:
            error = "did not end" if status is None else f"ended with status {status}"
            outcomes = {self.name: "passed" if status == 0 and self.ranks else "failed"}
            errors = {} if outcomes[self.name] == "passed" else {self.name: last_error(log, error)}
        lines = record.read_text(encoding="utf-8").splitlines()
        return Run(outcomes, errors, [json.loads(line) for line in lines], log)

    def _command(self, results: Path) -> list[str]:
        if self.ranks:
            launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
            return [sys.executable, "-m", *launcher, str(self.path)]
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={TEST_SECONDS}"]
        # An empty configuration, so that this repository's does not apply.
        options += ["-q", "-c", os.devnull, f"--rootdir={self.path.parent}"]
        return [sys.executable, "-m", "pytest", *options, f"--junit-xml={results}", str(self.path)]

    def _environment(self, record: Path, *, attach: bool) -> dict[str, str]:
        added = {
            "MFWRAP_PEERS_RECORD": str(record),
            "MFWRAP_PEERS_ATTACH": str(int(attach)),
            "PYTHONPATH": os.pathsep.join([str(SUBSTITUTION), str(PACKAGES)]),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.ranks:
            # Train on the CPU, where the ranks communicate with gloo.
            added["ACCELERATE_USE_CPU"] = "true"
        return {**os.environ, **added}


def _finished(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int | None:
    """Run a command, and return its exit status; ``None`` if it had to be stopped."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            return process.wait(FILE_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also end ranks that a failed test has left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pytest_results(path: Path, file: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the outcomes and errors in a JUnit report of pytest, by test.

    Args:
        path: JUnit report.
        file: Name of the test file, which begins the names of its tests.
    """
    outcomes: dict[str, str] = {}
    errors: dict[str, str] = {}
    for case in ET.parse(path).iter("testcase"):  # noqa: S314  (our own pytest wrote the file)
        test = "::".join([file, *case.get("classname", "").split(".")[-1:], case.get("name", "")])
        ends = {child.tag: child for child in case}
        failure = ends.get("failure", ends.get("error"))
        if failure is not None:
            outcomes[test] = "failed"
            lines = re.findall(
                r"^E +(\w*(?:Error|Exception)\b.*)", failure.text or "", re.MULTILINE
            )
            errors[test] = (lines or [failure.get("message", "").partition("\n")[0]])[-1]
        elif outcomes.get(test) != "failed":
            outcomes[test] = "skipped" if "skipped" in ends else "passed"
    return outcomes, errors


def last_error(log: Path, default: str) -> str:
    """Return the first exception in a script's output; `default` if there is none."""
    text = log.read_text(encoding="utf-8")
    found = re.search(r"^(?:\[rank\d+\]: )?(\w+Error\b.*)", text, re.MULTILINE)
    return found[1] if found else default


@dataclass(frozen=True)
class Difference:
    """An intended difference, from `peers_differences.toml`."""

    test: str
    """Name of the test or script, such as "tests/test_cpu.py::MultiCPUTester::test_ops"."""
    stock: str
    """Outcome with accelerate's own classes."""
    mfwrap: str
    """Outcome with mfwrap."""
    error: str
    """Part of the error of the run that fails."""
    reason: str
    page: str
    """Place in the documentation that describes the difference, such as "docs/accelerate.md"."""


def listed_differences() -> list[Difference]:
    """Return the intended differences."""
    listed = tomllib.loads(DIFFERENCES.read_text(encoding="utf-8"))
    return [Difference(**each) for each in listed.get("difference", ())]


def differing(stock: Run, ours: Run, listed: Sequence[Difference]) -> list[str]:
    """Return a line for each difference that is not listed, and for each listed one that is none.

    A baseline without a passed test gets a line, too: nothing could differ from it.

    Args:
        stock: Run with accelerate's own classes.
        ours: Run with mfwrap.
        listed: Intended differences of this file.
    """
    lines = []
    if "passed" not in stock.outcomes.values():
        lines.append(f"no test passed with accelerate alone; see {stock.log}")
    intended = {each.test: each for each in listed}
    for test in dict.fromkeys([*stock.outcomes, *ours.outcomes, *intended]):
        outcomes = tuple(run.outcomes.get(test, "missing") for run in (stock, ours))
        error = ours.errors.get(test) or stock.errors.get(test) or "no error"
        found = f"{test}: {outcomes[0]} with accelerate, {outcomes[1]} with mfwrap: {error}"
        known = intended.get(test)
        if known is None:
            if outcomes[0] != outcomes[1]:
                lines.append(found)
        elif outcomes != (known.stock, known.mfwrap) or known.error not in error:
            lines.append(
                f"{found}; {DIFFERENCES.name} lists {known.stock}, {known.mfwrap} and the error "
                f"{known.error!r}: correct or remove the entry"
            )
    return lines


def is_attached(held: Mapping[str, Any]) -> bool:
    """Return whether a recorded object has a class of mfwrap."""
    return any(name.startswith("mfwrap.") for name in held["classes"])


def not_substituted(name: str, stock: Run, ours: Run) -> list[str]:
    """Return a line for each kind of object with which a file did not test mfwrap.

    Args:
        name: Name of the file.
        stock: Run with accelerate's own classes.
        ours: Run with mfwrap.
    """
    lines = []
    for kind in ("accelerator", "optimizer", "scheduler"):
        own, attached = (
            [each for each in run.objects if each["kind"] == kind] for run in (stock, ours)
        )
        if any(is_attached(each) for each in own):
            lines.append(f"{name}: the run without mfwrap used an attached {kind}")
        plain = [each["classes"][0] for each in attached if not is_attached(each)]
        if plain:
            lines.append(
                f"{name}: {len(plain)} of {len(attached)} {kind}s were not attached: {plain[0]}"
            )
        # Every file constructs accelerators: with none, the objects were not recorded.
        if not attached and (own or kind == "accelerator"):
            lines.append(f"{name}: no {kind} was attached; accelerate's run used {len(own)}")
    return lines


def prepare() -> Path:
    """Install what only these tests need, and fetch accelerate's tests.

    Returns:
        Folder of the source distribution.
    """
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    needed = [each for each in pinned if each.partition("==")[0] in NEEDED]
    packages = importlib.metadata.distributions(path=[str(PACKAGES)])
    if not {f"{each.name}=={each.version}" for each in packages}.issuperset(needed):
        shutil.rmtree(PACKAGES, ignore_errors=True)
        _pip("install", "--target", str(PACKAGES), *needed)
    version = importlib.metadata.version("accelerate")
    source = BUILD / f"accelerate-{version}"
    if not source.exists():
        # pip builds the metadata of a source distribution, with the environment's setuptools.
        options = ["--no-binary", "accelerate", "--no-build-isolation", "--dest", str(BUILD)]
        _pip("download", *options, f"accelerate=={version}")
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(BUILD / "extracted", filter="data")
        (BUILD / "extracted" / source.name).rename(source)
    return source


def _pip(command: str, *arguments: str) -> None:
    """Run pip without dependencies, so that it never installs a second torch."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", command]
    status = subprocess.run([*pip, "--no-deps", *arguments], check=False).returncode
    if status:
        sys.exit(
            f"`pip {command} {arguments[-1]}` ended with status {status}: make peers needs the "
            f"package index when it first runs; afterwards it uses the files in {BUILD}"
        )


def peers(source: Path) -> list[Peer]:
    """Return the test files and scripts.

    Args:
        source: Folder of the source distribution.
    """
    spec = importlib.util.find_spec("accelerate")
    scripts = Path(str(spec and spec.origin)).parent / "test_utils" / "scripts"
    return [
        *(Peer(f"tests/test_{each}.py", source / "tests" / f"test_{each}.py") for each in TESTS),
        *(Peer(f"scripts/{each}.py", scripts / f"{each}.py", ranks=2) for each in SCRIPTS),
    ]


def main() -> int:
    """Run all files with and without mfwrap, and return 1 if something differs that should not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="run only files whose name contains this text")
    options = parser.parse_args()
    start = time.monotonic()
    faults: list[str] = []
    all_same: Counter[str] = Counter()
    all_attached: Counter[str] = Counter()
    chosen = [peer for peer in peers(prepare()) if options.only in peer.name]
    if not chosen:
        parser.error(f"--only: no file name contains {options.only!r}")
    names = {peer.name for peer in chosen}
    listed = [each for each in listed_differences() if each.test.partition("::")[0] in names]
    for peer in chosen:
        stock, ours = (peer.run(BUILD / "runs", attach=attach) for attach in (False, True))
        intended = [each for each in listed if each.test.partition("::")[0] == peer.name]
        found = differing(stock, ours, intended) + not_substituted(peer.name, stock, ours)
        same = Counter(
            sorted(word for test, word in stock.outcomes.items() if ours.outcomes.get(test) == word)
        )
        attached = Counter(each["kind"] for each in ours.objects if is_attached(each))
        print(f"{peer.name}: {_figures(same, attached, intended, found)}", flush=True)
        for fault in found:
            print(f"  {fault}", flush=True)
        faults += found
        all_same += same
        all_attached += attached
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("accelerate", "torch")]
    print(f"{', '.join(versions)}: {_figures(all_same, all_attached, listed, faults)}")
    print(f"{(time.monotonic() - start) / 60:.1f} minutes; output in {BUILD / 'runs'}")
    return bool(faults)


def _figures(
    same: Mapping[str, int],
    attached: Mapping[str, int],
    intended: Sequence[Difference],
    faults: Sequence[str],
) -> str:
    """Return what a run has counted, on one line."""
    in_both, objects = (
        ", ".join(f"{name} {count}" for name, count in counts.items())
        for counts in (same, attached)
    )
    return (
        f"in both runs {in_both or 'nothing'}; intended differences {len(intended)}; faults "
        f"{len(faults)}; attached {objects or 'nothing'}"
    )


if __name__ == "__main__":
    sys.exit(main())
