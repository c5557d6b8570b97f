"""Train small networks whose runs differ by one planted difference, and record them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import TrainerControl, TrainerState

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.records import resume_records, save_records
from mfwrap.tensors.shards import local_tensors
from support.attached_runs import new_accelerator

__all__ = ["Plan", "train_by_cell", "train_rank", "train_recorded", "train_shard"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. Each field is a difference from the default run; steps count from 1."""

    num_steps: int = 6
    first_step: int = 1
    """First step to train; above 1 resumes from the folder's checkpoint of the step before."""

    save_after: int | None = None
    """Step after which a checkpoint is saved."""

    seed: int = 0
    """Seed of dropout."""

    initial_seed: int = 0
    noise: float = 0.0
    """Relative noise of the initial weights."""

    weight_after: int | None = None
    """Step after whose update one element of ``middle.weight`` changes."""

    row_at: int | None = None
    """Step with another third row in the second micro-batch of the last rank."""

    order_at: int | None = None
    """Step whose first micro-batch has its rows in reverse order."""

    rate_at: int | None = None
    """Step with twice the learning rate."""

    scale: float = 1024.0
    gradient_at: int | None = None
    """Step at which the last rank's gradient of ``middle.weight`` is doubled in backward."""

    activation_at: int | None = None
    """Step at which the last rank's gradient of the middle layer's output is doubled."""

    loss_at: int | None = None
    """Step at which the last rank's loss is doubled."""

    interval: int = 1
    fingerprints: bool = True
    dropout: float = 0.5
    settings: tuple[tuple[str, str], ...] = (("local_norm_format", "jsonl"),)
    """Further settings of the monitor."""


class _Layers(nn.Module):
    """Three layers with names, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        # Odd sizes, which two ranks cannot share evenly.
        self.first = nn.Linear(8, 15)
        self.middle = nn.Linear(15, 15)
        self.last = nn.Linear(15, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(inputs)))
        hidden = torch.tanh(self.middle(hidden))
        return functional.cross_entropy(self.last(hidden), labels)


def train_rank(rank: int, folder: str, plan: dict[str, Any]) -> None:
    """Train on one of the ranks of a process group; `plan` has the fields of a `Plan`."""
    del rank
    train_recorded(Path(folder), Plan(**plan))


def train_recorded(folder: Path, plan: Plan) -> Path:
    """Train a network with two micro-batches per step; return the run folder."""
    accelerator = new_accelerator(
        gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs()]
    )
    scale = DynamicLossScaleUpdateCell(plan.scale, 2, 1000)
    attached = attach(accelerator, StepConfig(local_norm=True), scale_sense=scale)
    is_last = accelerator.process_index == accelerator.num_processes - 1
    torch.manual_seed(plan.initial_seed)
    network = _Layers(plan.dropout)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + plan.noise * torch.randn_like(weight))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(network, optimizer)
    monitor = TrainingStateMonitor(
        folder=folder,
        fingerprints=plan.fingerprints,
        step_interval=plan.interval,
        origin_epochs=1,
        dataset_size=plan.num_steps * 8,
        global_batch_size=8,
        **dict(plan.settings),
    )
    state, control = TrainerState(), TrainerControl()
    state.is_world_process_zero = accelerator.is_main_process
    state.global_step = plan.first_step - 1
    if plan.first_step > 1:
        accelerator.load_state(folder / "checkpoint")
        resume_records(folder / "checkpoint")
    known = {"model": model, "optimizer": optimizer}
    monitor.on_train_begin(None, state, control, **known)
    for step in range(plan.first_step, plan.num_steps + 1):
        torch.manual_seed(1000 * plan.seed + step)
        optimizer.param_groups[0]["lr"] = 0.2 if step == plan.rate_at else 0.1
        monitor.on_step_begin(None, state, control, **known)
        for number, batch in enumerate(_batches(plan, step)):
            inputs, labels = (each.chunk(accelerator.num_processes) for each in batch)
            rank = accelerator.process_index
            with accelerator.accumulate(model), _Planted(network, plan, step, is_last=is_last):
                loss = model(inputs[rank], labels[rank])
                accelerator.backward(loss * 2 if step == plan.loss_at and is_last else loss)
                if number == 1:
                    monitor.on_pre_optimizer_step(None, state, control, **known)
                optimizer.step()
                optimizer.zero_grad()
        if step == plan.weight_after:
            with torch.no_grad():
                network.middle.weight[3, 5] *= 1.5
        state.global_step = step
        monitor.on_step_end(
            None,
            state,
            control,
            step_output=attached.last_output,
            step_report=attached.last_report,
            **known,
        )
        if step == plan.save_after:
            monitor.on_pre_save(None, state, control)
            accelerator.save_state(folder / "checkpoint")
            save_records(folder / "checkpoint")
    monitor.on_train_end(None, state, control)
    return folder


def train_shard(rank: int, folder: str, plan: dict[str, Any]) -> None:
    """Train a network that FSDP2 shards, on one of the ranks; `plan` has the fields of a `Plan`."""
    del rank
    train_by_cell(Path(folder), Plan(**plan), shards=True)


def train_by_cell(folder: Path, plan: Plan, *, fused: bool = True, shards: bool = False) -> Path:
    """Train with the cell, in a loop that sends no event before the update.

    Args:
        folder: Run folder.
        plan: The run; only `num_steps`, `scale`, `row_at`, `gradient_at`, `activation_at`,
            `weight_after` and `settings` are used.
        fused: Whether the optimizer skips and divides in its kernel. If not, gradients are recorded
            after clipping, and local norms are recorded, too.
        shards: Whether to shard the network over the ranks of the process group. Each rank then has
            its part of the rows.

    Returns:
        The run folder.
    """
    torch.manual_seed(0)
    network = _Layers(0.0)
    ranks = distributed.get_world_size() if shards else 1
    rank = distributed.get_rank() if shards else 0
    is_last = rank == ranks - 1
    if shards:
        mesh = init_device_mesh("cpu", (ranks,))
        for module in (network.first, network.middle, network):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=fused)
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=0.1,
        scale_sense=plan.scale,
        local_norm=shards or not fused,
    )
    monitor = TrainingStateMonitor(
        folder=folder,
        fingerprints=True,
        origin_epochs=1,
        dataset_size=plan.num_steps * 4,
        global_batch_size=4,
        **dict(plan.settings),
    )
    state, control = TrainerState(), TrainerControl()
    state.is_world_process_zero = rank == 0
    known = {"model": network, "optimizer": optimizer}
    monitor.on_train_begin(None, state, control, **known)
    for step in range(1, plan.num_steps + 1):
        monitor.on_step_begin(None, state, control, **known)
        batch = [each.chunk(ranks)[rank] for each in _batches(plan, step)[1]]
        with _Planted(network, plan, step, is_last=is_last):
            output = cell(*batch)
        if step == plan.weight_after and is_last:
            with torch.no_grad():
                [weight] = local_tensors([network.middle.weight])
                weight[3, 5] *= 1.5
        state.global_step = step
        monitor.on_step_end(
            None, state, control, step_output=output, step_report=cell.last_report, **known
        )
    monitor.on_train_end(None, state, control)
    return folder


def _batches(plan: Plan, step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(2, 4, 8, generator=generator)
    labels = torch.randint(4, (2, 4), generator=generator)
    if step == plan.row_at:
        inputs[1, 2] += 1
    if step == plan.order_at:
        inputs[0], labels[0] = inputs[0].flip(0), labels[0].flip(0)
    return list(zip(inputs, labels, strict=True))


class _Planted:
    """Plant a difference in a backward."""

    def __init__(self, network: _Layers, plan: Plan, step: int, *, is_last: bool) -> None:
        self._handles = []
        if step == plan.gradient_at and is_last:
            self._handles.append(network.middle.weight.register_hook(lambda grad: grad * 2))
        if step == plan.activation_at and is_last:

            def double(_module, _inputs, output):
                output.register_hook(lambda grad: grad * 2)

            self._handles.append(network.middle.register_forward_hook(double))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
