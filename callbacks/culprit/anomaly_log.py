"""Record a step that went wrong: one line in ``anomalies.jsonl``, one line in the log."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.records.json_lines import rank_file
from mfwrap.records.run_files import open_records

_MOST_SAMPLES = 2
"""Largest number of samples in the log line; the record has all of them."""

_MOST_BUFFERS = 2
"""Largest number of buffers in the log line."""

Kind = Literal[
    "loss_not_finite",
    "gradient_not_finite",
    "spike",
    "loss_spike",
    "loss_drop",
    "loss_shift",
    "local_norm_spike",
    "local_norm_drop",
    "zero_gradient",
    "vanishing_gradient",
    "norm_shift",
    "update_spike",
    "learning_rate_spike",
    "state_spike",
    "attention_logits",
    "expert_load",
    "update_growth",
    "replicas_differ",
    "recompute_differs",
]
"""Kind of an anomaly, as it is recorded. A ``"spike"`` is one of the global norm,
``"local_norm_spike"`` is one of a group's norm, and ``"state_spike"`` one of a weight, a buffer or
an optimizer's state."""

KINDS: Mapping[str, str] = {
    "loss_not_finite": "non-finite loss",
    "gradient_not_finite": "non-finite gradient norm",
    "spike": "gradient norm spike",
    "loss_spike": "loss spike",
    "loss_drop": "loss far too low",
    "loss_shift": "higher loss",
    "local_norm_spike": "gradient norm spike",
    "local_norm_drop": "gradient norm far too low",
    "zero_gradient": "gradient of zero",
    "vanishing_gradient": "vanishing gradient",
    "norm_shift": "gradient norms of another size",
    "update_spike": "update too large",
    "learning_rate_spike": "unusual learning rate",
    "state_spike": "training state changed",
    "attention_logits": "large attention logits",
    "expert_load": "uneven load of experts",
    "update_growth": "growing updates",
    "replicas_differ": "replicas differ",
    "recompute_differs": "recomputation differs",
}
"""Kinds of anomalies, each with its name in the log."""

NON_FINITE: frozenset[Kind] = frozenset({"loss_not_finite", "gradient_not_finite"})
"""Kinds of anomalies with a non-finite number."""

SHIFTS: frozenset[Kind] = frozenset({"loss_shift", "norm_shift"})
"""Kinds of anomalies that several steps in a row show together."""

_OF_ONE_LOSS: frozenset[Kind] = frozenset({"loss_spike", "loss_drop"})
"""Kinds of anomalies with a loss that is far from the usual one."""

OF_TERMS = "; of the terms of the step's loss, "
"""Begins what an explanation says of the terms of the loss."""

UNKNOWN_CAUSE = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNorm:
    """The local norm of one group of gradients in the step."""

    name: str
    """Name of the group."""

    rank: int
    norm: float
    usual_norm: float
    """Norm that was expected; NaN before the first applied update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateNorm:
    """Norm of a tensor of the training state beside an earlier one."""

    kind: str
    """``"weight"``, ``"buffer"``, or the name of an optimizer's state, such as ``"exp_avg"``."""

    name: str
    """Name of the parameter or of the buffer."""

    norm: float
    norm_before: float
    """Norm in the last sample before the step."""

    rise: float
    """Ratio of the two, the earlier one at least what is typical of the kind; ``inf`` for a NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row of a batch that stands out among the rows of its step. ``None`` means unknown."""

    rank: int
    micro_batch: int
    """Micro-batch of the row, counted from 0 on its rank."""

    row: int
    """Row in the micro-batch, counted from 0."""

    index: int | None = None
    """Index of the sample in the data set."""

    source: str | None = None
    """File and line that the sample comes from, or its file."""

    epoch: int | None = None
    """Number of the pass over the data, from 0, as in a file of ``skip_rows``."""

    position: int | None = None
    """Position in the order of this pass, from 0, as in a file of ``skip_rows``."""

    loss: float | None = None
    """Loss of the row alone: the mean over its own targets, if a Trainer divides by those of all
    batches."""

    gradient_norm: float | None = None
    """Norm of the gradient of the row's share of the step's loss, without the loss scale."""

    loss_without: float | None = None
    """Loss of the micro-batch with another row in the place of this row."""

    gradient_norm_without: float | None = None
    """Norm of the micro-batch's gradient with another row in the place of this row."""

    text: str | None = None
    """Text of the row, if texts are to be shown."""

    @property
    def place(self) -> str:
        """Where the row is in the step and, if that is known, in the data."""
        in_data = [] if self.source is None else [self.source]
        if self.index is not None:
            in_data.append(f"data set index {self.index}")
        if self.epoch is not None and self.position is not None:
            in_data.append(f"epoch {self.epoch}, position {self.position}")
        place = f"row {self.row} of micro-batch {self.micro_batch} on rank {self.rank}"
        return f"{place} ({'; '.join(in_data)})" if in_data else place

    def described(self) -> str:
        """Return a phrase with the place of the row, and the numbers by which it stands out."""
        place = self.place
        if self.loss is not None and self.gradient_norm is not None:
            part = f"its part of the gradient has norm {self.gradient_norm:.4g}"
            return f"{place} has loss {self.loss:.4g}, and {part}"
        if self.loss_without is not None and self.gradient_norm_without is not None:
            loss, norm = self.loss_without, self.gradient_norm_without
            return f"without {place} the loss is {loss:.4g} and the gradient norm {norm:.4g}"
        return place


@dataclass(frozen=True, kw_only=True, slots=True)
class Anomaly:
    """Findings about a step that went wrong. ``None`` and ``()`` mean unknown.

    A record in ``anomalies.jsonl`` has the fields that are known. The record at the end of an
    episode of several steps has its first ``step`` and its ``kind``, ``last_step``, ``num_steps``
    (bad steps) and ``num_skipped`` (of their updates). It also has a cause that was found later, in
    ``latest`` how far something has grown, in ``diverged`` that the loss has not come back, and in
    ``later_samples`` the samples of later steps, of which ``num_searched`` were searched.
    """

    step: int
    kind: Kind
    since: int | None = None
    """First step in which a shift shows, or in which the fault may have begun, if it was looked for
    in some steps only."""

    ranks: tuple[int, ...]
    """Ranks on which the fault arose; ``()`` if it is the same on all ranks."""

    layer: str | None
    """Layer in which the fault arose; empty for the code of the network between its modules."""

    cause: str = UNKNOWN_CAUSE
    """Name of the cause."""

    explanation: str | None = None
    """A clause that says what happened, with its numbers."""

    suggestion: str | None = None
    """What to do, in a clause."""

    where: str | None = None
    """``"input"``, ``"targets"`` (a micro-batch without targets), ``"mask"`` (one without tokens),
    ``"weight"``, ``"weights"`` (most weights are non-finite), ``"other_weight"`` (one of a model
    beside the network, such as a teacher), ``"received"`` (what a module receives),
    ``"activation"``, ``"loss"`` or ``"gradient"``."""

    name: str | None = None
    """Name of the first culprit: an input of the network, a weight, or a module. A module is the
    culprit if its output or the gradient of its output is non-finite."""

    device: str | None = None
    """Device on which a step was run again with another result."""

    fingerprints: tuple[str, ...] = ()
    """Fingerprint of the tensor in each run of the step, the step itself first."""

    micro_batch: int | None = None
    """Micro-batch of the fault, counted from 0 on its rank."""

    rows: tuple[int, ...] | None = None
    """Non-finite rows of the input, if the fault is in an input."""

    indices: tuple[int, ...] | None = None
    """Indices of the micro-batch's samples in the data set, if the batch contains indices."""

    is_replay_exact: bool | None = None
    """Whether the replay used the same weights as the step; ``None`` without a replay."""

    replay: str | None = None
    """Verdict of the replay: ``"reproduced"``, ``"not_reproduced"``, ``"not_covered"`` or
    ``"failed"``; ``None`` without a replay."""

    replay_detail: str | None = None
    """``"transient"`` if three exact replays were clean, ``"later weights"``, which of the replays
    found the fault, what is outside of the replay, or the error that the replay raised."""

    num_clean_replays: int | None = None
    """Number of replays in which all values were finite."""

    samples: tuple[BadRow, ...] = ()
    """Rows of batches that stand out, the worst first."""

    samples_detail: str | None = None
    """How the rows were found, or why no row is named; ``None`` without a search."""

    are_samples_exact: bool | None = None
    """Whether the rows were run with the weights and the random numbers of the step."""

    gradients: tuple[GroupNorm, ...] = ()
    """Norms of the groups of gradients that are most likely at fault, the likeliest first."""

    num_groups: int = 0
    """Number of groups whose norm is non-finite. In a spike: number of groups whose norm rose by
    the spike factor or more. If replicas or runs differ: number of tensors that differ."""

    weights: tuple[StateNorm, ...] = ()
    """Weights whose norm is non-finite or has risen, the worst first. Their records have no
    ``kind`` and no ``rise``."""

    states: tuple[StateNorm, ...] = ()
    """Optimizer states and buffers whose norm is non-finite, has risen, or has fallen (optimizer
    states), the worst first."""

    moved: tuple[str, ...] = ()
    """Weights whose update is an anomaly, the worst first."""

    buffers: tuple[str, ...] = ()
    """Names of the buffers that have become non-finite since the previous anomaly. A skipped update
    leaves them non-finite."""

    losses: tuple[float, ...] = ()
    """Loss of each rank."""

    usual_loss: float | None = None
    """Loss that was expected on the first of `ranks`."""

    learning_rate: float | None = None
    global_norm: float | None = None
    usual_global_norm: float | None = None
    loss_scale: float | None = None
    """Loss scale that the step used."""

    skipped: bool | None = None
    """Whether the update was skipped."""

    consecutive_skips: int | None = None
    """Skipped updates in a row, this one included."""

    def as_record(self) -> dict[str, Any]:
        """Return the known fields, ready for JSON."""
        record = dataclasses.asdict(self, dict_factory=_known)
        for weight in record.get("weights", ()):
            del weight["kind"], weight["rise"]
        return record

    def __str__(self) -> str:
        """Describe the anomaly in one line."""
        place = f" in layer {self.layer}" if self.layer else ""
        if self.ranks:
            place += f" on {_counted('rank', self.ranks)}"
        if self.micro_batch is not None:
            place += f", micro-batch {self.micro_batch}"
        findings = self._findings()
        detail = f": {', '.join(findings)}" if findings else ""
        if self.since is not None and self.kind in SHIFTS:
            detail += f"; it shows from step {self.since} on"
        elif self.since is not None:
            detail += f"; it began in step {self.since} at the earliest"
        if self.cause == "learning_rate" and self.suggestion is not None:
            detail += f"; {self.suggestion}"  # short; those of other causes are on the run page
        if self.skipped is not None:
            detail += "; update skipped" if self.skipped else "; update applied"
        return f"step {self.step}: {KINDS[self.kind]}{place}{detail}"

    def _findings(self) -> list[str]:
        """Return phrases that describe the fault."""
        findings = []
        if self.kind == "spike" and self.global_norm is not None:
            findings.append(f"global norm is {_compared(self.global_norm, self.usual_global_norm)}")
        if self.where is not None:
            findings.append(self._cause())
        elif self.explanation is not None:
            findings.append(self.explanation)
        elif self.kind in _OF_ONE_LOSS and self.ranks and self.ranks[0] < len(self.losses):
            loss = self.losses[self.ranks[0]]
            findings.append(f"the loss is {_compared(loss, self.usual_loss)}")
        # Beside a cause, any other group of gradients would be taken for the culprit.
        names = self.explanation is None or (
            self.layer is not None and self.gradients[:1] and self.layer in self.gradients[0].name
        )
        if self.gradients and self.where is None and names:
            worst = self.gradients[0]
            norm = _compared(worst.norm, worst.usual_norm)
            findings.append(f"gradient norm of {worst.name} is {norm}")
        findings += self._replay_findings()
        norm_is_finite = self.global_norm is not None and math.isfinite(self.global_norm)
        if self.kind == "loss_not_finite" and norm_is_finite and self.where is None:
            # With finite gradients the update is usually applied, which changes the weights. A
            # replay would need the weights from before the update.
            findings.append("all gradients are finite, a replay is not possible after the update")
        findings += [row.described() for row in self.samples[:_MOST_SAMPLES]]
        left = len(self.samples) - _MOST_SAMPLES
        if left > 0:
            findings.append(f"and {left} more {'rows' if left > 1 else 'row'}")
        if self.buffers:
            shown = _counted("buffer", self.buffers[:_MOST_BUFFERS])
            more = len(self.buffers) - _MOST_BUFFERS
            findings.append(f"{shown}{f' and {more} more' if more > 0 else ''} became non-finite")
        # An explanation such as "input `x` is non-finite" may be said already, with its rows.
        said = ", ".join(findings)
        if self.where is not None and self.explanation is not None and self.explanation not in said:
            findings.append(self.explanation)
        return findings

    def _replay_findings(self) -> list[str]:
        """Return phrases about the replay, except for an exact replay that found the fault."""
        is_outside = self.replay == "not_covered" and self.where is not None
        if self.replay is None or self.is_replay_exact is None or is_outside:
            return []
        exact = "a replay" if self.is_replay_exact else "a replay with later weights"
        if self.replay == "not_covered":
            said = f"{exact} was finite but does not cover the whole step"
            if (self.replay_detail or "") not in (self.explanation or ""):
                said = f"{said}: {self.replay_detail}"
        elif self.replay == "failed":
            said = f"the replay failed: {self.replay_detail}"
        elif self.replay_detail == "transient":
            said = (
                f"{self.num_clean_replays} exact replays did not reproduce it, one of them with "
                "deterministic kernels: code that depends on anything else, or the hardware"
            )
        elif self.replay == "not_reproduced":
            said = f"{exact} did not reproduce it"
        elif self.replay_detail:
            said = f"found {self.replay_detail}"
        else:
            said = "" if self.is_replay_exact else f"found by {exact}"
        return [said] if said else []

    def _cause(self) -> str:
        """Describe the first tensor at fault."""
        if self.kind == "replicas_differ":
            tensor = self.name if self.where == "weight" else f"the gradient of {self.name}"
            if self.num_groups < 2:
                return f"{tensor} differs"
            return f"{tensor} is the first of {self.num_groups} tensors that differ"
        if self.where == "weight":
            return self._weight()
        whole = {
            "weights": "most weights were non-finite before the step",
            "targets": f"the micro-batch has no targets, all of `{self.name}` is ignored",
            "mask": f"the micro-batch has no tokens, all of `{self.name}` is zero",
            "other_weight": str(self.explanation),
            "loss": "the outputs of all modules of the network are finite, the loss is not",
        }
        if self.explanation is not None and (
            self.where == "activation" or self.kind not in NON_FINITE
        ):
            # Of a finite step, no value was the first non-finite one.
            places = ("activation", "gradient", "input", "received")
            whole |= dict.fromkeys(places, self.explanation)
        if self.where in whole:
            return whole[self.where]
        if self.where == "input":
            rows = f" in {_counted('row', self.rows)}" if self.rows else ""
            return f"input `{self.name}` is non-finite{rows}"
        what = "output" if self.where == "activation" else "gradient"
        return f"the first non-finite {what} is that of {self.name}"

    def _weight(self) -> str:
        """Describe the weight at fault."""
        norms = next((weight for weight in self.weights if weight.name == self.name), None)
        if norms is not None and math.isfinite(norms.norm):
            return f"norm of {self.name} rose from {norms.norm_before:.4g} to {norms.norm:.4g}"
        # A finite weight may change without a rise of its norm. Only a replay of an overflow finds
        # a non-finite weight without its norm, and the explanation then says so.
        if norms is None and (self.kind not in NON_FINITE or self.cause == "weight_changed"):
            return self.explanation or f"{self.name} has changed"
        return f"{self.name} has non-finite elements"


def _known(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a record whose values are known."""
    unknown: tuple[object, ...] = (None, ())
    return {name: value for name, value in fields if value not in unknown}


def _compared(norm: float, usual_norm: float | None) -> str:
    """Format a norm, followed by the usual norm if it is known."""
    if usual_norm is None or math.isnan(usual_norm):
        return f"{norm:.4g}"
    return f"{norm:.4g} (usually {usual_norm:.4g})"


def _counted(noun: str, items: Sequence[int] | Sequence[str]) -> str:
    return f"{noun}{'s' if items[1:] else ''} {', '.join(map(str, items))}"


class Recordable(Protocol):
    """What is written to ``anomalies.jsonl``; its text is the line in the log."""

    def as_record(self) -> dict[str, Any]:
        """Return the known fields, ready for JSON."""


@final
class AnomalyLog:
    """Write anomalies to ``anomalies.jsonl`` in the run folder and to the log.

    Args:
        folder: Run folder; ``None`` writes to the log only.
        rank: Rank of this process. Ranks above 0 write ``anomalies_rank<rank>.jsonl``.
        first_step: Steps finished before this training; 0 for a training from the start.

    Raises:
        OSError: If files cannot be written to the run folder.
    """

    def __init__(self, folder: Path | None, rank: int = 0, *, first_step: int = 0) -> None:
        self._lines = None
        if folder is not None:
            self._lines = open_records(rank_file(folder, "anomalies", rank), first_step)

    def write(self, found: Recordable, *, logs: bool = True) -> None:
        """Append an anomaly, a note, or the end of an episode to the file.

        Args:
            found: What to write.
            logs: Whether to log it in one line, too.
        """
        if self._lines is not None:
            self._lines.append(found.as_record())
        if logs:
            file = "" if self._lines is None else f"; see {self._lines.path}"
            run_logger(__package__).warning("%s%s", str(found), file)
