"""Name and read the results of a Trainer's evaluations."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mfwrap.records.rewards import REWARD

AVERAGED = "ema_"
"""Beginning of the names of metrics that averaged weights have."""

TIMINGS = ("_runtime", "_per_second", "_time")
"""Ends of the names of metrics that say how long an evaluation took."""

NO_RESULT = "eval_num_tokens"
"""TRL's count of the training's tokens so far, which it logs with an evaluation."""

_MARK = "averaged_weights"

_NOTES: dict[int, dict[str, Any]] = {}
"""Notes about each ``TrainerState``, by its id: it is not hashable."""


def _notes_of(state: Any) -> dict[str, Any]:
    """Return the notes about a state, which end with it."""
    if id(state) not in _NOTES:
        weakref.finalize(state, _NOTES.pop, id(state))
    return _NOTES.setdefault(id(state), {})


def note_averages(state: Any, *, are_evaluated: bool) -> None:
    """Note whether the evaluation at the present step uses averaged weights.

    Args:
        state: A ``TrainerState``, which all callbacks of a training share.
        are_evaluated: False if the evaluation uses the raw weights.
    """
    _notes_of(state)["step"] = state.global_step if are_evaluated else None


def prefix_of(state: Any) -> str:
    """Return ``"ema_"`` if the latest evaluation used averaged weights, else ``""``.

    Args:
        state: A ``TrainerState`` since the first step of the evaluation.
    """
    return AVERAGED if _notes_of(state).get("step") == state.global_step else ""


def mark_averages(state: Any, metrics: Mapping[str, Any]) -> None:
    """Mark an evaluation of averaged weights in the Trainer's log, by an entry that follows it.

    The entry of the evaluation itself stays as other programs expect it.

    Args:
        state: A ``TrainerState``.
        metrics: Metrics of the evaluation. Nothing is marked if the log of this step does not have
            them, as in a Trainer that logs in its own way.
    """
    results, log = results_of(metrics), state.log_history
    for index in range(len(log), 0, -1) if results else ():
        entry = log[index - 1]
        if entry.get("step") != state.global_step or _MARK in entry:
            return
        if results_of(entry) == results:
            # Another callback may have logged since.
            log.insert(index, {_MARK: True, "step": state.global_step})
            return


def note_loaded_averages(state: Any, *, are_loaded: bool) -> None:
    """Note whether the model ends the training with averaged weights.

    Args:
        state: A ``TrainerState``.
        are_loaded: Whether it does.
    """
    _notes_of(state)["are_loaded"] = are_loaded


def ends_with_averages(state: Any) -> bool:
    """Return whether the model has ended the training with averaged weights.

    Args:
        state: A ``TrainerState`` after the training.
    """
    return bool(_notes_of(state).get("are_loaded"))


def note_results(state: Any, metrics: Mapping[str, Any], weights: str) -> None:
    """Note what the training's own evaluation at the present step has found.

    Args:
        state: A ``TrainerState``.
        metrics: Metrics of the evaluation.
        weights: Hash of the weights that were evaluated.
    """
    noted = (state.global_step, prefix_of(state), weights)
    _notes_of(state)["results"] = (noted, dict(metrics))


def noted_results(state: Any, prefix: str, weights: str) -> dict[str, Any] | None:
    """Return what `note_results` has noted; ``None`` if it was another step, or of other weights.

    Args:
        state: A ``TrainerState``.
        prefix: ``"ema_"`` for averaged weights, ``""`` for raw ones.
        weights: Hash of the weights.
    """
    noted, metrics = _notes_of(state).get("results", (None, None))
    return metrics if noted == (state.global_step, prefix, weights) else None


def named(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a Trainer's log; results of averaged weights begin with ``ema_``.

    Args:
        log: ``log_history`` of a ``TrainerState``.
    """
    return [
        {AVERAGED + name if name in averaged else name: value for name, value in entry.items()}
        for entry, is_averaged in _with_marks(log)
        for averaged in [results_of(entry) if is_averaged else {}]
    ]


def last_has_averages(log: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last evaluation in a Trainer's log used averaged weights.

    Args:
        log: ``log_history`` of a ``TrainerState``, or a part of it.
    """
    found = [is_averaged for entry, is_averaged in _with_marks(log) if results_of(entry)]
    return bool(found) and found[-1]


def _with_marks(log: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield each entry of a log but the marks, and whether a mark follows it."""
    for index, entry in enumerate(log):
        if _MARK not in entry:
            yield entry, any(_MARK in following for following in log[index + 1 : index + 2])


def results_of(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the metrics of a Trainer's evaluation without its timings and `NO_RESULT`.

    A metric that is ``None`` is left out: TRL gives it to a reward that has judged no answer. The
    mean reward is first, because it is what the model learns.

    Args:
        metrics: All metrics of the evaluation.
        prefix: Is put before each name.
    """
    names = sorted(metrics, key=lambda name: name != f"eval_{REWARD}")
    return {
        prefix + name: metrics[name]
        for name in names
        if name.startswith("eval_")
        and name != NO_RESULT
        and not name.endswith(TIMINGS)
        and metrics[name] is not None
    }
