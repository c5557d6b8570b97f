"""The record of what went wrong in a step: a line in a file, a line in the log."""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.records.json_lines import JsonLines

__all__ = ["Anomaly", "AnomalyLog", "GroupNorm", "WeightNorm", "layer_of", "rank_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNorm:
    """The local norm of a group of gradients in the step."""

    name: str
    rank: int
    norm: float
    usual_norm: float
    """Mean over the updates before; nan if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNorm:
    """The norm of a weight that is not what it was."""

    name: str
    norm: float
    norm_before: float
    """When it was last looked at: at the begin, a save, an evaluation or the end of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anomaly:
    """What is known of a step that went wrong. ``None`` is unknown."""

    step: int
    kind: str
    """``"loss_not_finite"``, ``"gradient_not_finite"``, ``"spike"`` or ``"replicas_differ"``."""

    ranks: tuple[int, ...]
    """Where it arose."""

    layer: str | None
    """Where in the network."""

    where: str | None = None
    """``"input"``, ``"weight"``, ``"activation"``, ``"loss"`` or ``"gradient"``."""

    name: str | None = None
    """Of what is the first that is not finite: the module by whose output, or by the gradient of
    whose output, it shows; the weight; or the network's input."""

    micro_batch: int | None = None
    """Counted from 0 on the rank where it arose."""

    rows: tuple[int, ...] | None = None
    """Of an input that is not finite, those that are not."""

    indices: tuple[int, ...] | None = None
    """Of the micro-batch in the data set, if the batch holds them."""

    is_replay_exact: bool | None = None
    """Whether weights and random numbers were those of the step; ``None`` without a replay."""

    gradients: tuple[GroupNorm, ...] = ()
    """The groups that tell most, the worst one first."""

    num_groups: int = 0
    """How many groups are not finite; of a spike, how many rose above the factor."""

    weights: tuple[WeightNorm, ...] = ()
    losses: tuple[float, ...] = ()
    """Of each rank."""

    global_norm: float | None = None
    usual_global_norm: float | None = None
    loss_scale: float | None = None
    """Of the step."""

    skipped: bool | None = None
    consecutive_skips: int | None = None

    def as_record(self) -> dict[str, Any]:
        """Return what is known, as JSON can hold it."""
        empty: tuple[object, ...] = (None, ())
        return {name: v for name, v in dataclasses.asdict(self).items() if v not in empty}

    def __str__(self) -> str:
        """Return it in one line."""
        what = self.kind.replace("_", " ")
        place = f" in {self.layer}" if self.layer else ""
        if self.where is not None:
            place += f", first in the {self.where} of {self.name or 'the network'}"
        elif self.gradients:
            worst = self.gradients[0]
            place += f", {worst.name} has norm {worst.norm:.4g}"
            if not math.isnan(worst.usual_norm):
                place += f" where {worst.usual_norm:.4g} is usual"
        if self.where is None and self.is_replay_exact is not None:
            place += ", not again in a replay"
        norm_is_finite = self.global_norm is not None and math.isfinite(self.global_norm)
        if self.kind == "loss_not_finite" and norm_is_finite:
            # Their update was applied, so that a replay would not have the weights of the step.
            place += ", all gradients finite, so not replayed"
        ranks = ", ".join(map(str, self.ranks))
        place += f", rank {ranks}" if ranks else ""
        place += "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        if self.skipped is not None:
            place += ", update skipped" if self.skipped else ", update applied"
        return f"step {self.step}: {what}{place}"


@final
class AnomalyLog:
    """Write anomalies to ``anomalies.jsonl`` of the run folder and to the log.

    Args:
        folder: Of the run; ``None`` writes to the log alone.
        rank: Of this process; those but 0 have a file of their own.
    """

    def __init__(self, folder: Path | None, rank: int = 0) -> None:
        self._lines = None if folder is None else JsonLines(rank_file(folder, "anomalies", rank))

    def write(self, anomaly: Anomaly) -> None:
        """Write one record and one line."""
        if self._lines is not None:
            self._lines.append(anomaly.as_record())
        place = "" if self._lines is None else f"; see {self._lines.path}"
        run_logger(__package__).warning("%s%s", anomaly, place)


def rank_file(folder: Path, name: str, rank: int) -> Path:
    """Return the file of JSON lines of a rank."""
    return folder / (f"{name}.jsonl" if rank == 0 else f"{name}_rank{rank}.jsonl")


def layer_of(name: str) -> str:
    """Return the layer that a parameter, a group of them or a module belongs to.

    That is the name up to its first number; without a number, the module that owns the parameter.

    Example:
        >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("lm_head.weight")
        ('model.layers.3', 'lm_head')
    """
    numbered = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    if numbered:
        return numbered[0]
    owner, _, last = name.rpartition(".")
    return owner if owner and last in {"weight", "bias"} else name
