"""The numbers of a step: its output and what stands beside it, packed and unpacked together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfwrap import StepReport
from mfwrap.callbacks.culprit.finder import StepNumbers
from mfwrap.callbacks.shared.step_values import PackedValues, StepValues, pack

__all__ = ["ReadStep", "numbers_of", "pack_step", "skip_flag", "unpack_step"]

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
