"""Plant faults into many trainings, and count what the monitor records.

Run ``python -m support.faults.campaign --help`` in the folder of the tests.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.faults.runs import be_quiet, drawn_cases, run_cases, verdict_of
from support.faults.verdicts import table

_SHOWN_OF_FAULT = ("step", "num_steps", "size", "where", "moment", "rank", "micro_batch", "row")
"""Fields of a fault that the campaign prints."""

_SHOWN = ("step", "kind", "cause", "layer", "ranks", "micro_batch", "rows", "name")
"""Fields of a record that the campaign prints."""


def _lines(result: dict[str, Any]) -> list[str]:
    """Return what is printed of a result."""
    case, verdict, expected = result["case"], result["verdict"], result["expected"]
    fault = {name: case["fault"][name] for name in _SHOWN_OF_FAULT}
    way = f"{case['architecture']}, {case['way']}, {case['optimizer']}, {case['dtype']}"
    causes = " or ".join(expected["causes"])
    found = {name: value for name, value in verdict.items() if name not in {"kind", "class_"}}
    records = [
        {name: one[name] for name in _SHOWN if one.get(name) is not None}
        for one in result["records"]
    ]
    return [
        f"{verdict['kind']} ({verdict['class_']}): {way}",
        f"    fault: {fault}",
        f"    expected: {causes} in {expected['places'][:2]} up to step {expected['last_step']}",
        f"    verdict: {found}",
        *(f"        record: {one}" for one in records),
    ]


def _main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m support.faults.campaign", description=__doc__)
    parser.add_argument("--number", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that train each run")
    parser.add_argument("--workers", type=int, default=2, help="processes, on one rank")
    parser.add_argument(
        "--judged",
        action="store_true",
        help="take the judged half on the unseen networks; note the reading in split.py",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for results.jsonl, with an object for each fault, and for the series of the"
        " runs and their twins",
    )
    given = parser.parse_args(words)
    if given.results is not None:
        given.results.mkdir(parents=True)
    cases = drawn_cases(given.seed, given.number, judged=given.judged, num_ranks=given.ranks)
    results = run_cases(cases, num_ranks=given.ranks, workers=given.workers, evidence=given.results)
    verdicts = []
    for result in results:
        print("\n".join(_lines(result)), flush=True)  # noqa: T201  (the program's output)
        verdicts.append(verdict_of(result))
        if given.results is not None:
            with (given.results / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
    print(table(verdicts))  # noqa: T201  (the program's output)


if __name__ == "__main__":
    be_quiet()
    _main(sys.argv[1:])
