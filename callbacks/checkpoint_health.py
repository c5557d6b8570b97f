"""Record whether a checkpoint is worth resuming from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfwrap.callbacks.culprit.good_checkpoints import undiverged_checkpoints
from mfwrap.records.json_lines import read_json_lines

HEALTH_FILE = "checkpoint_health.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHealth:
    """Health of a checkpoint, as ``checkpoint_health.jsonl`` records it; ``None`` means unknown."""

    checkpoint: str
    """Name of the checkpoint's folder."""

    step: int
    healthy: bool
    reasons: tuple[str, ...] = ()
    """Why the checkpoint is unhealthy; empty if it is healthy."""

    loss: float | None = None
    """Loss of the last update before the checkpoint, on this rank."""

    global_norm: float | None = None
    embedding_norm: float | None = None
    consecutive_skips: int | None = None
    skips_since_last: int | None = None
    """Skipped updates since the last checkpoint."""


def newest_healthy_checkpoint(run_folder: str | Path) -> Path | None:
    """Return the newest checkpoint that exists and was recorded as healthy.

    If a `TrainingStateMonitor` has found that the loss has left its course and not come back, the
    checkpoints since then do not count.

    Args:
        run_folder: Folder of ``checkpoint-*`` and ``checkpoint_health.jsonl``.

    Returns:
        Path of the checkpoint with the highest step; ``None`` if no checkpoint is healthy.

    Example:
        >>> newest_healthy_checkpoint("a-new-run") is None
        True
    """
    folder = Path(run_folder)
    healthy = [name for name, is_healthy in recorded_health(folder).items() if is_healthy]
    existing = [folder / name for name in healthy if (folder / name).is_dir()]
    existing = undiverged_checkpoints(folder, existing)
    return max(existing, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def recorded_health(run_folder: Path) -> Mapping[str, bool]:
    """Return whether each recorded checkpoint is healthy, keyed by name; the last record counts."""
    path = run_folder / HEALTH_FILE
    records: Sequence[dict[str, Any]] = read_json_lines(path) if path.exists() else ()
    return {record["checkpoint"]: bool(record["healthy"]) for record in records}


def health_of(
    known: Mapping[str, float],
    *,
    embedding_limit: float | None,
    most_skips: int,
    is_spike: bool,
    non_finite: Mapping[str, Sequence[str]],
) -> tuple[str, ...]:
    """Return the reasons why a checkpoint is unhealthy; empty if it is healthy.

    Args:
        known: Values of the last update before the checkpoint, by name: those of
            `CheckpointHealth`, and ``overflow``, whether its gradients were non-finite. If so,
            their norms are not checked. A value that is missing is unknown and not checked.
        embedding_limit: Smallest ``embedding_norm`` that is unhealthy; ``None`` turns this check
            off.
        most_skips: Largest number of skipped updates in a row that is still healthy.
        is_spike: Whether the global norm is a spike.
        non_finite: Names of the non-finite tensors by their kind, such as ``"weight"``.
    """
    reasons = [_reason(kind, names) for kind, names in non_finite.items() if names]
    loss, skips = known.get("loss", 0.0), known.get("consecutive_skips", 0)
    overflow, embedding_norm = known.get("overflow", False), known.get("embedding_norm")
    if not math.isfinite(loss):
        reasons.append(f"the loss is {loss}")
    if skips > most_skips:
        reasons.append(f"{skips:.0f} updates in a row were skipped")
    if is_spike and not overflow:
        reasons.append(f"the global norm spikes at {known['global_norm']:.6g}")
    if embedding_norm is not None and embedding_limit is not None and not overflow:
        # Written so that a NaN norm counts as too large.
        is_small = embedding_norm < embedding_limit
        if not is_small:
            reasons.append(f"the gradient norm of an embedding is {embedding_norm:.6g}")
    return tuple(reasons)


def _reason(kind: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"the {kind} {names[0]} is not finite"
    return f"{len(names)} {kind}s are not finite, the first is {names[0]}"
