"""Name and read the results of a Trainer's evaluations."""

from collections.abc import Iterable, Mapping
from typing import Any

AVERAGED = "ema_"
"""Beginning of the names of metrics that averaged weights have."""

TIMINGS = ("_runtime", "_per_second", "_time")
"""Ends of the names of metrics that say how long an evaluation took."""

_STEP = "step_of_averages"


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


def results_of(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the metrics of a Trainer's evaluation without its timings.

    Args:
        metrics: All metrics of the evaluation.
        prefix: Is put before each name.
    """
    return {
        prefix + name: value
        for name, value in metrics.items()
        if name.startswith("eval_") and not name.endswith(TIMINGS)
    }


def last_results(log: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of the last evaluation in a Trainer's log, without the prefix ``eval_``.

    Args:
        log: ``log_history`` of a ``TrainerState``.
    """
    found: dict[str, float] = {}
    for entry in log:
        numbers = {
            name.removeprefix("eval_"): float(value)
            for name, value in results_of(entry).items()
            if isinstance(value, (int, float))
        }
        found = numbers or found
    return found
