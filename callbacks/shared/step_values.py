"""What a monitor shows of one step: packed on the device, unpacked on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfwrap import StepReport

__all__ = [
    "PackedValues",
    "ReadStep",
    "StepNumbers",
    "StepValues",
    "numbers_of",
    "pack",
    "pack_step",
    "skip_flag",
    "unpack_step",
    "values_of_logs",
]


_FIELDS = ("loss", "overflow", "loss_scale", "learning_rate", "global_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """Values of one step on the host; ``None`` is unknown."""

    loss: float
    overflow: bool | None = None
    loss_scale: float | None = None
    learning_rate: float | None = None
    global_norm: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedValues:
    """Values of one step on the device."""

    names: tuple[str, ...]
    """Fields of `StepValues`."""

    tensor: Tensor
    """Shape ``(len(names),)``, float32."""

    def unpack(self, host_values: Sequence[float]) -> StepValues:
        """Return the values that `tensor` turned out to have."""
        values: dict[str, Any] = dict(zip(self.names, host_values, strict=True))
        if "overflow" in values:
            values["overflow"] = bool(values["overflow"])
        return StepValues(**values)


def pack(output: Any) -> PackedValues:
    """Take what is shown out of a step's output; does not wait for the device.

    Args:
        output: A named tuple, read by the names of its fields (`mfwrap.StepOutput`), or the loss
            alone as a tensor. Of more than one element the mean is taken, as in MindFormers.

    Raises:
        TypeError: If it is neither, or has no loss.
    """
    fields = {"loss": output} if isinstance(output, Tensor) else _named(output)
    known = {name: fields[name] for name in _FIELDS if fields.get(name) is not None}
    # Copied, not viewed: the caller's tensors may change before they are read.
    tensor = torch.stack([value.detach().float().mean() for value in known.values()])
    return PackedValues(names=tuple(known), tensor=tensor)


def values_of_logs(logs: Mapping[str, Any]) -> StepValues | None:
    """Return what the Trainer logs of a step; ``None`` if it logs something else."""
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


def _named(output: Any) -> dict[str, Any]:
    names = getattr(output, "_fields", ())
    if not isinstance(output, tuple) or "loss" not in names:
        msg = (
            "`step_output` must be a StepOutput, another named tuple with a loss, or a tensor, "
            f"got {type(output).__name__}"
        )
        raise TypeError(msg)
    return dict(zip(names, output, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """The numbers of a step on the host."""

    step: int
    loss: float
    overflow: bool
    global_norm: float | None
    loss_scale: float | None
    """That the step used."""

    skipped: bool
    consecutive_skips: int


_EXTRAS = ("skipped", "consecutive_skips", "scale_before")


class ReadStep(NamedTuple):
    """The numbers of a step on the host."""

    values: StepValues
    extras: Mapping[str, float]

    def shown(self) -> dict[str, float | bool]:
        """Return what is known, by the names of `mfwrap.StepOutput` and `mfwrap.StepReport`."""
        values = self.values
        known: dict[str, float | bool | None] = {
            "loss": values.loss,
            "learning_rate": values.learning_rate,
            "loss_scale": values.loss_scale,
            "global_norm": values.global_norm,
            "overflow": values.overflow,
        }
        if "skipped" in self.extras:
            known["skipped"] = bool(self.extras["skipped"])
        return {name: value for name, value in known.items() if value is not None}


def skip_flag(output: Any, report: StepReport | None) -> Tensor | None:
    """Return whether the update was skipped, shape ``()``; ``None`` if that is not known."""
    if report is not None:
        return report.skipped
    overflow: Tensor | None = getattr(output, "overflow", None)
    return overflow


def pack_step(
    output: Any,
    report: StepReport | None,
    *,
    skipped: Tensor | None,
    scale_before: Tensor | None,
) -> PackedValues:
    """Take what is shown and judged out of a step; does not wait for the device.

    Args:
        output: As `pack` takes it.
        report: ``None`` if there is none.
        skipped: As `skip_flag` returns it.
        scale_before: Shape ``()``: the loss scale that the step used; ``None`` if unknown.
    """
    packed = pack(output)
    consecutive = None if report is None else report.consecutive_skips
    extras = dict(zip(_EXTRAS, (skipped, consecutive, scale_before), strict=True))
    known = {name: value for name, value in extras.items() if value is not None}
    device = packed.tensor.device
    values = [
        value.detach().float().reshape(1).to(device, non_blocking=True) for value in known.values()
    ]
    return PackedValues(names=(*packed.names, *known), tensor=torch.cat([packed.tensor, *values]))


def unpack_step(packed: PackedValues, host_values: Sequence[float]) -> ReadStep:
    """Return what `pack_step` has packed.

    Args:
        packed: By it.
        host_values: What its tensor turned out to hold.
    """
    named = dict(zip(packed.names, host_values, strict=True))
    extras = {name: named.pop(name) for name in _EXTRAS if name in named}
    plain = PackedValues(names=tuple(named), tensor=packed.tensor)
    return ReadStep(plain.unpack(list(named.values())), extras)


def numbers_of(
    step: int,
    values: StepValues,
    extras: Mapping[str, float] | None = None,
    *,
    last_scale: float | None = None,
) -> StepNumbers:
    """Return what a step is judged by.

    Args:
        step: Its number.
        values: Of its output, or what a loop logs of it.
        extras: What stands beside.
        last_scale: The loss scale after the step before, if `extras` do not know it.
    """
    extras = {} if extras is None else extras
    return StepNumbers(
        step=step,
        loss=values.loss,
        overflow=bool(values.overflow),
        global_norm=values.global_norm,
        loss_scale=extras.get("scale_before", last_scale),
        skipped=bool(extras.get("skipped", False)),
        consecutive_skips=int(extras.get("consecutive_skips", 0)),
    )
