"""Plant faults into many trainings, and count what the monitor records.

Run ``python -m support.faults.campaign [NUMBER [SEED]]`` in the folder of the tests. It logs the
verdict on each of the faults, planted on one rank, and the table.
"""

import logging
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import distributed

from mfwrap.records.json_lines import read_json_lines
from support.faults.kinds import KINDS, truth_of
from support.faults.networks import ARCHITECTURES, BATCH_SIZE
from support.faults.planting import Fault
from support.faults.training import NUM_MICRO_BATCHES, Case, train
from support.faults.verdicts import Verdict, judge, table

__all__ = ["drawn_cases", "records_in", "run_case", "run_cases"]

_STEPS_AFTER = 3
"""Steps that a run goes on after the last step at which a record of its fault is in time."""

_SHOWN = ("step", "kind", "cause", "layer", "ranks", "micro_batch", "rows", "samples")
"""Fields of a record that `_log_campaign` logs."""


def records_in(folder: Path) -> list[dict[str, Any]]:
    """Return the anomalies that all ranks have recorded, by their steps, as the page has them."""
    records = [one for path in folder.glob("anomalies*.jsonl") for one in read_json_lines(path)]
    return sorted(records, key=lambda one: one["step"])


def run_case(case: Case, folder: Path) -> Verdict:
    """Train a case with a fault in this process, and judge what was recorded."""
    assert case.fault is not None
    train(case, folder)
    if distributed.is_initialized():
        distributed.barrier()  # until all ranks have written their records
    truth = truth_of(case.fault, ARCHITECTURES[case.architecture])
    return judge(case.fault.kind, truth, records_in(folder))


def run_cases(rank: int, folder: str, seed: int, number: int) -> list[dict[str, Any]]:
    """Train drawn cases as one rank of two, and return the verdicts as mappings."""
    del rank
    return [
        asdict(run_case(case, Path(folder) / str(place)))
        for place, case in enumerate(drawn_cases(seed, number, num_ranks=2))
    ]


def drawn_cases(seed: int, number: int, *, num_ranks: int = 1) -> list[Case]:
    """Draw cases that have every kind of fault equally often.

    Half of the faults are within the first 20 steps, if their kind has no other steps.

    Args:
        seed: Seed of the draw.
        number: Number of cases.
        num_ranks: Number of ranks that will train them.
    """
    dice = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    kinds = [name for name, kind in KINDS.items() if num_ranks >= kind.min_ranks]
    cases = []
    for place in range(number):
        if place % len(kinds) == 0:
            dice.shuffle(kinds)
        name = kinds[place % len(kinds)]
        kind = KINDS[name]
        names = [key for key, each in ARCHITECTURES.items() if kind.needs(each)]
        lowest, highest = (3, 20) if dice.random() < 0.5 else (21, 70)
        if highest < kind.earliest or lowest > kind.latest:
            lowest, highest = kind.earliest, kind.latest
        architecture = dice.choice(names)
        fault = Fault(
            kind=name,
            step=dice.randint(max(lowest, kind.earliest), min(highest, kind.latest)),
            layer=dice.randrange(2),
            rank=dice.randrange(num_ranks),
            micro_batch=dice.randrange(NUM_MICRO_BATCHES),
            row=dice.randrange(BATCH_SIZE),
        )
        case = Case(
            architecture=architecture,
            way=dice.choice(kind.ways),
            fault=fault,
            num_steps=truth_of(fault, ARCHITECTURES[architecture]).last_step + _STEPS_AFTER,
            dtype=kind.dtype,
            seed=dice.randrange(1000),
        )
        cases.append(case)
    return cases


def _log_campaign(number: int = 200, seed: int = 0) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    log = logging.getLogger(__name__)
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for place, case in enumerate(drawn_cases(seed, number)):
            path = Path(folder) / str(place)
            verdict = run_case(case, path)
            log.info("%s\n    %s", case, verdict)
            for one in records_in(path):
                log.info("        %s", {name: one.get(name) for name in _SHOWN})
            verdicts.append(verdict)
    log.info("%s", table(verdicts))


if __name__ == "__main__":
    _log_campaign(*map(int, sys.argv[1:]))
