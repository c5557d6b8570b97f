"""Whole steps of Llamas of three sizes in bfloat16, with data loading.

Each contestant trains from the start, one after the other, in an order that changes from round to
round. A run is timed between two waits for the device: after its first steps, and after its last.
Between them the host may run ahead, which a wait in each step would hide.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
    Size(768, 12, 32_000, 16, 1024, 24, 2),
    Size(2048, 18, 32_000, 16, 1024, 14, 1),
)
"""Of 6 million, 141 million and 1.1 billion parameters."""
SMALL = Size(32, 1, 64, 2, 16, 8, 2)

Pairs = Sequence[tuple[Contestant, Contestant]]

PAIRS: Pairs = (
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
    """Measure the sizes, the smallest first."""
    transformers_logging.set_verbosity_error()
    for size in setup.size(SIZES, (SMALL,)):
        with recording.part(f"width {size.width}, {size.layers} layers"):
            compare(recording, setup, size, PAIRS)


def compare(
    recording: Recording,
    setup: Setup,
    size: Size,
    pairs: Pairs,
    *,
    kind: str = "",
    changed: Callable[[nn.Module], nn.Module] = lambda network: network,
    left_out: int = LEFT_OUT,
    done: Callable[[str], None] = lambda _: None,
) -> None:
    """Train with each contestant in turn, and write their table after each run.

    Args:
        recording: Results of the section.
        setup: Device.
        size: Sizes of the network and of the runs.
        pairs: Contestants.
        kind: Word before the network's name, with a space.
        changed: Returns the network that is trained.
        left_out: First steps, which are not timed.
        done: Called with the name of each contestant after its run.
    """
    contestants = [contestant for pair in pairs for contestant in pair]
    seconds = {contestant.name: Seconds([], []) for contestant in contestants}
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    title = label = ""
    for _ in range(size.rounds):
        order.shuffle(contestants)
        for contestant in contestants:
            setup.release()
            network: nn.Module = networks.llama(
                setup, size.width, size.layers, vocabulary=size.vocabulary, length=size.length
            )
            label = f"{networks.num_parameters(network) / 1e6:.0f}"
            title = (
                f"{kind}Llama of {label} million parameters, width {size.width}, "
                f"{size.batch_size * size.length} tokens a step, bfloat16 autocast"
            )
            _train(setup, size, contestant, changed(network), left_out, seconds)
            del network
            recording.table(title, _rows(setup, size, pairs, seconds))
            done(contestant.name)
    for without, with_mfwrap in pairs:
        ratio = ratios(seconds[with_mfwrap.name].whole, seconds[without.name].whole)
        text = f"{kind}{label}M {with_mfwrap.name.split(',')[0]}"
        recording.summarize_more(f"{text} {ratio['median']:.3f}")


def _rows(
    setup: Setup, size: Size, pairs: Pairs, seconds: Mapping[str, Seconds]
) -> list[dict[str, Any]]:
    """Return the rows of the contestants that have run, compared as far as both have."""
    rows = []
    for without, contestant in ((pair[0], each) for pair in pairs for each in pair):
        times, peaks = seconds[contestant.name]
        others = seconds[without.name].whole
        both = min(len(times), len(others))
        if times:
            rows.append(
                {
                    "training step": contestant.name,
                    "ms": spread([each * 1e3 for each in times]),
                    "of the one without mfwrap": ratios(times[:both], others[:both])
                    if both
                    else None,
                    "tokens a second": size.batch_size * size.length / statistics.median(times),
                    "peak memory, GB": max(peaks) / 1e9 if setup.on_cuda else None,
                }
            )
    return rows


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
