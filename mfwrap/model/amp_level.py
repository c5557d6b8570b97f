"""MindSpore's mixed-precision levels over torch's autocast."""

import contextlib
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

__all__ = ["AmpLevel", "AutocastNetwork", "Precision", "precision_of"]

AmpLevel = Literal["O0", "O1", "O2", "O3", "auto"]
"""How `Model` mixes precisions; see `precision_of`."""


class Precision(NamedTuple):
    """What a level means on a device."""

    dtype: torch.dtype | None
    """Type that matrix products are computed in; ``None`` for the weights' own."""

    scales_loss: bool
    """A dynamic loss scale belongs to it, unless another one is given."""


def precision_of(amp_level: AmpLevel, device: torch.device) -> Precision:
    """Return what a level means.

    Weights stay as they are, float32, at every level: MindSpore's ``to_float`` casts what is
    computed, too. ``"O0"`` computes in the weights' type. ``"O1"``, ``"O2"`` and ``"O3"`` compute
    in float16 wherever torch's autocast holds it safe, which takes the place of MindSpore's lists
    of operators; ``"O2"`` brings a dynamic loss scale along. ``"auto"`` is bfloat16 on a device
    that computes in it, ``"O2"`` on another one, and ``"O0"`` on a CPU.

    Args:
        amp_level: The level.
        device: Where the network is.

    Raises:
        ValueError: If there is no such level.

    Example:
        >>> precision_of("O2", torch.device("cpu"))
        Precision(dtype=torch.float16, scales_loss=True)
    """
    if amp_level not in get_args(AmpLevel):
        msg = f"`amp_level` must be one of {list(get_args(AmpLevel))}, got {amp_level!r}"
        raise ValueError(msg)
    if amp_level == "auto":
        if device.type == "cpu":
            return Precision(None, scales_loss=False)
        if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision(torch.bfloat16, scales_loss=False)
        return Precision(torch.float16, scales_loss=True)
    if amp_level == "O0":
        return Precision(None, scales_loss=False)
    return Precision(torch.float16, scales_loss=amp_level == "O2")


class AutocastNetwork(nn.Module):
    """A network in mixed precision that returns float32, so that its loss is computed in float32.

    Args:
        network: The network.
        dtype: Type that matrix products are computed in; ``None`` for the weights' own.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        self._dtype = dtype

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the network; what it returns in half precision comes back in float32."""
        if self._dtype is None:
            return self.network(*inputs, **keywords)
        with self._autocast():
            return _in_float32(self.network(*inputs, **keywords))

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        parameter = next(self.network.parameters(), None)
        kind = "cpu" if parameter is None else parameter.device.type
        return torch.autocast(kind, dtype=self._dtype)


def _in_float32(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        half = outputs.dtype in {torch.float16, torch.bfloat16}
        return outputs.float() if half else outputs
    if isinstance(outputs, dict):
        # Also of a Hugging Face model's output, which is rebuilt as what it is.
        return type(outputs)(**{name: _in_float32(value) for name, value in outputs.items()})
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(_in_float32, outputs))
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(map(_in_float32, outputs))
    return outputs
