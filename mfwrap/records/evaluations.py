"""Read the results of a Trainer's evaluations."""

from collections.abc import Iterable, Mapping
from typing import Any

_TIMINGS = ("_runtime", "_per_second", "_time")


def results_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a Trainer's evaluation without its timings."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith("eval_") and not name.endswith(_TIMINGS)
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
