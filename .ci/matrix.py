"""Run the fast tests with other versions of Python and of the packages; print a table of results.

    python .ci/matrix.py                           # as `make matrix` does: all of ROWS
    python .ci/matrix.py 3.11-oldest 3.12-pinned   # only these rows

A row is a version of Python and a choice of packages: "oldest" takes the lower bounds in
pyproject.toml, "pinned" the versions in constraints.txt, and "newest" the newest versions that
pyproject.toml permits. uv finds the Python and installs the packages. A row whose Python this
machine lacks is "not available".

Everything is written to build/matrix/: the environment of each row (ROW/), the output of its
installation and tests (ROW.log), its test results (ROW.xml), and the table (table.md).
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "matrix"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PACKAGES = {
    "oldest": ("--resolution", "lowest-direct"),
    "pinned": ("--constraint", "constraints.txt"),
    "newest": (),
}
"""Options of `uv pip install` for each choice of packages."""
ROWS = ("3.11-oldest", *(f"{python}-pinned" for python in PYTHONS), "3.14-newest")
SHOWN = ("torch", "transformers", "accelerate", "numpy")
"""Packages whose versions the table gives."""
VERSIONS = """
import platform, sys
from importlib.metadata import version
print(platform.python_version(), *map(version, sys.argv[1:]))
"""
UV = (sys.executable, "-m", "uv")


def run_row(row: str) -> list[str]:
    """Install the packages of a row, run the tests, and return the row's cells of the table.

    Args:
        row: Python and packages, such as "3.11-oldest".
    """
    python, packages = row.split("-")
    no_versions = [python, packages, *("" for _ in SHOWN)]
    found = _output_of(*UV, "python", "find", "--system", python).strip()
    if not found:
        return [*no_versions, "not available", ""]
    folder, log, results = (BUILD / f"{row}{ending}" for ending in ("", ".log", ".xml"))
    interpreter = str(folder / "bin" / "python")
    # Compile as pip does: a SyntaxWarning of a package would be an error in the tests.
    install = (*UV, "pip", "install", "--compile-bytecode", "--python", interpreter)
    test = (interpreter, "-m", "pytest", "-n", "2", "--dist", "worksteal", f"--junitxml={results}")
    results.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    if not (
        _succeeds(log, *UV, "venv", "--clear", "--python", found, str(folder))
        and _succeeds(log, *install, *PACKAGES[packages], "-e", ".[recipes,test,lint]")
    ):
        return [*no_versions, "", "not installed"]
    _succeeds(log, *test, "-m", "not slow and not cuda")
    python, *versions = _output_of(interpreter, "-c", VERSIONS, *SHOWN).split()
    return [python, packages, *versions, *passed_and_failed(results)]


def passed_and_failed(results: Path) -> tuple[str, str]:
    """Return how many tests passed and failed; an error in a fixture is a failure.

    Args:
        results: pytest's file of results; absent if pytest did not end.
    """
    if not results.exists():
        return "", "did not end"
    [suite] = ET.parse(results).iter("testsuite")  # noqa: S314  (our own pytest wrote the file)
    total, skipped, *failed = (
        int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")
    )
    return str(total - skipped - sum(failed)), str(sum(failed))


def _output_of(*command: str) -> str:
    """Return what a command prints; nothing if it fails."""
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if ended.returncode else ended.stdout


def _succeeds(log: Path, *command: str) -> bool:
    """Run a command, append its output to a file, and return whether it succeeded."""
    # Without PYTHONSAFEPATH, Python would import the folder mfwrap/, not the installed package.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    with log.open("a", encoding="utf-8") as output:
        return not subprocess.call(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def main() -> None:
    """Run the chosen rows one after the other, print each, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", help=f"by default: {' '.join(ROWS)}")
    rows = parser.parse_args().rows or ROWS
    known = [f"{python}-{packages}" for python in PYTHONS for packages in PACKAGES]
    for row in rows:
        if row not in known:
            parser.error(f"unknown row {row!r}; the rows are {', '.join(known)}")
    if not find_spec("uv"):
        parser.error("uv is not installed; `make matrix` installs it")
    BUILD.mkdir(parents=True, exist_ok=True)
    head = ["Python", "packages", *SHOWN, "passed", "failed"]
    table = [head, ["---"] * len(head)]
    print(_lines(table), end="", flush=True)
    for row in rows:
        table.append(run_row(row))
        print(_lines(table[-1:]), end="", flush=True)
    (BUILD / "table.md").write_text(_lines(table), encoding="utf-8")
    if any(cells[-1] not in {"0", ""} for cells in table[2:]):
        sys.exit(f"some rows failed; see {BUILD.relative_to(ROOT)}/*.log")


def _lines(table: Sequence[Sequence[str]]) -> str:
    """Return rows of a table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


if __name__ == "__main__":
    main()
