"""Count the messages that ranks send in one step, with and without mfwrap."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerControl, TrainerState

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import RankClock
from support.attached_runs import new_accelerator
from support.ranks.local_norms import Parts, share
from support.small_networks import Classifier, TokenClassifier

__all__ = ["WAYS", "messages_of"]

NUM_STEPS = 3


def messages_of(rank: int, way: str) -> list[list[int]]:
    """Return the sizes of each step's messages: one sorted list per step, in elements.

    The profiler records a message where the process group sends it, so it also records the messages
    of torch's own reducer.
    """
    step = WAYS[way](rank)
    for number in range(2):
        # Do not profile the first two steps, because DistributedDataParallel rebuilds its buckets
        # there and sends the buckets' sizes.
        step(number)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        # The last message may be recorded after the profile has ended, so the last step is ignored.
        for number in range(NUM_STEPS + 1):
            with record_function(f"step {number}"):
                step(number)
    events = profiled.events()
    times = {event.name: event.time_range for event in events if event.name.startswith("step ")}
    messages = [event for event in events if event.name.startswith("gloo:")]
    return [
        sorted(
            sum(torch.Size(shape).numel() for shape in message.input_shapes)
            for message in messages
            if time.start <= message.time_range.start < time.end
        )
        for time in (times[f"step {number}"] for number in range(NUM_STEPS))
    ]


def _plain(rank: int) -> Callable[[int], Any]:
    network = DistributedDataParallel(Classifier())
    optimizer = SGD(network.parameters(), lr=0.1, fused=True)

    def step(number: int) -> None:
        network(*share(number, rank)).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cell(network: nn.Module, rank: int, **settings: Any) -> Callable[[int], Any]:
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True),
        use_clip_grad=True,
        scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 100),
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=1e6,
        spike_policy="clip",
        **settings,
    )
    return lambda number: cell(*share(number, rank))


def _mean(rank: int) -> Callable[[int], Any]:
    return _cell(DistributedDataParallel(Classifier()), rank)


def _with_local_norms(rank: int) -> Callable[[int], Any]:
    network = DistributedDataParallel(Classifier())
    return _cell(network, rank, local_norm=True, gradient_accumulation_steps=4)


def _per_token(rank: int) -> Callable[[int], Any]:
    return _cell(
        DistributedDataParallel(TokenClassifier()),
        rank,
        local_norm=True,
        calculate_per_token_loss=True,
        gradient_accumulation_steps=4,
    )


def _attached(rank: int) -> Callable[[int], Any]:
    accelerator = new_accelerator()
    attach(accelerator, StepConfig(local_norm=True), scale_sense=1024.0)
    network = Classifier()
    optimizer = SGD(network.parameters(), lr=0.1, fused=True)
    network, optimizer = accelerator.prepare(network, optimizer)

    def step(number: int) -> None:
        accelerator.backward(network(*share(number, rank)))
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_parts(rank: int) -> Callable[[int], Any]:
    network = Parts()
    optimizer = SGD(network.parameters(), lr=0.1, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, local_norm=True)
    return lambda number: cell(torch.tensor([[3.0, 4.0]]) * (1 + rank + number))


def _with_clock(rank: int) -> Callable[[int], Any]:
    network = DistributedDataParallel(Classifier())
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1, fused=True))
    folder = tempfile.TemporaryDirectory()
    clock = RankClock(4, folder=folder.name)
    state, control = TrainerState(), TrainerControl()
    clock.on_train_begin(None, state, control)

    def step(number: int) -> None:
        cell(*share(number, rank))
        state.global_step += 1
        clock.on_step_end(None, state, control, step_report=cell.last_report)
        if state.global_step == 2 + NUM_STEPS:
            clock.on_train_end(None, state, control)
            folder.cleanup()

    return step


WAYS = {
    "plain": _plain,
    "mean": _mean,
    "local norms": _with_local_norms,
    "per token": _per_token,
    "attached": _attached,
    "in parts": _in_parts,
    "clock": _with_clock,
}
"""Functions from a rank to a function that runs one step, by name."""
