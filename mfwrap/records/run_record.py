"""Read the folder of a run as curves, local norms and anomalies."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfwrap.records.json_lines import read_json_lines

_NORM = "local_norm/"
_RANK = re.compile(r"_rank(\d+)$")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"

_ALIASES = {"grad_norm": "global_norm", "local_loss": "loss"}
"""Names of transformers and MindFormers, and the name of the same number in `StepOutput`."""

_NO_CURVES = {"step", "epoch", "size"}


@dataclass(slots=True)
class Curve:
    """A number over the steps of a run."""

    steps: list[int] = field(default_factory=list)
    """Ascending and distinct."""

    values: list[float] = field(default_factory=list)
    """One value per step; may be NaN or infinite."""


@dataclass(slots=True)
class RunRecord:
    """The numbers that a run has recorded in its folder."""

    name: str
    """Name of the folder."""

    curves: dict[str, Curve]
    """By name: ``loss``, ``global_norm``, ``learning_rate``, ``loss_scale``, ``eval_loss``, ..."""

    local_norms: dict[int, dict[str, Curve]]
    """By rank, then by name of the parameter group."""

    anomalies: list[dict[str, Any]]
    """In the order of their steps."""

    max_grad_norm: float | None = None
    """Limit at which gradients were clipped; ``None`` if they were not, or if it is unknown."""

    def last_step(self) -> int:
        """Return the last step of any curve; 0 if there is no curve."""
        return max((curve.steps[-1] for curve in self.curves.values() if curve.steps), default=0)


def read_run(folder: Path) -> RunRecord:
    """Read what a run has recorded: JSON Lines files, anomalies, and the Trainer's log.

    Reads every ``*.jsonl`` file of the folder (``*_rank<r>.jsonl`` belong to other ranks,
    ``anomalies*.jsonl`` are the anomalies), and ``trainer_state.json`` of the folder or of its
    newest checkpoint. If a step was recorded twice, as happens after a resume, the last record
    counts.

    Args:
        folder: Run folder.

    Raises:
        FileNotFoundError: If the folder does not exist or holds no numbers of a run.
        ValueError: If a file cannot be read.
    """
    if not folder.is_dir():
        msg = f"{folder} is not a run folder: there is no such folder"
        raise FileNotFoundError(msg)
    points = _Points()
    anomalies = []
    for path in sorted(folder.glob("*.jsonl")):
        rank = int(match[1]) if (match := _RANK.search(path.stem)) else 0
        records = read_json_lines(path)
        if path.stem.startswith("anomalies"):
            anomalies += records
        else:
            points.add_all(records, rank)
    state = _trainer_state(folder)
    if state is not None:
        # The Trainer logs means over several steps, and sorts names by letter. So its log only
        # supplies what no other file has.
        points.fill_from(_log_of(state))
    if not points.curves and not points.local_norms:
        msg = (
            f"{folder} is not a run folder: neither a *.jsonl file nor {_TRAINER_STATE} in it "
            "has the numbers of a step"
        )
        raise FileNotFoundError(msg)
    return RunRecord(
        folder.resolve().name,
        {name: _sorted(values) for name, values in points.curves.items()},
        {
            rank: {group: _sorted(values) for group, values in groups.items()}
            for rank, groups in sorted(points.local_norms.items())
        },
        sorted(anomalies, key=lambda anomaly: int(anomaly.get("step", 0))),
        points.max_grad_norm,
    )


class _Points:
    """Values by name and step; a later value of a step replaces an earlier one."""

    def __init__(self) -> None:
        self.curves: dict[str, dict[int, float]] = {}
        self.local_norms: dict[int, dict[str, dict[int, float]]] = {}
        self.max_grad_norm: float | None = None

    def add_all(self, records: Iterable[Mapping[str, Any]], rank: int = 0) -> None:
        for record in records:
            step = record.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                self._add(step, record, rank)
            if (limit := _number(record.get("max_grad_norm"))) is not None:
                self.max_grad_norm = limit

    def fill_from(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add the values of names and steps that are still missing."""
        other = _Points()
        other.add_all(records)
        for name, values in other.curves.items():
            self.curves[name] = values | self.curves.get(name, {})
        for rank, groups in other.local_norms.items():
            own = self.local_norms.setdefault(rank, {})
            for group, values in groups.items():
                own[group] = values | own.get(group, {})
        if self.max_grad_norm is None:
            self.max_grad_norm = other.max_grad_norm

    def _add(self, step: int, record: Mapping[str, Any], rank: int) -> None:
        norms = self.local_norms.setdefault(rank, {})
        for name, value in _numbers(record):
            if name.startswith(_NORM):
                norms.setdefault(name.removeprefix(_NORM), {})[step] = value
            elif rank == 0:
                self.curves.setdefault(_ALIASES.get(name, name), {})[step] = value
        if not norms:
            del self.local_norms[rank]


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by name, those of ``local_norm`` as ``local_norm/<group>``."""
    norms = record.get("local_norm")
    if isinstance(norms, Mapping):
        record = {**record, **{f"{_NORM}{group}": norm for group, norm in norms.items()}}
    for name, value in record.items():
        if name not in _NO_CURVES and (number := _number(value)) is not None:
            yield name, number


def _number(value: Any) -> float | None:
    """Return a number as float, ``None`` for anything else.

    `JsonLines` writes non-finite numbers, which JSON does not have, as strings.
    """
    if isinstance(value, (bool, int, float)) or value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def _sorted(values: Mapping[int, float]) -> Curve:
    steps = sorted(values)
    return Curve(steps, [values[step] for step in steps])


def _trainer_state(folder: Path) -> Path | None:
    """Return the Trainer's state of the folder, or that of its checkpoint of the highest step."""
    if (folder / _TRAINER_STATE).is_file():
        return folder / _TRAINER_STATE
    steps = {
        int(match[1]): path / _TRAINER_STATE
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / _TRAINER_STATE).is_file()
    }
    return steps[max(steps)] if steps else None


def _log_of(path: Path) -> list[dict[str, Any]]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path}: invalid JSON: {error}"
        raise ValueError(msg) from error
    log = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        msg = f"{path}: expected a Trainer's state with a list of objects `log_history`"
        raise ValueError(msg)
    # The summary that `train` logs at its end looks like a step, but is not one.
    return [entry for entry in log if "train_runtime" not in entry]
