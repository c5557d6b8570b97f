"""Peak memory of a step beyond what it holds between steps, and what monitors cost."""

import argparse
import random
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from device import networks
from device.measuring import peak_of, ratios, spread
from device.recording import Recording, need
from device.setup import Setup
from device.ways import BARE, CAPTURED, PLAIN, WAYS, forget_accelerators
from monitors import EACH, NORMS, OFF, ON, TENTH, seconds_per_step
from trainer import build_model

IN_HALF = {name for name in WAYS if name in {BARE, PLAIN, CAPTURED} or "cell" in name}
"""Ways that are measured in bfloat16, too: without accelerate, and without torch's GradScaler."""

LENGTH = 64
"""Few tokens, so that the update and not the activations makes the peak."""


def measure(recording: Recording, setup: Setup) -> None:
    """Measure the memory of each way, in float32 and bfloat16, and then the monitors."""
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
    setup.release()
    with recording.part("monitors"):
        _monitors(recording, setup)


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


def _monitors(recording: Recording, setup: Setup) -> None:
    need("tensorboard")
    transformers_logging.set_verbosity_error()
    options = argparse.Namespace(
        device=setup.kind,
        width=setup.size(1024, 32),
        layers=setup.size(8, 1),
        batch_size=setup.size(8, 2),
        sequence_length=setup.size(256, 16),
        accumulation=1,
        steps=setup.size(45, 12),
        interval=10,
    )
    kinds = [OFF, NORMS, ON, EACH, TENTH]
    samples = options.batch_size * options.steps
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4096, (samples, options.sequence_length), generator=generator)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    peaks: dict[str, float] = {}
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    for _ in range(setup.size(2, 1)):
        order.shuffle(kinds)
        for kind in kinds:
            setup.release()
            forget_accelerators()
            model = build_model(options.width, options.layers, options.sequence_length)

            def train(kind: str = kind, model: Any = model) -> None:
                seconds[kind].append(seconds_per_step(kind, model, tokens, options))

            peaks[kind] = _peak_of_run(setup, train)
    for kind in (OFF, NORMS, ON, EACH, TENTH):
        recording.row(
            f"MFTrainer with monitors, Llama of {networks.num_parameters(model) / 1e6:.0f} million "
            f"parameters, {options.batch_size * options.sequence_length} tokens a step",
            {
                "monitors": kind,
                "ms a step": spread([each * 1e3 for each in seconds[kind]]),
                "of a step without": ratios(seconds[kind], seconds[OFF]),
                "peak memory, MB": peaks[kind] / 1e6 if setup.on_cuda else None,
            },
        )
    cost = statistics.median(seconds[ON]) / statistics.median(seconds[OFF])
    recording.summarize(f"a step with all monitors takes {cost:.3f} of one without")


def _peak_of_run(setup: Setup, call: Callable[[], None]) -> float:
    found = peak_of(setup, call)
    return 0.0 if found is None else found
