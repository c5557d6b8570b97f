"""Whole steps of Llamas of three sizes in bfloat16, with data loading, and with torch.compile.

Each contestant trains from the start, one after the other, in an order that changes from round to
round. A run is timed between two waits for the device: after its first steps, and after its last.
Between them the host may run ahead, which a wait in each step would hide.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from device import networks
from device.measuring import ratios, spread
from device.recording import Recording
from device.setup import Setup
from device.ways import forget_accelerators
from trainer_contestants import (
    AccelerateLoop,
    AttachedLoop,
    CellLoop,
    Contestant,
    Ours,
    PlainLoop,
    Setting,
    Stock,
)

LEFT_OUT = 4
"""First steps of a run, which are not timed."""
COMPILED_LEFT_OUT = 6


class Size(NamedTuple):
    """Sizes of a network and of its runs."""

    width: int
    layers: int
    vocabulary: int
    batch_size: int
    length: int
    steps: int
    rounds: int


SIZES = (
    Size(256, 4, 4096, 8, 128, 40, 2),
    Size(768, 12, 32_000, 8, 1024, 24, 2),
    Size(2048, 18, 32_000, 4, 1024, 14, 1),
)
"""Of 6 million, 160 million and 1.1 billion parameters."""
COMPILED = Size(768, 6, 32_000, 8, 1024, 26, 1)
SMALL = Size(32, 1, 64, 2, 16, 8, 2)

PAIRS: tuple[tuple[Contestant, Contestant], ...] = (
    (Stock(), Ours()),
    (AccelerateLoop(), AttachedLoop()),
    (PlainLoop(), CellLoop()),
)
"""A contestant without mfwrap, and the one that does the same and more with mfwrap."""


class Seconds(NamedTuple):
    """Times of a contestant's steps by round, and its peak memory."""

    whole: list[float]
    peaks: list[float]


def measure(recording: Recording, setup: Setup) -> None:
    """Measure the sizes, the smallest first, and then a compiled network."""
    transformers_logging.set_verbosity_error()
    for size in setup.size(SIZES, (SMALL,)):
        with recording.part(f"width {size.width}, {size.layers} layers"):
            _compare(recording, setup, size, PAIRS, lambda network: network, LEFT_OUT)
    with recording.part("torch.compile"):
        # On a CPU, the default backend needs a compiler of C++, and minutes.
        backend = "inductor" if setup.on_cuda else "aot_eager"
        counters = torch._dynamo.utils.counters
        counters.clear()

        def compiled(network: nn.Module) -> nn.Module:
            torch._dynamo.reset()
            return torch.compile(network, backend=backend)  # type: ignore[return-value]  # (a module, for a module)

        left_out = setup.size(COMPILED_LEFT_OUT, LEFT_OUT)
        _compare(recording, setup, setup.size(COMPILED, SMALL), PAIRS[2:], compiled, left_out)
        recording.row(
            "torch.compile",
            {
                "backend": backend,
                "graphs": counters["stats"]["unique_graphs"],
                "graph breaks": sum(counters["graph_break"].values()),
                "recompilations": sum(counters["recompiles"].values()),
            },
        )


def _compare(
    recording: Recording,
    setup: Setup,
    size: Size,
    pairs: Sequence[tuple[Contestant, Contestant]],
    changed: Callable[[nn.Module], nn.Module],
    left_out: int,
) -> None:
    contestants = [contestant for pair in pairs for contestant in pair]
    seconds = {contestant.name: Seconds([], []) for contestant in contestants}
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    number = 0
    for _ in range(size.rounds):
        order.shuffle(contestants)
        for contestant in contestants:
            setup.release()
            network: nn.Module = networks.llama(
                setup, size.width, size.layers, vocabulary=size.vocabulary, length=size.length
            )
            number = networks.num_parameters(network)
            _train(setup, size, contestant, changed(network), left_out, seconds)
            del network
    kind = "compiled " if len(pairs) == 1 else ""
    title = (
        f"{kind}Llama of {number / 1e6:.0f} million parameters, width {size.width}, "
        f"{size.batch_size * size.length} tokens a step, bfloat16 autocast"
    )
    for without, with_mfwrap in pairs:
        for contestant in (without, with_mfwrap):
            times, peaks = seconds[contestant.name]
            ratio = ratios(times, seconds[without.name].whole)
            recording.row(
                title,
                {
                    "training step": contestant.name,
                    "ms": spread([each * 1e3 for each in times]),
                    "of the one without mfwrap": ratio,
                    "tokens a second": size.batch_size * size.length / statistics.median(times),
                    "peak memory, GB": max(peaks) / 1e9 if setup.on_cuda else None,
                },
            )
            if contestant is with_mfwrap:
                text = f"{kind}{number / 1e6:.0f}M {contestant.name.split(',')[0]}"
                recording.summarize_more(f"{text} {ratio['median']:.3f}")


def _train(
    setup: Setup,
    size: Size,
    contestant: Contestant,
    network: nn.Module,
    left_out: int,
    seconds: dict[str, Seconds],
) -> None:
    forget_accelerators()
    generator = torch.Generator().manual_seed(0)
    rows = size.batch_size * size.steps
    times: list[float] = []
    done = 0

    def step_done() -> None:
        nonlocal done
        done += 1
        if done in {left_out, size.steps}:
            setup.synchronize()
            times.append(time.perf_counter())

    if setup.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            network,
            torch.randint(0, size.vocabulary, (rows, size.length), generator=generator),
            folder,
            setup.kind,
            size.batch_size,
            accumulation=1,
            steps=size.steps,
            logging_steps=10**6,
            precision="bf16",
        )
        contestant.train(setting, step_done)
    start, end = times
    found = seconds[contestant.name]
    found.whole.append((end - start) / (size.steps - left_out))
    found.peaks.append(torch.cuda.max_memory_allocated() if setup.on_cuda else 0.0)
