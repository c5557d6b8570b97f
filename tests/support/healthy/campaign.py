"""Count the episodes that the monitor records in healthy trainings: each is a false alarm.

Run ``python -m support.healthy.campaign --help`` in the folder of the tests.
"""

import argparse
import json
import logging
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mfwrap.records.json_lines import read_json_lines
from support.healthy.kinds import NUM_STEPS, train
from support.healthy.split import DEVELOPMENT, UNSEEN, begin_reading, end_reading

__all__ = ["Case", "Outcome", "cases", "episodes_in", "notes_in", "run_case", "run_cases"]

_log = logging.getLogger(__name__)

_FIELDS = ("step", "kind", "cause", "layer", "explanation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run of a kind."""

    kind: str
    seed: int
    num_steps: int = NUM_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the monitor has recorded in a run."""

    kind: str
    seed: int
    num_steps: int
    """Updates of all parts of the training."""

    first_loss: float
    last_loss: float
    seconds: float
    episodes: list[dict[str, Any]]
    notes: list[dict[str, Any]]


def cases(kinds: Sequence[str], steps_in_all: int, seed: int, num_steps: int) -> list[Case]:
    """Return runs with seeds from `seed` on, equally many of each kind, and at least one."""
    number = max(1, round(steps_in_all / (len(kinds) * num_steps)))
    return [
        Case(kind=kind, seed=seed + place, num_steps=num_steps)
        for place in range(number)
        for kind in kinds
    ]


def episodes_in(folder: Path) -> list[dict[str, Any]]:
    """Return the records that begin an episode, of all parts of a training, by their steps."""
    return [one for one in _records_in(folder) if one["kind"] != "note"]


def notes_in(folder: Path) -> list[dict[str, Any]]:
    """Return the notes of all parts of a training, by their steps."""
    return [one for one in _records_in(folder) if one["kind"] == "note"]


def _records_in(folder: Path) -> list[dict[str, Any]]:
    records = [one for path in folder.rglob("anomalies*.jsonl") for one in read_json_lines(path)]
    begun = [one for one in records if "last_step" not in one]
    return sorted(begun, key=lambda one: one["step"])


def run_case(case: Case, folder: Path, *, unseen: bool = False) -> Outcome:
    """Run a case under the monitor, and return what was recorded.

    Args:
        case: Run of a kind.
        folder: Folder to which the monitor writes its records and the numbers of each step.
        unseen: Whether the kind may be of the unseen half.

    Raises:
        PermissionError: If the kind is of the unseen half, and `unseen` is false.
    """
    if case.kind in UNSEEN and not unseen:
        msg = f"{case.kind} is of the unseen half, with which no rule is written; see --unseen"
        raise PermissionError(msg)
    start = time.perf_counter()
    losses = train(case.kind, case.seed, folder, case.num_steps)
    return Outcome(
        kind=case.kind,
        seed=case.seed,
        num_steps=len(losses),
        first_loss=losses[0],
        last_loss=losses[-1],
        seconds=time.perf_counter() - start,
        episodes=[{name: one.get(name) for name in _FIELDS} for one in episodes_in(folder)],
        notes=[{name: one.get(name) for name in _FIELDS} for one in notes_in(folder)],
    )


def _run_in_worker(job: tuple[Case, Path, bool]) -> Outcome:
    case, folder, unseen = job
    torch.set_num_threads(1)
    logging.getLogger("mfwrap").setLevel(logging.ERROR)
    return run_case(case, folder, unseen=unseen)


def run_cases(
    chosen: Iterable[Case], folder: Path, *, unseen: bool = False, num_workers: int = 1
) -> Iterator[Outcome]:
    """Run cases in processes of their own, each in a folder below `folder`."""
    jobs = [
        (case, folder / case.kind.replace(" ", "_") / str(case.seed), unseen) for case in chosen
    ]
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        yield from pool.imap_unordered(_run_in_worker, jobs)


def _log_table(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Log the episodes by kind of training and in all, and return the numbers of steps and of them.

    A training of two parts has two monitors, each of which counts its own steps.
    """
    steps, episodes = Counter[str](), Counter[str]()
    for one in outcomes:
        steps[one.kind] += one.num_steps
        episodes[one.kind] += len(one.episodes)
    for kind, number in steps.items():
        _log.info("%s: %d episodes in %d steps", kind, episodes[kind], number)
    total = steps.total(), episodes.total()
    _log.info(
        "%d runs: %d episodes in %d steps, %.1f in 10,000; notes in %d runs",
        len(outcomes),
        total[1],
        total[0],
        10_000 * total[1] / total[0],
        sum(bool(one.notes) for one in outcomes),
    )
    return total


def _log_outcome(outcome: Outcome) -> None:
    _log.info(
        "%s, seed %d: %d steps, loss %.4g to %.4g, %.1f s, %d episodes",
        outcome.kind,
        outcome.seed,
        outcome.num_steps,
        outcome.first_loss,
        outcome.last_loss,
        outcome.seconds,
        len(outcome.episodes),
    )
    for one in [*outcome.episodes, *outcome.notes]:
        _log.info("    step %(step)d: %(kind)s (%(cause)s) %(explanation)s", one)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m support.healthy.campaign", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps-in-all", type=int, default=100_000)
    parser.add_argument("--steps-per-run", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run of each kind")
    parser.add_argument("--workers", type=int, default=2)
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--kinds", nargs="+", choices=DEVELOPMENT, default=DEVELOPMENT, metavar="K")
    half.add_argument(
        "--unseen",
        action="store_true",
        help="run the unseen half: note the reading in readings.jsonl, and show counts alone",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep runs.jsonl here, with a line for each run, and the run folders, which have "
        "the numbers of each step in training_state.jsonl; not with --unseen",
    )
    return parser.parse_args()


def _run_development(arguments: argparse.Namespace, folder: Path) -> None:
    chosen = cases(arguments.kinds, arguments.steps_in_all, arguments.seed, arguments.steps_per_run)
    outcomes = []
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "runs.jsonl").open("a", encoding="utf-8") as file:
        for one in run_cases(chosen, folder, num_workers=arguments.workers):
            outcomes.append(one)
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()
            _log_outcome(one)
    _log_table(outcomes)
    found = Counter((each["kind"], each["cause"]) for one in outcomes for each in one.episodes)
    for (kind, cause), number in found.most_common():
        _log.info("%s (%s): %d", kind, cause, number)


def _run_unseen(arguments: argparse.Namespace, folder: Path) -> None:
    chosen = cases(UNSEEN, arguments.steps_in_all, arguments.seed, arguments.steps_per_run)
    begin_reading(arguments.seed, arguments.steps_in_all)
    outcomes = list(run_cases(chosen, folder, unseen=True, num_workers=arguments.workers))
    end_reading(*_log_table(outcomes))


def _main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.unseen:
            _run_unseen(arguments, Path(temporary))
        else:
            _run_development(arguments, arguments.folder or Path(temporary))


if __name__ == "__main__":
    _main()
