"""Peak rates of devices."""

import re

__all__ = ["peak_tflops"]

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
