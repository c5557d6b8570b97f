"""Read the folder of a run as curves, local norms, episodes of anomalies and rollbacks."""

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from mfwrap.arguments import callers_stacklevel
from mfwrap.records.episodes import Episode, episodes_of, notes_of
from mfwrap.records.evaluations import AVERAGED, NO_RESULT, named
from mfwrap.records.forms import Form, fitting, to_number
from mfwrap.records.json_lines import RECORD_NAMES, parsed_json, rank_files, read_json_lines
from mfwrap.records.model_samples import SAMPLES, ModelSamples, model_samples
from mfwrap.records.rollbacks import RollbackRecord, read_rollbacks

FACTS = "run.json"
"""File of `mfwrap.records.run_facts.RunFacts`."""

_FACTS: Mapping[str, Form] = {
    **dict.fromkeys(
        ("configuration", "hardware", "inputs", "parameters", "versions", "code"), dict
    ),
    "seconds": float,
    "error": str,
    "resumed": [int],
    "changes": [{"step": int, "settings": [str]}],
}
"""Forms of facts that are read in parts."""

NOT_ENDED = "not ended"
"""State in ``run.json`` of a run that goes on, or was killed."""

TERM = "losses/"
"""Start of the name of a loss beside that of the step."""

_NORM = "local_norm/"
_ANOMALIES = "anomalies"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
LOOP_STATE = "mfwrap_monitor.json"
"""File of `LoopMonitor` in a checkpoint of a loop, which may have any name."""

TRAINER_STATE = "trainer_state.json"
"""File of the Trainer's state, in a checkpoint or in the folder of a run that has finished."""

_ALIASES = {"grad_norm": "global_norm", "local_loss": "loss"}
"""Name in `StepOutput` of each number that transformers or MindFormers name differently."""

_NO_CURVES = {"step", "epoch", "size", NO_RESULT, AVERAGED + NO_RESULT}

_Values: TypeAlias = dict[str, dict[int, float]]
"""Numbers by name, then by step."""


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

    notes: list[dict[str, Any]] = field(default_factory=list)
    """What should not be so in any run, each with ``step``, ``cause``, ``explanation`` and
    ``suggestion``."""

    max_grad_norm: float | None = None
    """Global norm above which gradients were clipped; ``None`` if the run has not recorded it."""

    rank_losses: Mapping[int, Curve] = field(default_factory=dict)
    """Loss of each rank over the steps; empty unless ranks other than 0 have recorded theirs."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the run was, from ``run.json``; empty without this file. See `read_facts`."""

    samples: ModelSamples = field(default_factory=ModelSamples)
    """What the model has said about a few inputs."""

    checkpoints: Sequence[Path] = ()
    """Folders ``checkpoint-<step>``, in the order of their steps."""

    is_watched: bool = True
    """Whether a monitor has looked for anomalies."""

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
    ``anomalies*.jsonl`` hold the anomalies, ``samples.jsonl`` what the model has said, and
    ``rollbacks.json`` the rollbacks. If a step was recorded twice, as happens after a resume, the
    last record counts. A file under another name than those of mfwrap is left out with a warning if
    its lines are not records.

    Args:
        folder: Run folder.

    Raises:
        FileNotFoundError: If the folder does not exist, or holds neither numbers nor the error of a
            run.
        ValueError: If a file cannot be read.
    """
    from mfwrap.checkpoints.written_files import listed_names  # noqa: PLC0415  (imports torch)

    anomalies: list[tuple[int, list[dict[str, Any]]]] = []
    # A file is made with its first record, and listed before.
    watched = [*(listed_names(folder) or ())]
    values: dict[int, _Values] = {0: {}}
    logged: _Values = {}
    samples = ModelSamples()
    limits = _add(logged, trainer_log(folder))
    for path, name, rank in rank_files(folder):
        watched.append(path.name)
        try:
            records = read_json_lines(path)
        except ValueError:
            if name in RECORD_NAMES:
                raise
            warnings.warn(
                f"{path} is left out: its lines are not records", stacklevel=callers_stacklevel()
            )
            continue
        if name.startswith(_ANOMALIES):
            anomalies.append((rank, records))
        elif name == SAMPLES:
            samples = model_samples(records)
        else:
            limits += _add(values.setdefault(rank, {}), records)
    _fill(values[0], logged)
    curves = {
        rank: {name: _sorted(numbers) for name, numbers in of_rank.items()}
        for rank, of_rank in sorted(values.items())
    }
    norms = {rank: _local_norms(of_rank) for rank, of_rank in curves.items()}
    losses = {rank: of_rank["loss"] for rank, of_rank in curves.items() if "loss" in of_rank}
    facts = read_facts(folder)
    if not curves[0] and not any(norms.values()) and "error" not in facts:
        raise not_a_run_folder(folder)
    return RunRecord(
        folder.resolve().name,
        {name: curve for name, curve in curves[0].items() if not name.startswith(_NORM)},
        {rank: groups for rank, groups in norms.items() if groups},
        episodes_of(anomalies),
        read_rollbacks(folder)[0],
        notes_of(anomalies),
        limits[-1] if limits else None,
        losses if any(losses) else {},
        facts,
        samples,
        _checkpoints(folder) or loop_checkpoints(folder),
        any(name.startswith(_ANOMALIES) for name in watched),
    )


def not_a_run_folder(folder: Path) -> FileNotFoundError:
    """Return the error for a folder that has no numbers of a run."""
    if (folder / FACTS).is_file():
        said = [f"see {file}" for file in folder.glob("error_rank_*.txt")]
        said += filter(None, [read_facts(folder).get("error")])
        failed = f"; it failed: {said[0]}" if said else ""
        return FileNotFoundError(f"{folder}: the run has recorded no step{failed}")
    if folder.is_dir():
        reason = f"neither a *.jsonl file nor {TRAINER_STATE} in it has the numbers of a step"
    else:
        reason = "it is a file" if folder.exists() else "there is no such folder"
    return FileNotFoundError(f"{folder} is not a run folder: {reason}")


def _add(values: _Values, records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Add numbers of records, of which a later one replaces an earlier one of its step.

    Returns:
        The limits of the global norm in the records.
    """
    limits = []
    for record in records:
        step = record.get("step")
        for name, number in _numbers(record):
            if type(step) is int:
                values.setdefault(_ALIASES.get(name, name), {})[step] = number
            if name == "max_grad_norm":
                limits.append(number)
    return limits


def _fill(values: _Values, logged: _Values) -> None:
    """Add numbers of the Trainer's log, except where the step has one of this name already.

    The Trainer logs means over several steps, and its file sorts the layers by name, so their order
    is lost. It gives the same name to results of averaged weights.
    """
    for name, numbers in logged.items():
        averaged = values.get(AVERAGED + name, {})
        new = {step: number for step, number in numbers.items() if step not in averaged}
        if new:
            values[name] = new | values.get(name, {})


def _local_norms(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the curves of local norms by name of the parameter group."""
    return {
        name.removeprefix(_NORM): curve for name, curve in curves.items() if name.startswith(_NORM)
    }


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number in a record.

    Local norms are ``local_norm/<group>``, and further losses are ``losses/<name>``.
    """
    for part, prefix in (("local_norm", _NORM), ("losses", TERM)):
        inner = record.get(part)
        if isinstance(inner, Mapping):
            record = {**record, **{f"{prefix}{name}": one for name, one in inner.items()}}
    for name, value in record.items():
        if name not in _NO_CURVES and (number := to_number(value)) is not None:
            yield name, number


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
    advice = "move the file away to go on without it"
    try:
        facts = _json(path)
    except ValueError as error:
        msg = f"{error}; {advice}"
        raise ValueError(msg) from error
    if not isinstance(facts, dict):
        msg = f"{path}: expected an object, got {type(facts).__name__}; {advice}"
        raise ValueError(msg)  # noqa: TRY004  (the content of a file is wrong, not an argument)
    return fitting(facts, _FACTS)


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
    if (folder / TRAINER_STATE).is_file():
        return folder / TRAINER_STATE
    states = [path / TRAINER_STATE for path in _checkpoints(folder)]
    return next((path for path in reversed(states) if path.is_file()), None)


def loop_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that a loop has saved beside its records, in the order of steps."""
    known = ((_loop_step(file), file.parent) for file in folder.glob(f"*/{LOOP_STATE}"))
    return [path for _, path in sorted((step, path) for step, path in known if step is not None)]


def step_of_saved(checkpoint: Path) -> int:
    """Return the step of a checkpoint of a Trainer or a loop; 0 if its state is damaged."""
    named = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(named[1]) if named else _loop_step(checkpoint / LOOP_STATE) or 0


def _loop_step(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        state = _json(file)
        step = state.get("global_step") if isinstance(state, dict) else None
        return step if type(step) is int else None
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run; `mfwrap.checkpoints` would load torch."""
    steps = {
        int(match[1]): path
        for path in folder.glob("checkpoint-*")
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    }
    return [steps[step] for step in sorted(steps)]


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
        return parsed_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deep
        msg = f"{path}: invalid JSON: {error}"
        raise ValueError(msg) from error
