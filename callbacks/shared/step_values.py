"""What a monitor shows of one step: packed on the device, unpacked on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedValues", "StepValues", "pack", "values_of_logs"]

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
