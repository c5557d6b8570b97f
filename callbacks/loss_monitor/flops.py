"""Floating-point operations of one update."""

import re
from typing import Any, final

import torch
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from mfwrap.callbacks.shared.run_log import run_logger

__all__ = [
    "StepFlops",
    "device_peak_tflops",
    "peak_tflops",
]


aten = torch.ops.aten


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return sdpa_flop_count(query, key, value)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return sdpa_backward_flop_count(grad, query, key, value)


_CPU_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,  # noqa: SLF001
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,  # noqa: SLF001
}
"""What torch's counter passes over on the CPU; it has no other names."""


@final
class StepFlops:
    """FLOPs of one update on this device: given, or counted over the first update.

    Counted are matrix products, convolutions and scaled dot-product attention, forward, backward
    and recomputed, of every micro-batch. Causal attention counts as if nothing were masked. Not
    counted are element-wise operations, normalisations, softmax, grouped products of experts,
    the optimizer, and kernels that torch does not know, such as those of the flash-attn package;
    nor anything that `torch.compile` has compiled.

    Counting slows down the update that is counted; every other one is as it was.

    Args:
        given: ``None`` if not known.
        count: Count the first update.
    """

    def __init__(self, given: float | None = None, *, count: bool = False) -> None:
        self.value = given
        """FLOPs of one update; ``None`` until known."""
        self._to_count = count
        self._counter: FlopCounterMode | None = None

    def start(self, network: nn.Module | None, *, compiled: bool = False) -> None:
        """Begin to count, if that is to be done and not done yet.

        Args:
            network: Looked at for compiled parts.
            compiled: The loop says that it compiles the network.
        """
        self.cancel()
        if not self._to_count:
            return
        if compiled or (network is not None and _is_compiled(network)):
            self._give_up("operations of a compiled network cannot be counted")
            return
        self._counter = FlopCounterMode(display=False, custom_mapping=_CPU_FORMULAS)
        self._counter.__enter__()

    def stop(self) -> None:
        """End the count of an update and keep it; nothing if none was begun."""
        if not self._to_count:
            return
        counter = self._counter
        self.cancel()
        self._to_count = False
        if counter is None:
            self._give_up("`on_step_begin`, where counting begins, was not called")
        elif not counter.get_total_flops():
            self._give_up("the first update had no operation that can be counted")
        else:
            self.value = float(counter.get_total_flops())

    def cancel(self) -> None:
        """End a count without keeping it."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _give_up(self, reason: str) -> None:
        self._to_count = False
        run_logger(__package__).warning(
            "No FLOPs are shown: %s. Give `flops_per_step` instead of `count_flops`.", reason
        )


def device_peak_tflops(network: nn.Module | None) -> float | None:
    """Return the peak rate of the device that a network is on; ``None`` if not known."""
    parameter = None if network is None else next(network.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return None
    return peak_tflops(torch.cuda.get_device_name(parameter.device))


def _is_compiled(network: nn.Module) -> bool:
    return any(
        # `torch.compile(module)` and `module.compile()`; torch has no public word for either.
        name.rpartition(".")[2] == "_orig_mod" or module._compiled_call_impl is not None  # noqa: SLF001
        for name, module in network.named_modules()
    )


_PEAK_TFLOPS: tuple[tuple[str, float | None], ...] = (
    # A part of a device, or one that its maker clocks lower, has another rate than its name says.
    ("MIG", None),
    ("Laptop GPU", None),
    ("Max-Q", None),
    ("RTX 4090 D", None),
    # NVIDIA, data centre. The sheets of Hopper and later state twice these, with sparsity.
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H800 PCIe", 756.0),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("T4", 65.0),
    ("V100S-PCIE", 130.0),
    ("V100-PCIE", 112.0),
    ("V100", 125.0),
    # NVIDIA, workstation and desktop, accumulating in float32.
    ("RTX 6000 Ada Generation", 364.2),
    ("RTX A6000", 154.8),
    ("RTX 4090", 165.2),
    ("RTX 3090 Ti", 80.0),
    ("RTX 3090", 71.0),
    # AMD. A card of the MI250 series is two devices, of half its rate each.
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI300A", 980.6),
    ("MI250X", 383.0 / 2),
    ("MI250", 362.1 / 2),
    ("MI210", 181.0),
)
"""Dense half-precision TFLOP/s of the makers' data sheets, most specific names first."""


def peak_tflops(device_name: str) -> float | None:
    """Return the peak rate of dense half-precision products, in TFLOP/s.

    Args:
        device_name: As ``torch.cuda.get_device_name`` gives it.

    Returns:
        The rate of the maker's data sheet; ``None`` for a device that is not in the table.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA H100 PCIe")
        (989.4, 756.0)
    """
    for name, rate in _PEAK_TFLOPS:
        # Whole words: a T400 is no T4.
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device_name):
            return rate
    return None
