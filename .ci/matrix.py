"""Run the fast tests with other versions of Python and of the packages; write a table of results.

    python .ci/matrix.py                # as `make matrix` does: all of ROWS
    python .ci/matrix.py core newest    # only these rows

uv finds the Python of a row and installs its packages. A row whose Python this machine lacks is
"not available". Tests of what the versions of a row cannot do are skipped with a reason such as
"needs torch 2.10"; a row fails if it skips more of them than its entry in ROWS says.

Everything is written to build/matrix/: the environment of each row (ROW/), the output of its
installation and tests (ROW.log), its test results (ROW.xml), and the reasons of its skips
(ROW.skips). The table "works with" of README.md gets the rows that have run; others keep theirs.
"""

import argparse
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "matrix"
PAGE = ROOT / "README.md"
OLDEST = ("--resolution", "lowest-direct")
WHOLE = "mfwrap[recipes,test]"


@dataclass(frozen=True)
class Row:
    """Versions with which the fast tests are run.

    Args:
        python: Python, such as "3.11".
        works: What works with these versions.
        packages: What uv installs, in the form of its arguments; "mfwrap" is this checkout.
        num_skipped: Number of tests that are skipped because of the versions, at most.
    """

    python: str
    works: str
    packages: tuple[str, ...]
    num_skipped: int


ROWS: Mapping[str, Row] = {
    "core": Row(
        "3.11",
        "the step, `attach`, `Model`, monitors",
        (*OLDEST, "mfwrap[test-core]"),
        num_skipped=182,
    ),
    "trainer": Row("3.11", "everything", (*OLDEST, WHOLE, "transformers>=5.5.4"), num_skipped=163),
    "torch-2.11": Row(
        "3.12",
        "everything",
        (WHOLE, "torch==2.11.*", "transformers==5.17.*", "accelerate==1.15.*", "numpy==2.5.*"),
        num_skipped=15,
    ),
    "pinned": Row("3.11", "everything", ("--constraint", "constraints.txt", WHOLE), num_skipped=0),
    "pinned-3.13": Row(
        "3.13", "everything", ("--constraint", "constraints.txt", WHOLE), num_skipped=0
    ),
    "newest-3.13": Row("3.13", "everything", (WHOLE,), num_skipped=0),
    "newest": Row("3.14", "everything", (WHOLE,), num_skipped=0),
}
SHOWN = ("torch", "transformers", "accelerate", "numpy")
"""Packages whose versions the table gives."""
HEAD = ("row", "Python", *SHOWN, "works", "passed", "failed", "skipped")
NEEDS = re.compile(r"(MFTrainer )?needs \w+ \d")
"""Reason of a test that is skipped because of the versions; others need a package or a machine."""
BEGIN, END = "<!-- works with -->", "<!-- end of works with -->"
VERSIONS = """
import platform, sys
from importlib.metadata import version
print(platform.python_version(), *map(version, sys.argv[1:]))
"""
UV = (sys.executable, "-m", "uv")


@dataclass(frozen=True)
class Results:
    """What the tests of a row did.

    Args:
        passed: Number of tests that passed.
        failed: Number of tests that failed; an error in a fixture is a failure.
        reasons: How often a test was skipped, by the reason.
    """

    passed: int
    failed: int
    reasons: Mapping[str, int]

    @property
    def num_skipped(self) -> int:
        """Number of tests that were skipped because of the versions."""
        return sum(number for reason, number in self.reasons.items() if NEEDS.match(reason))


def run_row(name: str) -> tuple[list[str], bool]:
    """Install the packages of a row and run the tests.

    Args:
        name: Key in ROWS.

    Returns:
        The row's cells of the table, and whether the row is as it should be.
    """
    row = ROWS[name]

    def without_results(why: str) -> list[str]:
        return [name, row.python, *("" for _ in SHOWN), row.works, why, "", ""]

    found = _output_of(*UV, "python", "find", "--system", row.python).strip()
    if not found:
        return without_results("not available"), True
    folder, log, results = (BUILD / f"{name}{ending}" for ending in ("", ".log", ".xml"))
    interpreter = str(folder / "bin" / "python")
    # Compile as pip does: a SyntaxWarning of a package would be an error in the tests.
    install = (*UV, "pip", "install", "--compile-bytecode", "--python", interpreter)
    packages = [re.sub(r"^mfwrap\b", "-e.", each) for each in row.packages]
    test = (interpreter, "-m", "pytest", "-n", "2", "--dist", "worksteal", f"--junitxml={results}")
    results.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    if not (
        _succeeds(log, *UV, "venv", "--clear", "--python", found, str(folder))
        and _succeeds(log, *install, *packages)
    ):
        return without_results("not installed"), False
    _succeeds(log, *test, "-m", "not slow and not cuda")
    python, *versions = _output_of(interpreter, "-c", VERSIONS, *SHOWN).split()
    cells = [name, python, *versions, row.works]
    if not results.exists():
        return [*cells, "did not end", "", ""], False
    found_results = results_in(results)
    lines = [f"{number:5} {reason}" for reason, number in found_results.reasons.items()]
    (BUILD / f"{name}.skips").write_text("\n".join([*lines, ""]), encoding="utf-8")
    numbers = (found_results.passed, found_results.failed, found_results.num_skipped)
    is_right = not found_results.failed and found_results.num_skipped <= row.num_skipped
    return [*cells, *map(str, numbers)], is_right


def results_in(path: Path) -> Results:
    """Return what the tests did.

    Args:
        path: pytest's file of results.
    """
    [suite] = ET.parse(path).iter("testsuite")  # noqa: S314  (our own pytest wrote the file)
    total, skipped, *failed = (
        int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")
    )
    reasons = Counter(map(_reason, suite.iter("skipped")))
    return Results(total - skipped - sum(failed), sum(failed), dict(reasons.most_common()))


def _reason(skipped: ET.Element) -> str:
    """Return why a test or a file was skipped."""
    message = skipped.attrib.get("message", "")
    if message != "collection skipped":
        return message
    # The text of a skipped file is ('FILE', LINE, 'Skipped: REASON').
    return (skipped.text or "").partition("Skipped: ")[2][:-2]


def written(page: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a page whose table has new rows; rows of its old table that are not new stay.

    Args:
        page: Text with the marks BEGIN and END.
        rows: Cells of the new rows.
    """
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    cells = {row[0]: list(row) for row in map(_cells, old.strip().splitlines()[2:])}
    cells |= {row[0]: list(row) for row in rows}
    table = [HEAD, ["---"] * len(HEAD), *(cells[name] for name in ROWS if name in cells)]
    return f"{before}{BEGIN}\n{_lines(table)}{END}{after}"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


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
    names = parser.parse_args().rows or list(ROWS)
    for name in names:
        if name not in ROWS:
            parser.error(f"unknown row {name!r}; the rows are {', '.join(ROWS)}")
    if not find_spec("uv"):
        parser.error("uv is not installed; `make matrix` installs it")
    BUILD.mkdir(parents=True, exist_ok=True)
    print(_lines([HEAD, ["---"] * len(HEAD)]), end="", flush=True)
    wrong = []
    for name in names:
        cells, is_right = run_row(name)
        print(_lines([cells]), end="", flush=True)
        if not is_right:
            wrong.append(name)
        if cells[-1]:
            PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), [cells]), encoding="utf-8")
    if wrong:
        sys.exit(f"failed: {', '.join(wrong)}; see {BUILD.relative_to(ROOT)}/*.log and *.skips")


def _lines(table: Sequence[Sequence[str]]) -> str:
    """Return rows of a table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


if __name__ == "__main__":
    main()
