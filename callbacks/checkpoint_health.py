"""Whether what a checkpoint holds is worth going on from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfwrap.records.json_lines import JsonLines, read_json_lines

__all__ = [
    "CheckpointHealth",
    "has_bad_weights",
    "health_of",
    "newest_healthy_checkpoint",
    "record_health",
    "recorded_health",
]

_FILE = "checkpoint_health.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointHealth:
    """What is known of a checkpoint."""

    checkpoint: str
    """Name of its folder."""

    step: int
    healthy: bool
    reasons: tuple[str, ...] = ()
    """Why it is not; empty if it is."""

    loss: float | None = None
    """Of its last update on this rank; ``None`` is unknown."""

    global_norm: float | None = None
    embedding_norm: float | None = None
    consecutive_skips: int | None = None
    skips_since_last: int | None = None
    """Updates that were skipped since the last checkpoint."""


def health_of(
    *,
    loss: float | None,
    global_norm: float | None,
    overflow: bool,
    consecutive_skips: int | None,
    embedding_norm: float | None,
    embedding_limit: float | None,
    most_skips: int,
    is_spike: bool,
    weights_are_bad: bool,
) -> tuple[str, ...]:
    """Return why a checkpoint is not healthy; nothing if it is.

    Args:
        loss: Of the last update; ``None`` is unknown, as for the others.
        global_norm: Of its gradients.
        overflow: They were not finite, so their norms say nothing.
        consecutive_skips: Updates in a row that were skipped.
        embedding_norm: Largest local norm of embeddings.
        embedding_limit: From which on it is too large; ``None`` for none.
        most_skips: How many in a row are no sign of illness.
        is_spike: The global norm is far from the usual.
        weights_are_bad: A weight is not finite.
    """
    reasons = []
    if weights_are_bad:
        reasons.append("a weight is not finite")
    if loss is not None and not math.isfinite(loss):
        reasons.append(f"the loss is {loss}")
    if consecutive_skips is not None and consecutive_skips > most_skips:
        reasons.append(f"{consecutive_skips} updates in a row were skipped")
    if is_spike and not overflow:
        reasons.append(f"the global norm spikes at {global_norm:.6g}")
    too_large = embedding_norm is not None and embedding_limit is not None and not overflow
    if too_large and not _below(embedding_norm, embedding_limit):
        reasons.append(f"the norm of the embedding's gradient is {embedding_norm:.6g}")
    return tuple(reasons)


def _below(norm: float | None, limit: float | None) -> bool:
    return norm is not None and limit is not None and norm < limit


@torch.no_grad()
def has_bad_weights(model: nn.Module) -> bool:
    """Return whether a floating parameter is not finite, on this rank; reads them and waits."""
    finite: list[Tensor] = []
    for parameter in model.parameters():
        local = getattr(parameter, "to_local", None)
        tensor = parameter if local is None else local()
        if tensor.is_floating_point() and tensor.numel():
            finite.append(torch.linalg.vector_norm(tensor, float("inf")).isfinite())
    return any(not each.item() for each in finite)


def record_health(run_folder: Path, health: CheckpointHealth) -> None:
    """Append what is known of a checkpoint to ``checkpoint_health.jsonl``."""
    JsonLines(run_folder / _FILE).append(asdict(health))


def recorded_health(run_folder: Path) -> Mapping[str, bool]:
    """Return by name of a checkpoint whether it is healthy, as it was recorded last."""
    path = run_folder / _FILE
    records: Sequence[dict[str, Any]] = read_json_lines(path) if path.exists() else ()
    return {record["checkpoint"]: bool(record["healthy"]) for record in records}


def newest_healthy_checkpoint(run_folder: str | Path) -> Path | None:
    """Return the checkpoint of the highest step that is there and was recorded as healthy.

    Args:
        run_folder: Where ``checkpoint-*`` and ``checkpoint_health.jsonl`` lie.

    Returns:
        ``None`` if there is none.

    Example:
        >>> newest_healthy_checkpoint("a-new-run") is None
        True
    """
    folder = Path(run_folder)
    healthy = [name for name, is_healthy in recorded_health(folder).items() if is_healthy]
    there = [folder / name for name in healthy if (folder / name).is_dir()]
    return max(there, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
