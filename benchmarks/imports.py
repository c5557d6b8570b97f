"""Measure how long it takes until mfwrap can be used: imports and the command line.

    python benchmarks/imports.py

Each statement runs in a new process. The statements take turns. The table shows the median and the
range of the times, and the median of the differences to a process that imports torch alone.
"""

import argparse
import statistics
import subprocess
import sys
import time

STATEMENTS = {
    "`import torch`": "import torch",
    "`import torch, mfwrap`": "import torch, mfwrap",
    "`from mfwrap import MFTrainOneStepCell`": "from mfwrap import MFTrainOneStepCell",
    "`from mfwrap.trainer import MFTrainer`": "from mfwrap.trainer import MFTrainer",
    "`from transformers import Trainer`": "from transformers import Trainer",
    "`mfwrap --help`": (
        "import sys; sys.argv = ['mfwrap', '--help']; from mfwrap.cli import main; main()"
    ),
}
FIRST = next(iter(STATEMENTS))


def seconds(statement: str) -> float:
    """Return how long a new process takes to run a statement."""
    start = time.perf_counter()
    command = [sys.executable, "-Pc", statement]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure all statements, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="processes of each (default: 7)")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for number in range(-1, arguments.rounds):
        for name, statement in STATEMENTS.items():
            taken = seconds(statement)
            if number >= 0:  # the first round fills the file cache
                times[name].append(taken)
    print("| | seconds, median (range) | more than `import torch` |\n| --- | --- | --- |")
    for name, each in times.items():
        more = statistics.median(a - b for a, b in zip(each, times[FIRST], strict=True))
        median = statistics.median(each)
        print(f"| {name} | {median:.2f} ({min(each):.2f} to {max(each):.2f}) | {more:+.2f} |")


if __name__ == "__main__":
    main()
