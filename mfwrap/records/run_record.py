"""Read the folder of a run as curves, local norms, episodes of anomalies and rollbacks."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfwrap.records.episodes import Episode, episodes_of
from mfwrap.records.evaluations import AVERAGED, named
from mfwrap.records.json_lines import rank_files, read_json_lines
from mfwrap.records.rollbacks import RollbackRecord, read_rollbacks

FACTS = "run.json"
"""File of `mfwrap.records.run_facts.RunFacts`."""

NOT_ENDED = "not ended"
"""State in ``run.json`` of a run that goes on, or was killed."""

_NORM = "local_norm/"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"

_ALIASES = {"grad_norm": "global_norm", "local_loss": "loss"}
"""Name in `StepOutput` of each number that transformers or MindFormers name differently."""

_NO_CURVES = {"step", "epoch", "size"}


@dataclass(slots=True)
class Curve:
    """A number over the steps of a run."""

    steps: list[int] = field(default_factory=list)
    """Steps in ascending order, each at most once."""

    values: list[float] = field(default_factory=list)
    """One value per step, which may be NaN or infinite."""


@dataclass(slots=True)
class RunRecord:
    """The numbers that a run has recorded in its folder."""

    name: str
    """Name of the folder."""

    curves: dict[str, Curve]
    """Curves of rank 0 by name: ``loss``, ``global_norm``, ``learning_rate``, ``eval_loss``, ..."""

    local_norms: dict[int, dict[str, Curve]]
    """Curves of local norms by rank, then by name of the parameter group."""

    episodes: list[Episode]
    """Episodes of anomalies, ordered by their first steps."""

    rollbacks: list[RollbackRecord] = field(default_factory=list)
    """Rollbacks in the order in which they happened. Their bad steps are in no episode."""

    max_grad_norm: float | None = None
    """Global norm above which gradients were clipped; ``None`` if the run has not recorded it."""

    rank_losses: Mapping[int, Curve] = field(default_factory=dict)
    """Loss of each rank over the steps; empty unless ranks other than 0 have recorded theirs."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the run was, from ``run.json``; empty without this file. See `read_facts`."""

    @property
    def anomalies(self) -> list[dict[str, Any]]:
        """Records of all episodes, ordered by step."""
        return [record for episode in self.episodes for record in episode.records]

    def first_step(self) -> int:
        """Return the first step of any curve; 0 if there is no curve."""
        return min((curve.steps[0] for curve in self.curves.values() if curve.steps), default=0)

    def last_step(self) -> int:
        """Return the last step of any curve; 0 if there is no curve."""
        return max((curve.steps[-1] for curve in self.curves.values() if curve.steps), default=0)


def read_run(folder: Path) -> RunRecord:
    """Read the numbers and anomalies that a run has recorded in its folder.

    Reads every ``*.jsonl`` file of the folder, and the Trainer's log in ``trainer_state.json`` of
    the folder or of its newest checkpoint. ``*_rank<r>.jsonl`` are the files of other ranks,
    ``anomalies*.jsonl`` hold the anomalies, and ``rollbacks.json`` holds the rollbacks. If a step
    was recorded twice, as happens after a resume, the last record counts.

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
    anomalies: list[tuple[int, list[dict[str, Any]]]] = []
    for path, name, rank in rank_files(folder):
        records = read_json_lines(path)
        if name.startswith("anomalies"):
            anomalies.append((rank, records))
        else:
            points.add_all(records, rank)
    # Take from the Trainer's file only what the other files lack. The Trainer logs means over
    # several steps, and its file sorts the layers by name, so their order is lost.
    points.fill_from(trainer_log(folder))
    if not points.curves and not points.local_norms:
        msg = (
            f"{folder} is not a run folder: neither a *.jsonl file nor {_TRAINER_STATE} in it "
            "has the numbers of a step"
        )
        raise FileNotFoundError(msg)
    curves = {name: _sorted(values) for name, values in points.curves.items()}
    rank_losses = {rank: _sorted(values) for rank, values in sorted(points.rank_losses.items())}
    return RunRecord(
        folder.resolve().name,
        curves,
        {
            rank: {group: _sorted(values) for group, values in groups.items()}
            for rank, groups in sorted(points.local_norms.items())
        },
        episodes_of(anomalies),
        read_rollbacks(folder)[0],
        points.max_grad_norm,
        {0: curves.get("loss", Curve()), **rank_losses} if rank_losses else {},
        read_facts(folder),
    )


class _Points:
    """Collect values by name and step; a later value of a step replaces an earlier one."""

    def __init__(self) -> None:
        self.curves: dict[str, dict[int, float]] = {}
        self.local_norms: dict[int, dict[str, dict[int, float]]] = {}
        self.rank_losses: dict[int, dict[int, float]] = {}
        """Losses of the ranks above 0."""

        self.max_grad_norm: float | None = None

    def add_all(self, records: Iterable[Mapping[str, Any]], rank: int = 0) -> None:
        for record in records:
            step = record.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                self._add(step, record, rank)
            if (limit := to_number(record.get("max_grad_norm"))) is not None:
                self.max_grad_norm = limit

    def fill_from(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add values of the Trainer's log, except where the step has one of this name already."""
        other = _Points()
        other.add_all(records)
        for name, values in other.curves.items():
            # The Trainer gives the same name to results of averaged weights.
            known = self.curves.get(name, {}) | self.curves.get(AVERAGED + name, {})
            new = {step: value for step, value in values.items() if step not in known}
            if new:
                self.curves.setdefault(name, {}).update(new)
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
            elif rank and _ALIASES.get(name, name) == "loss":
                self.rank_losses.setdefault(rank, {})[step] = value
            elif rank == 0:
                self.curves.setdefault(_ALIASES.get(name, name), {})[step] = value
        if not norms:
            del self.local_norms[rank]


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number in a record; local norms as ``local_norm/<group>``."""
    norms = record.get("local_norm")
    if isinstance(norms, Mapping):
        record = {**record, **{f"{_NORM}{group}": norm for group, norm in norms.items()}}
    for name, value in record.items():
        if name not in _NO_CURVES and (number := to_number(value)) is not None:
            yield name, number


def to_number(value: Any) -> float | None:
    """Return a number as a float; ``None`` for anything else.

    The strings ``"nan"``, ``"inf"`` and ``"-inf"`` are numbers, too, because `JsonLines` writes
    non-finite numbers as strings.
    """
    if isinstance(value, (bool, int, float)) or value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def _sorted(values: Mapping[int, float]) -> Curve:
    steps = sorted(values)
    return Curve(steps, [values[step] for step in steps])


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what `RunFacts` has written in a run folder; empty without ``run.json``.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / FACTS
    if not path.is_file():
        return {}
    facts = _json(path)
    if not isinstance(facts, dict):
        msg = f"{path}: expected an object, got {type(facts).__name__}"
        raise ValueError(msg)  # noqa: TRY004  (the content of a file is wrong, not an argument)
    return facts


def has_ended(folder: Path) -> bool:
    """Return whether the training in a run folder has ended; False without ``run.json``.

    Raises:
        ValueError: If the file is damaged.
    """
    return bool(read_facts(folder).get("state", NOT_ENDED) != NOT_ENDED)


def trainer_log(folder: Path) -> list[dict[str, Any]]:
    """Return the Trainer's log in a run folder or in its newest checkpoint; empty without a log.

    Raises:
        ValueError: If ``trainer_state.json`` is damaged.
    """
    while (state := _trainer_state(folder)) is not None:
        # The run may delete the checkpoint just now, after it has written a newer one.
        with contextlib.suppress(FileNotFoundError):
            return _log_of(state)
    return []


def _trainer_state(folder: Path) -> Path | None:
    """Return the path of the Trainer's state, in the folder or else in its newest checkpoint."""
    if (folder / _TRAINER_STATE).is_file():
        return folder / _TRAINER_STATE
    steps = {
        int(match[1]): path / _TRAINER_STATE
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and (path / _TRAINER_STATE).is_file()
    }
    return steps[max(steps)] if steps else None


def _log_of(path: Path) -> list[dict[str, Any]]:
    state = _json(path)
    log = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        msg = f"{path}: expected a Trainer's state whose `log_history` is a list of objects"
        raise ValueError(msg)
    # Leave out the summary that `train` logs at its end: it looks like the entry of a step. Only it
    # has the mean loss; an entry of a step may have `train_runtime`, too.
    return [entry for entry in named(log) if "train_loss" not in entry]


def _json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deep
        msg = f"{path}: invalid JSON: {error}"
        raise ValueError(msg) from error
