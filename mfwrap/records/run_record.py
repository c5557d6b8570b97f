"""What a run has left in its folder, read back as curves, norms and anomalies."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfwrap.records.json_lines import read_json_lines

__all__ = ["Curve", "RunRecord", "read_run"]

_NORM = "local_norm/"
_RANK = re.compile(r"_rank(\d+)$")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ALIASES = {"grad_norm": "global_norm", "local_loss": "loss"}
"""Names that transformers and MindFormers have for what a step's output calls otherwise."""

_NO_CURVES = {"step", "epoch", "size"}


@dataclass(slots=True)
class Curve:
    """A number over the steps of a run."""

    steps: list[int] = field(default_factory=list)
    """Ascending, each once."""

    values: list[float] = field(default_factory=list)
    """As many; may be nan or infinite."""


@dataclass(slots=True)
class RunRecord:
    """What a run has left in its folder."""

    name: str
    curves: dict[str, Curve]
    """By name: ``loss``, ``global_norm``, ``learning_rate``, ``loss_scale``, ``eval_loss``, ..."""

    local_norms: dict[int, dict[str, Curve]]
    """By rank and name of the group."""

    anomalies: list[dict[str, Any]]
    """In the order of their steps."""

    max_grad_norm: float | None = None
    """Where gradients were clipped; ``None`` if they were not, or it is not known."""

    def last_step(self) -> int:
        """Return the last step of any curve; 0 without one."""
        return max((curve.steps[-1] for curve in self.curves.values() if curve.steps), default=0)


def read_run(folder: Path) -> RunRecord:
    """Read what a run has left: JSON lines, the Trainer's log, anomalies.

    Read are ``*.jsonl`` (``*_rank<r>.jsonl`` of the other ranks), ``anomalies*.jsonl``, and
    ``trainer_state.json`` of the folder or of its newest checkpoint. A step that is recorded twice,
    as after a resume, counts as it was recorded last.

    Args:
        folder: Of the run.

    Raises:
        FileNotFoundError: If there is no such folder, or nothing of a run in it.
        ValueError: If a file is not what its name says.
    """
    if not folder.is_dir():
        msg = f"`run` must be the folder of a run, got {folder}, which is none"
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
        # It has means over several steps, and names sorted by letters: it fills the gaps alone.
        points.fill_from(_log_of(state))
    if not points.curves and not points.local_norms:
        msg = (
            f"`run` must be the folder of a run, got {folder} with neither *.jsonl nor "
            "trainer_state.json that holds numbers of steps"
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
    """Values by name and step, the last one of each step."""

    def __init__(self) -> None:
        self.curves: dict[str, dict[int, float]] = {}
        self.local_norms: dict[int, dict[str, dict[int, float]]] = {}
        self.max_grad_norm: float | None = None

    def add_all(self, records: Iterable[Mapping[str, Any]], rank: int = 0) -> None:
        for record in records:
            step = record.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                self._add(step, record, rank)
            self.max_grad_norm = record.get("max_grad_norm", self.max_grad_norm)

    def fill_from(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add what is of other steps, or has another name, than what is known."""
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
                known = _ALIASES.get(name, name)
                self.curves.setdefault(known, {})[step] = value
        if not norms:
            del self.local_norms[rank]


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name == "local_norm" and isinstance(value, Mapping):
            yield from ((f"{_NORM}{group}", _number(norm)) for group, norm in value.items())
        elif name not in _NO_CURVES and (number := _number(value)) is not None:
            yield name, number


def _number(value: Any) -> Any:
    """Return a number as float, also one that JSON has none for; ``None`` for anything else."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def _sorted(values: Mapping[int, float]) -> Curve:
    steps = sorted(values)
    return Curve(steps, [values[step] for step in steps])


def _trainer_state(folder: Path) -> Path | None:
    """Return the Trainer's state: the folder's own, or that of the checkpoint of most steps."""
    if (folder / "trainer_state.json").is_file():
        return folder / "trainer_state.json"
    steps = {
        int(match[1]): path / "trainer_state.json"
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / "trainer_state.json").is_file()
    }
    return steps[max(steps)] if steps else None


def _log_of(path: Path) -> list[dict[str, Any]]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path} must be the Trainer's state, got a file that is no JSON"
        raise ValueError(msg) from error
    log = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        msg = f"{path} must be the Trainer's state, got no list `log_history` in it"
        raise ValueError(msg)
    return [entry for entry in log if not _is_summary(entry)]


def _is_summary(entry: Mapping[str, Any]) -> bool:
    # What `train` returns at its end stands in the log like a step.
    return "train_runtime" in entry
