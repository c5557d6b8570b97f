"""Programs in which one rank is slow in one section of its steps."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap import MFTrainOneStepCell
from mfwrap.accelerate import attach
from mfwrap.callbacks import RankClock
from mfwrap.collectives import section_clock
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator

__all__ = ["SLOW_RANK", "find_slow_rank", "find_slow_rank_of_trainer"]

SLOW_RANK = 1
SECONDS = 0.2
"""Time that the slow rank takes longer in each step; without it, a section takes milliseconds."""


class _Time:
    """Time that passes by a millisecond whenever it is read, and where a rank is slow.

    The time of a machine that does something else, too, would make any rank slow.
    """

    def __init__(self) -> None:
        self._nanoseconds = 0

    def read(self) -> int:
        """Return the time in nanoseconds."""
        self._nanoseconds += 10**6
        return self._nanoseconds

    def passes(self, seconds: float) -> None:
        """Let some time pass."""
        self._nanoseconds += round(seconds * 1e9)


_time = _Time()


@contextlib.contextmanager
def _simulated_time() -> Iterator[None]:
    """Within the block, let mfwrap measure the simulated time."""
    before, section_clock._now = section_clock._now, _time.read
    try:
        yield
    finally:
        section_clock._now = before


class _Network(nn.Module):
    """Three layers and the mean of the squares of their output; its forward may take longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.seconds = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        _time.passes(self.seconds)
        return self.layers(inputs).square().mean()


@_simulated_time()
def find_slow_rank(rank: int, layout: str, place: str, folder: str, num_steps: int) -> list[Any]:
    """Train with a rank that is slow in one place; return the records of slow ranks.

    Args:
        rank: Rank of this process.
        layout: ``"DDP"``, ``"FSDP2"``, or ``"attached"`` for an attached loop under DDP.
        place: ``"data"``, ``"forward"``, ``"hook"``, ``"optimizer"`` or ``"nowhere"``.
        folder: Run folder.
        num_steps: Number of steps.
    """
    seconds = SECONDS if rank == SLOW_RANK else 0.0
    asleep = {name: seconds * (name == place) for name in ("data", "forward", "hook", "optimizer")}
    torch.manual_seed(0)
    network = _Network()
    network.seconds = asleep["forward"]

    def slow_hook(group: Any, bucket: Any) -> Any:
        _time.passes(asleep["hook"])
        return allreduce_hook(group, bucket)

    slow_hook.__annotations__ = allreduce_hook.__annotations__
    hook = (distributed.group.WORLD, slow_hook) if place == "hook" else None
    step = (_attached if layout == "attached" else _cell)(network, layout, hook, asleep)
    callback = RankClock(4, tolerance=0.3, folder=folder)
    state, control = TrainerState(), TrainerControl()
    callback.on_train_begin(None, state, control)
    for number in range(1, num_steps + 1):
        _time.passes(asleep["data"])
        report = step(torch.randn(8, 16))
        state.global_step = number
        callback.on_step_end(None, state, control, step_report=report)
    callback.on_train_end(None, state, control)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if rank:
        return []
    del step
    return read_json_lines(Path(folder) / "rank_clock.jsonl")


def _slow_optimizer(network: nn.Module, seconds: float) -> SGD:
    optimizer = SGD(network.parameters(), lr=0.1, foreach=True)
    optimizer.register_step_pre_hook(lambda *_: _time.passes(seconds))
    return optimizer


def _cell(network: nn.Module, layout: str, hook: Any, asleep: dict[str, float]) -> Any:
    if layout == "DDP":
        network = DistributedDataParallel(network)
    else:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for part in (*network.layers, network):
            fully_shard(part, mesh=mesh)
    cell = MFTrainOneStepCell(
        network,
        _slow_optimizer(network, asleep["optimizer"]),
        use_clip_grad=True,
        gradient_accumulation_steps=2,
        communication_hook=hook,
    )

    def step(inputs: Tensor) -> Any:
        cell(inputs)
        return cell.last_report

    return step


def _attached(network: nn.Module, _: str, hook: Any, asleep: dict[str, float]) -> Any:
    accelerator = new_accelerator()
    attached = attach(accelerator, communication_hook=hook)
    prepared, optimizer = accelerator.prepare(
        network, _slow_optimizer(network, asleep["optimizer"])
    )

    def step(inputs: Tensor) -> Any:
        accelerator.backward(prepared(inputs))
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return attached.last_report

    return step


class _InMapping(nn.Module):
    """Pass a column of the data to a network, and return its loss in a mapping."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.network(inputs)}


class _SlowRows:
    """Rows of data; each takes some time to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _time.passes(self.seconds)
        return {"inputs": torch.full((16,), float(index))}


@_simulated_time()
def find_slow_rank_of_trainer(rank: int, place: str, folder: str) -> list[Any]:
    """Train with MFTrainer, with a rank that is slow in one place; return the records."""
    new_accelerator()
    seconds = SECONDS if rank == SLOW_RANK else 0.0
    network = _Network()
    network.seconds = seconds * (place == "forward")
    trainer = MFTrainer(
        _InMapping(network),
        TrainingArguments(
            folder,
            max_steps=9,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=2,
            save_steps=5,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            optim="sgd",
        ),
        # A step loads two micro-batches of two rows.
        train_dataset=_SlowRows(seconds / 4 * (place == "data")),
        callbacks=[RankClock(4, tolerance=0.3)],
    )
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return [] if rank else read_json_lines(Path(folder) / "rank_clock.jsonl")
