"""Run the benchmarks, and write their tables into RESULTS.md.

    python benchmarks/run.py                      # a quarter of an hour on two cores
    python benchmarks/run.py --full               # an hour and more
    python benchmarks/run.py --only host imports  # the other sections keep their last results

Each benchmark is a program of this folder and prints its tables. This program replaces the results
in RESULTS.md, each between two marks; the text around them is edited by hand and has no figures.
On a GPU, `make device` measures; `device.published` writes its results into the same file.
"""

import argparse
import datetime as dt
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
END = "<!-- end -->"


@dataclass(frozen=True, kw_only=True)
class Section:
    """Programs of a section of the results, with their arguments.

    Args:
        usual: Measured by default.
        full: Measured with ``--full``; empty for those of `usual`.
        quick: Measured with ``--quick``.
    """

    usual: Sequence[str]
    full: Sequence[str] = ()
    quick: Sequence[str] = ()


TINY = (
    "trainer.py --width 64 --layers 4 --vocabulary 512 --batch-size 1 --sequence-length 16 "
    "--threads 1"
)
SMALL = "trainer.py --width 256 --layers 6 --batch-size 4"
_LONG = "--steps 16 --block 2 --width 32 --layers 1 --threads 1 --ways everything rows twice"
SECTIONS = {
    "epilogue": Section(
        usual=["epilogue.py"],
        full=["epilogue.py --rounds 20"],
        quick=["epilogue.py --width 32 --layers 1 --rounds 2 --repeats 2"],
    ),
    "host": Section(
        usual=["host.py"],
        full=["host.py --rounds 1000"],
        quick=["host.py --tensors 28 --rounds 3"],
    ),
    "trainer": Section(
        usual=[
            f"{TINY} --steps 60 --rounds 3",
            f"{SMALL} --steps 5 --rounds 3",
            "trainer.py --steps 5 --rounds 3",
        ],
        full=[f"{TINY} --steps 200", f"{SMALL} --steps 20", "trainer.py --steps 60"],
        quick=[f"{TINY} --steps 4 --rounds 2"],
    ),
    "ranks": Section(
        usual=["distributed.py --steps 6 --rounds 3"],
        full=["distributed.py --steps 10"],
        quick=["distributed.py --steps 3 --rounds 2 --width 64 --layers 1"],
    ),
    "monitors": Section(
        usual=["monitors.py --steps 12 --rounds 3"],
        full=["monitors.py --steps 16"],
        quick=["monitors.py --steps 11 --rounds 1 --width 64 --layers 1"],
    ),
    "imports": Section(usual=["imports.py"], quick=["imports.py --rounds 1"]),
    "checksums": Section(
        usual=["verification.py"], quick=["verification.py --gigabytes 0.01 --rounds 2"]
    ),
    "background": Section(
        usual=["background.py --gigabytes 0.5"],
        full=["background.py"],
        quick=["background.py --gigabytes 0.001 --saves 2 --width 32"],
    ),
    "long_run": Section(
        usual=["long_run.py --steps 120 --block 10"],
        full=[
            "long_run.py",
            "long_run.py --steps 160 --block 20 --share 1 --ways rows twice",
        ],
        quick=[f"long_run.py {_LONG}"],
    ),
    "minilm": Section(usual=[], full=["minilm.py --steps 27"]),
}


def hardware() -> str:
    """Describe the machine and the versions in one line."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    names = re.findall(r"^model name\s*: (.*)", text, flags=re.MULTILINE)
    return f"{len(names)} cores of {names[0] if names else platform.machine()}, {versions}"


def measure(programs: Sequence[str]) -> str:
    """Run programs, and return what they print, with date, machine and commands."""
    parts = [f"{dt.datetime.now(tz=dt.UTC).date().isoformat()}, {hardware()}."]
    for program in programs:
        print(f"python benchmarks/{program}", flush=True)
        file, *arguments = shlex.split(program)
        ended = subprocess.run(
            [sys.executable, str(FOLDER / file), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        parts.append(f"`python benchmarks/{program}`:\n\n{ended.stdout.strip()}")
    return "\n\n".join(parts)


def replaced(results: str, mark: str, body: str) -> str:
    """Return the results with another body after a mark.

    Raises:
        ValueError: If the mark is not there.
    """
    start = results.index(mark) + len(mark)
    return f"{results[:start]}\n{body}\n{results[results.index(END, start) :]}"


def main() -> None:
    """Measure the chosen sections, and write each result at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--full", action="store_true", help="take longer, for less spread")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the programs")
    parser.add_argument(
        "--results", type=Path, default=FOLDER / "RESULTS.md", help="file to change"
    )
    arguments = parser.parse_args()
    for key in arguments.only:
        section = SECTIONS[key]
        programs = section.full if arguments.full else section.quick if arguments.quick else ()
        programs = programs or section.usual
        if programs:
            body = measure(programs)
            text = arguments.results.read_text(encoding="utf-8")
            text = replaced(text, f"<!-- {key} cpu -->", body)
            arguments.results.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
