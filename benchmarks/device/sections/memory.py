"""Peak memory of a step beyond what it holds between steps."""

import warnings
from typing import Any

import torch

from device import networks
from device.measuring import peak_of
from device.recording import Recording
from device.setup import Setup
from device.ways import BARE, CAPTURED, PLAIN, WAYS, forget_accelerators

IN_HALF = {name for name in WAYS if name in {BARE, PLAIN, CAPTURED} or "cell" in name}
"""Ways that are measured in bfloat16, too: without accelerate, and without torch's GradScaler."""

LENGTH = 64
"""Few tokens, so that the update and not the activations makes the peak."""


def measure(recording: Recording, setup: Setup) -> None:
    """Measure the memory of each way, in float32 and bfloat16."""
    warnings.filterwarnings("ignore")
    for dtype, width, layers in (
        (torch.float32, *setup.size((768, 12), (32, 1))),
        (torch.bfloat16, *setup.size((2048, 18), (32, 1))),
    ):
        for name in WAYS:
            if dtype == torch.bfloat16 and name not in IN_HALF:
                continue
            setup.release()
            with recording.part(f"{name} in {dtype}"):
                _peak(recording, setup, name, dtype, (width, layers))


def _peak(
    recording: Recording, setup: Setup, name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    forget_accelerators()
    way, _ = WAYS[name]
    vocabulary = setup.size(32_000, 64)
    network: Any = networks.llama(setup, *shape, vocabulary=vocabulary, length=LENGTH)
    network.to(dtype)
    number = networks.num_parameters(network)
    step = way(setup, network, networks.masked_tokens(setup, 1, LENGTH, vocabulary))
    for _ in range(5):  # a capture comes after the third step
        step()
    setup.synchronize()
    held = torch.cuda.memory_allocated() if setup.on_cuda else None
    peak = peak_of(setup, step)
    gradients = number * dtype.itemsize
    recording.row(
        f"Llama of {number / 1e6:.0f} million parameters in "
        f"{str(dtype).removeprefix('torch.')}, {LENGTH} tokens a step",
        {
            "whole step": name,
            "held between steps, bytes a parameter": None if held is None else held / number,
            "peak of a step over that, MB": None if peak is None else peak / 1e6,
            "peak over that and the gradients, MB": None
            if peak is None
            else (peak - gradients) / 1e6,
        },
    )
