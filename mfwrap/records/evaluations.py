"""Name and read the results of a Trainer's evaluations."""

from collections.abc import Iterable, Mapping
from typing import Any

AVERAGED = "ema_"
"""Beginning of the names of metrics that averaged weights have."""

TIMINGS = ("_runtime", "_per_second", "_time")
"""Ends of the names of metrics that say how long an evaluation took."""

_STEP = "step_of_averages"
_MARK = "eval_averaged_weights"
_LOADED = "has_averages"


def note_averages(state: Any, *, are_evaluated: bool) -> None:
    """Note whether the evaluation at the present step uses averaged weights.

    All callbacks of a training share `state`. The Trainer does not save the note, because it saves
    only the declared fields.

    Args:
        state: A ``TrainerState``.
        are_evaluated: False if the evaluation uses the raw weights.
    """
    vars(state)[_STEP] = state.global_step if are_evaluated else None


def prefix_of(state: Any) -> str:
    """Return ``"ema_"`` if the evaluation at the present step uses averaged weights, else ``""``.

    Args:
        state: A ``TrainerState`` during training.
    """
    return AVERAGED if vars(state).get(_STEP) == state.global_step else ""


def mark_averages(state: Any, logs: Mapping[str, Any]) -> None:
    """Mark an evaluation of averaged weights in the Trainer's log.

    The metrics keep the Trainer's names, which other programs look for.

    Args:
        state: A ``TrainerState``.
        logs: What the Trainer has just logged. Nothing is marked if the log does not end with the
            results in it, as in a Trainer that logs in its own way.
    """
    results, log = results_of(logs), state.log_history
    if results and log and results_of(log[-1]) == results:
        log[-1][_MARK] = True


def note_loaded_averages(state: Any) -> None:
    """Note that the model ends the training with averaged weights.

    Args:
        state: A ``TrainerState``.
    """
    vars(state)[_LOADED] = True


def ends_with_averages(state: Any) -> bool:
    """Return whether the model has ended the training with averaged weights.

    Args:
        state: A ``TrainerState`` after the training.
    """
    return bool(vars(state).get(_LOADED))


def has_averages(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of a Trainer's log is an evaluation of averaged weights."""
    return bool(entry.get(_MARK))


def named(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a Trainer's log in which metrics of averaged weights begin with ``ema_``.

    Args:
        entry: One of the ``log_history`` of a ``TrainerState``.
    """
    if not has_averages(entry):
        return dict(entry)
    others = {name: value for name, value in entry.items() if name not in results_of(entry)}
    del others[_MARK]
    return others | results_of(entry, AVERAGED)


def results_of(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the metrics of a Trainer's evaluation without its timings.

    Args:
        metrics: All metrics of the evaluation.
        prefix: Is put before each name.
    """
    return {
        prefix + name: value
        for name, value in metrics.items()
        if name.startswith("eval_") and not name.endswith(TIMINGS) and name != _MARK
    }


def last_evaluation(log: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last entry of a Trainer's log with results that are numbers; empty without one.

    Args:
        log: ``log_history`` of a ``TrainerState``, or a part of it.
    """
    return next((entry for entry in reversed([*log]) if numbers_of(entry)), {})


def numbers_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the results in an entry of a Trainer's log that are numbers, without ``eval_``."""
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in results_of(entry).items()
        if isinstance(value, (int, float))
    }
