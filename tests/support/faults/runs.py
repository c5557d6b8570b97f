"""Run cases with their twins, in this process, in others, or on several ranks."""

import dataclasses
import functools
import json
import logging
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from mfwrap.records.json_lines import read_json_lines
from support.faults.draws import draw_cases
from support.faults.expectation import Expectation, expectation_of
from support.faults.networks import ARCHITECTURES, new_network
from support.faults.series import Series, save_series
from support.faults.split import kinds_of
from support.faults.training import Case, train
from support.faults.twin import Class, Comparison, compare
from support.faults.verdicts import Verdict, judge
from support.ranks.pool import RankPool

__all__ = [
    "Result",
    "be_quiet",
    "drawn_cases",
    "lost_runs",
    "records_in",
    "run_case",
    "run_cases",
    "run_on_rank",
    "train_on_rank",
    "verdict_of",
    "with_length",
]

_STEPS_AFTER = 3
"""Steps that a run goes on after the last step at which a record of its fault is in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A case, what was recorded of it and its twin, and the verdict."""

    case: Case
    expected: Expectation
    comparison: Comparison | None
    records: list[dict[str, Any]]
    twin_records: list[dict[str, Any]]
    verdict: Verdict


def records_in(folder: Path) -> list[dict[str, Any]]:
    """Return the anomalies that all ranks have recorded, by their steps, as the page has them."""
    records = [one for path in folder.glob("anomalies*.jsonl") for one in read_json_lines(path)]
    return sorted(records, key=lambda one: one["step"])


def drawn_cases(seed: int, number: int, *, judged: bool = False, num_ranks: int = 1) -> list[Case]:
    """Draw cases of the kinds and networks that rules are written on, or are judged on.

    Args:
        seed: Seed of the draw.
        number: Number of cases.
        judged: Whether to take the judged half. Note each reading in `support.faults.split`.
        num_ranks: Number of ranks that will train them.
    """
    kinds = kinds_of(judged=judged)
    return [
        with_length(case)
        for case in draw_cases(kinds, seed, number, unseen=judged, num_ranks=num_ranks)
    ]


@functools.cache
def _named_network(architecture: str, width: int) -> nn.Module:
    """Return a network that has the names of all others of its architecture, and is not trained."""
    with torch.random.fork_rng():
        return new_network(ARCHITECTURES[architecture], width=width)


def _expected(case: Case) -> Expectation:
    assert case.fault is not None
    network = _named_network(case.architecture, case.width)
    return expectation_of(case.fault, ARCHITECTURES[case.architecture], network)


def with_length(case: Case) -> Case:
    """Return a case that goes on until a record of its fault would no longer be in time."""
    return dataclasses.replace(case, num_steps=_expected(case).last_step + _STEPS_AFTER)


def _trained(case: Case, folder: Path) -> list[dict[str, np.ndarray]]:
    """Train a case, and return the series of each rank."""
    series = Series()
    train(case, folder, series)
    own = series.stacked()
    if not distributed.is_initialized():
        return [own]
    # Until all ranks have written their records.
    all_series: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_series, own)
    return all_series


def run_case(case: Case, folder: Path, evidence: Path | None = None) -> Result:
    """Train a case and its twin in this process, and judge what was recorded.

    On several ranks, call it on each of them.

    Args:
        case: Case with a fault.
        folder: Folder for the run folders of both.
        evidence: File for the series of both; ``None`` for none.
    """
    expected = _expected(case)
    assert case.fault is not None
    twin = _trained(dataclasses.replace(case, fault=None), folder / "twin")
    run = _trained(case, folder / "run")
    comparison = compare(run, twin, _layers(case), first=expected.step, last=expected.last_step)
    records, twin_records = records_in(folder / "run"), records_in(folder / "twin")
    verdict = judge(
        str(case.fault.kind),
        comparison.class_,
        expected,
        records,
        twin_records,
        has_diverged=comparison.has_diverged,
    )
    if evidence is not None and (not distributed.is_initialized() or distributed.get_rank() == 0):
        save_series(evidence, run=run, twin=twin)
    return Result(
        case=case,
        expected=expected,
        comparison=comparison,
        records=records,
        twin_records=twin_records,
        verdict=verdict,
    )


def _layers(case: Case) -> list[int]:
    """Return the number of the layer of each trainable weight; those outside count as one."""
    network = _named_network(case.architecture, case.width)
    names = [name for name, weight in network.named_parameters() if weight.requires_grad]
    layers = ARCHITECTURES[case.architecture].layers
    return [
        next((number for number, each in enumerate(layers) if name.startswith(f"{each}.")), -1)
        for name in names
    ]


def _as_mapping(result: Result) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(result), default=sorted))


def _run_here(numbered: tuple[int, Case], evidence: Path | None) -> dict[str, Any]:
    """Run a case in a folder of its own, and return the result as a mapping."""
    number, case = numbered
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _as_mapping(run_case(case, Path(folder), _numbered(evidence, number)))
        except Exception as error:  # noqa: BLE001  (a lost run is a result)
            return _lost(case, f"{type(error).__name__}: {error}")


def _numbered(folder: Path | None, number: int) -> Path | None:
    return None if folder is None else folder / f"{number:03}.npz"


def _lost(case: Case, error: str) -> dict[str, Any]:
    assert case.fault is not None
    verdict = Verdict(
        kind=str(case.fault.kind),
        class_=str(Class.NOT_FINITE),
        recorded=False,
        right_cause=False,
        wrong_causes=(),
        wrong_places=(),
        false_alarms=0,
        twin_alarms=0,
        lost=error,
    )
    return _as_mapping(
        Result(
            case=case,
            expected=_expected(case),
            comparison=None,
            records=[],
            twin_records=[],
            verdict=verdict,
        )
    )


def run_on_rank(rank: int, case: Case, folder: Path, evidence: Path | None) -> dict[str, Any]:
    """Run a case and its twin as a rank, and return the result as a mapping."""
    del rank
    be_quiet()
    return _as_mapping(run_case(case, folder, evidence))


def run_cases(
    cases: Sequence[Case],
    *,
    num_ranks: int = 1,
    workers: int = 1,
    evidence: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Run cases with their twins, and yield the results as mappings.

    Args:
        cases: Cases with faults.
        num_ranks: Number of ranks that train each case.
        workers: Number of processes, on one rank.
        evidence: Folder for the series of the runs; ``None`` for none.
    """
    if num_ranks > 1:
        yield from _run_on_ranks(cases, num_ranks, evidence)
        return
    run = functools.partial(_run_here, evidence=evidence)
    if workers == 1:
        yield from map(run, enumerate(cases))
        return
    # The libraries are imported by now, so the workers begin at once.
    with multiprocessing.get_context("fork").Pool(workers, be_quiet) as pool:
        yield from pool.imap(run, enumerate(cases))


def _run_on_ranks(
    cases: Sequence[Case], num_ranks: int, evidence: Path | None
) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        calls = [
            (case, Path(folder) / str(number), _numbered(evidence, number))
            for number, case in enumerate(cases)
        ]
        answers = _on_ranks(run_on_rank, calls, num_ranks, Path(folder))
        for case, answer in zip(cases, answers, strict=True):
            yield _lost(case, answer) if isinstance(answer, str) else answer[0]


def lost_runs(cases: Sequence[Case], num_ranks: int) -> dict[str, str]:
    """Train cases on several ranks; return the errors of those that do not end, by their kinds."""
    with tempfile.TemporaryDirectory() as folder:
        calls = [(case, Path(folder) / str(number)) for number, case in enumerate(cases)]
        answers = list(_on_ranks(train_on_rank, calls, num_ranks, Path(folder)))
    return {
        str(case.fault.kind): str(answer)
        for case, answer in zip(cases, answers, strict=True)
        if case.fault is not None and answer != [case.num_steps] * num_ranks
    }


def train_on_rank(rank: int, case: Case, folder: Path) -> int:
    """Train a case as a rank, and return the number of its steps."""
    del rank
    be_quiet()
    series = Series()
    train(case, folder, series)
    return len(series.arrays["loss"])


def _on_ranks(
    program: Callable[..., Any], calls: Sequence[tuple[Any, ...]], num_ranks: int, folder: Path
) -> Iterator[list[Any] | str]:
    """Call a program on ranks, and yield for each call the answer of each rank, or the error."""
    left = list(calls)
    while left:
        # A lost run may leave the ranks apart, so the next one gets new ones.
        start = folder / f"ranks_{len(left)}"
        start.mkdir()
        with RankPool(num_ranks, start) as pool:
            answer: list[Any] | str = []
            while left and not isinstance(answer, str):
                try:
                    answer = pool.run(program, *left.pop(0))
                except RuntimeError as error:
                    answer = str(error)
                yield answer


def verdict_of(result: dict[str, Any]) -> Verdict:
    """Return the verdict of a result that `run_cases` has yielded."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in result["verdict"].items()
    }
    return Verdict(**fields)


def be_quiet() -> None:
    """Take one thread, and suppress warnings and logs of trainings that go wrong on purpose."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
