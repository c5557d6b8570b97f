"""Floating-point operations of one update, and the peak rates of devices."""

import re
from typing import Any, final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.compatibility.torch import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, is_compiled


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return sdpa_flop_count(query, key, value)


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return sdpa_backward_flop_count(grad, query, key, value)


_CPU_FORMULAS = {
    CPU_ATTENTION: _cpu_attention,
    CPU_ATTENTION_BACKWARD: _cpu_attention_backward,
}
"""Formulas for CPU operations that torch's counter does not know."""


@final
class StepFlops:
    """Count the FLOPs of the first update on this device.

    The count includes matrix products, convolutions and scaled dot-product attention, in the
    forward and backward of every micro-batch. Recomputed operations count again. Causal attention
    counts as if nothing were masked.

    The count does not include element-wise operations, normalizations, softmax, grouped products
    of experts, the optimizer, operations that ``torch.compile`` has compiled, and kernels unknown
    to torch, such as those of the flash-attn package.

    Counting makes the first update slower. All other updates run as usual.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        """FLOPs of one update; ``None`` until they are counted."""
        self._is_done = False
        self._counter: FlopCounterMode | None = None

    def start(self, network: nn.Module | None, *, compiled: bool = False) -> None:
        """Start to count the FLOPs of an update; do nothing if an update has been counted before.

        Args:
            network: Network of the update; it is not counted if it has a compiled module. ``None``
                if unknown.
            compiled: Whether the loop compiles the network.
        """
        self.cancel()
        if self._is_done:
            return
        if compiled or (network is not None and _is_compiled(network)):
            self._give_up("operations of a compiled network cannot be counted")
            return
        self._counter = FlopCounterMode(display=False, custom_mapping=_CPU_FORMULAS)
        self._counter.__enter__()

    def stop(self) -> None:
        """Stop counting and store the count in `value`."""
        if self._is_done:
            return
        counter = self._counter
        self.cancel()
        self._is_done = True
        if counter is None:
            self._give_up("`on_step_begin`, where counting begins, was not called")
        elif not counter.get_total_flops():
            self._give_up("the first update had no operation that can be counted")
        else:
            self.value = float(counter.get_total_flops())

    def cancel(self) -> None:
        """Stop counting and discard the count."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _give_up(self, reason: str) -> None:
        self._is_done = True
        run_logger(__package__).warning(
            "MFLossMonitor cannot show FLOPs: %s. Give `flops_per_step` instead of `count_flops`.",
            reason,
        )


def _is_compiled(network: nn.Module) -> bool:
    return any(is_compiled(module) for module in network.modules())


def device_peak_tflops(network: nn.Module | None) -> float | None:
    """Return the peak rate of the GPU that holds a network; see `peak_tflops`.

    Returns:
        TFLOP/s; ``None`` without a network, without a GPU, or if the GPU is not in the table.
    """
    parameter = None if network is None else next(network.parameters(), None)
    if parameter is None or parameter.device.type != "cuda":
        return None
    return peak_tflops(torch.cuda.get_device_name(parameter.device))


def peak_tflops(device_name: str) -> float | None:
    """Return the peak rate of dense half-precision matrix products, in TFLOP/s.

    Args:
        device_name: Name of the device, as ``torch.cuda.get_device_name`` returns it.

    Returns:
        Rate in the maker's data sheet; ``None`` for a device that is not in the table.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA H100 PCIe")
        (989.4, 756.0)
    """
    for name, rate in _PEAK_TFLOPS:
        # Compare whole words: a T400 is not a T4.
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device_name):
            return rate
    return None


_PEAK_TFLOPS: tuple[tuple[str, float | None], ...] = (
    # Slices of a GPU (MIG) and cut-down versions are slower than the GPU whose name they contain.
    # Their rate is unknown.
    ("MIG", None),
    ("Laptop GPU", None),
    ("Max-Q", None),
    ("RTX 4090 D", None),
    # NVIDIA, data center: TFLOP/s of dense float16 or bfloat16 products. From Hopper on, data
    # sheets list the rate with structured sparsity, which is twice the rate listed here.
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
    # NVIDIA, workstation and desktop, with accumulation in float32.
    ("RTX 6000 Ada Generation", 364.2),
    ("RTX A6000", 154.8),
    ("RTX 4090", 165.2),
    ("RTX 3090 Ti", 80.0),
    ("RTX 3090", 71.0),
    # AMD. A card of the MI250 series is two devices, each with half of the card's rate.
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI300A", 980.6),
    ("MI250X", 383.0 / 2),
    ("MI250", 362.1 / 2),
    ("MI210", 181.0),
)
"""Name of a GPU, and its dense half-precision TFLOP/s in the maker's data sheet; ``None`` if
unknown. The first name found counts, so more specific names come first."""
