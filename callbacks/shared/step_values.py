"""The values of one step: packed into one tensor on the device, read on the host a step later."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mfwrap import StepReport
from mfwrap.tensors.shards import on_device

_OUTPUT_FIELDS = ("loss", "overflow", "loss_scale", "learning_rate", "global_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """Values of one step on the host; ``None`` where a value is unknown."""

    loss: float
    overflow: bool | None = None
    loss_scale: float | None = None
    """Loss scale after this step, which the next step uses."""

    learning_rate: float | None = None
    global_norm: float | None = None
    skipped: bool | None = None
    consecutive_skips: int | None = None
    scale_before: float | None = None
    """Loss scale that this step used."""

    losses: Mapping[str, float] = field(default_factory=dict)
    """Losses that the network has reported beside `loss`, by name."""

    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates by the name of the parameter group; empty unless all groups have names."""

    def to_record(self) -> dict[str, float | bool]:
        """Return the known values, by their names in `StepOutput` and `StepReport`.

        Neither has a field for `scale_before`, so it is left out. So are the mappings.
        """
        values: dict[str, float | bool | None] = {
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "loss_scale": self.loss_scale,
            "global_norm": self.global_norm,
            "overflow": self.overflow,
            "skipped": self.skipped,
            "consecutive_skips": self.consecutive_skips,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedValues:
    """Values of one step on the device."""

    names: tuple[str, ...]
    """Fields of `StepValues`."""

    tensor: Tensor
    """Shape ``(len(names) + len(loss_names) + len(rate_names),)``, float32."""

    loss_names: tuple[str, ...] = ()
    """Names of the losses of `StepValues.losses`, whose values follow those of the fields."""

    rate_names: tuple[str, ...] = ()
    """Names of the parameter groups, whose learning rates follow the losses. Groups with the same
    name have the same rate."""

    def index_of_loss(self, name: str) -> int | None:
        """Return the index in `tensor` of ``"loss"`` or of a named loss; ``None`` without it."""
        if name == "loss":
            return self.names.index(name)
        return len(self.names) + self.loss_names.index(name) if name in self.loss_names else None

    def unpack(self, host_values: Sequence[float]) -> StepValues:
        """Return the values of the step.

        Args:
            host_values: Elements of `tensor`, copied to the host.
        """
        number = len(self.names)
        values: dict[str, Any] = dict(zip(self.names, host_values[:number], strict=True))
        for name, kind in (("overflow", bool), ("skipped", bool), ("consecutive_skips", int)):
            if name in values:
                values[name] = kind(values[name])
        names = (*self.loss_names, *self.rate_names)
        others = list(zip(names, host_values[number:], strict=True))
        split = len(self.loss_names)
        return StepValues(
            **values, losses=dict(others[:split]), learning_rates=dict(others[split:])
        )


def _number(value: Tensor) -> Tensor:
    value = value.detach().float()
    return value if value.dim() == 0 else value.mean()


def pack(
    output: Any,
    *,
    skipped: Tensor | None = None,
    consecutive_skips: Tensor | None = None,
    scale_before: Tensor | None = None,
    report: StepReport | None = None,
) -> PackedValues:
    """Copy the values of a step into one new tensor, without synchronizing with the device.

    Args:
        output: A named tuple with a field ``loss``, such as `mfwrap.StepOutput`, or the loss alone
            as a tensor. A value of several elements is averaged, as in MindFormers.
        skipped: Shape ``()``: whether the update was skipped; ``None`` if unknown.
        consecutive_skips: Shape ``()``: skipped updates in a row; ``None`` if unknown.
        scale_before: Shape ``()`` or ``(1,)``: loss scale that the step used; ``None`` if unknown.
        report: Report of the step, whose named losses and rates of named groups are packed, too.

    Raises:
        TypeError: If `output` is neither a tensor nor a named tuple with a loss.
    """
    fields = {"loss": output} if isinstance(output, Tensor) else _named(output)
    values: dict[str, Tensor | None] = {name: fields.get(name) for name in _OUTPUT_FIELDS}
    values |= {
        "skipped": skipped,
        "consecutive_skips": consecutive_skips,
        "scale_before": scale_before,
    }
    known = {name: value for name, value in values.items() if value is not None}
    device = next(iter(known.values())).device
    losses = {} if report is None else report.losses
    rate_names = () if report is None else report.learning_rate_names
    # `stack` makes a copy. The copy is needed because the caller may overwrite its tensors before
    # the values are read.
    tensor = torch.stack(
        [on_device(_number(value), device) for value in [*known.values(), *losses.values()]]
    )
    if report is not None and rate_names:
        rates = on_device(report.learning_rates.float(), device)
        tensor = torch.cat([tensor, rates])
    return PackedValues(
        names=tuple(known), tensor=tensor, loss_names=tuple(losses), rate_names=rate_names
    )


def skip_flag(output: Any, report: StepReport | None) -> Tensor | None:
    """Return whether the update was skipped, shape ``()``; ``None`` if that is unknown.

    Without a report, an update counts as skipped if its gradients overflowed.
    """
    if report is not None:
        return report.skipped
    overflow: Tensor | None = getattr(output, "overflow", None)
    return overflow


def values_of_logs(logs: Mapping[str, Any]) -> StepValues | None:
    """Return the values in an entry of the Trainer's log; ``None`` if the entry has no loss."""
    numbers = {
        name: float(value)
        for name in ("loss", "learning_rate", "grad_norm")
        if isinstance(value := logs.get(name), (int, float))
    }
    if "loss" not in numbers:
        return None
    return StepValues(
        loss=numbers["loss"],
        learning_rate=numbers.get("learning_rate"),
        global_norm=numbers.get("grad_norm"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """Numbers by which a step is judged, on the host.

    An unknown flag is false; an unknown count is 0.
    """

    step: int
    loss: float
    overflow: bool
    global_norm: float | None
    loss_scale: float | None
    """Loss scale that the step used; ``None`` if unknown."""

    skipped: bool
    consecutive_skips: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """Losses that were reported by name."""


def numbers_of(step: int, values: StepValues, *, last_scale: float | None = None) -> StepNumbers:
    """Return the numbers by which a step is judged.

    Args:
        step: Number of the step.
        values: Values of the step.
        last_scale: Loss scale after the previous step, used if ``values.scale_before`` is unknown.
    """
    return StepNumbers(
        step=step,
        loss=values.loss,
        overflow=bool(values.overflow),
        global_norm=values.global_norm,
        loss_scale=last_scale if values.scale_before is None else values.scale_before,
        skipped=bool(values.skipped),
        consecutive_skips=values.consecutive_skips or 0,
        losses=values.losses,
    )


def _named(output: Any) -> dict[str, Any]:
    names = getattr(output, "_fields", ())
    if not isinstance(output, tuple) or "loss" not in names:
        msg = (
            "`step_output` must be a StepOutput, another named tuple with a field `loss`, or the "
            f"loss as a tensor, got {type(output).__name__}"
        )
        raise TypeError(msg)
    return dict(zip(names, output, strict=True))
