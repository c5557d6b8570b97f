"""Programs that each rank of a layout runs, and the training of one process to compare with."""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.sharded_checkpoint import load_sharded, save_sharded
from support.fsdp.accelerated import reset_accelerate_after
from support.fsdp.training import whole
from support.layouts.layout import Layout, batches_of
from support.layouts.layouts import layout_of

__all__ = ["NUM_STEPS", "Outcome", "expected", "local_norms", "resume", "train"]

NUM_STEPS = 6
BAD_STEP = 1
"""Step in which the loss of the last rank is NaN."""
MAX_NORM = 0.1
DECAY = 0.75


class Outcome(NamedTuple):
    """Results of a training in one process."""

    norms: list[float]
    """Global norm before clipping of each applied update."""

    weights: dict[str, Tensor]
    """Final weights by name."""

    averages: dict[str, Tensor]
    """Final averages of the weights by name."""


def expected(layout: Layout) -> Outcome:
    """Train in one process with torch alone, without the step whose loss is NaN on a rank."""
    network = layout.whole_network()
    optimizer = layout.optimizer(network)
    averages = {name: p.detach().clone() for name, p in network.named_parameters()}
    norms = []
    for step in range(NUM_STEPS):
        if step == BAD_STEP:
            continue
        for number in batches_of(step):
            (_loss_of(network(**layout.whole_batch(number))) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in network.named_parameters():
            averages[name].lerp_(parameter.detach(), 1 - DECAY)
    return Outcome(norms, {n: p.detach() for n, p in network.named_parameters()}, averages)


def _loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def _new_cell(layout: Layout) -> MFTrainOneStepCell:
    network = layout.network()
    return layout.cell(
        network,
        max_grad_norm=MAX_NORM,
        scale_sense=DynamicLossScaleUpdateCell(2.0**16, 2, 2),
        ema=ExponentialMovingAverage(layout.module(network), DECAY),
    )


def _do_steps(layout: Layout, cell: MFTrainOneStepCell, rank: int, steps: range) -> dict[str, Any]:
    """Do updates. The loss of the last rank is NaN in step `BAD_STEP`, which must change nothing.

    Returns:
        ``norms`` of the applied updates, and ``skips``: whether each step was skipped and left all
        weights, optimizer states and averages of this rank bitwise unchanged.
    """
    norms, skips = [], []
    for step in steps:
        before = _own_tensors(cell)
        is_bad = step == BAD_STEP and rank == distributed.get_world_size() - 1
        with layout.bad_loss(cell) if is_bad else contextlib.nullcontext():
            output = layout.update(cell, [layout.batch(n, rank) for n in batches_of(step)])
        unchanged = all(map(torch.equal, before, _own_tensors(cell)))
        skips.append(bool(cell.last_report.skipped) and bool(output.overflow) and unchanged)
        if not cell.last_report.skipped:
            norms.append(output.global_norm.item())
    return {"norms": norms, "skips": skips}


@torch.no_grad()
def _own_tensors(cell: MFTrainOneStepCell) -> list[Tensor]:
    """Return copies of this rank's weights, averages and states of the optimizer."""
    tensors = [*cell.network.parameters(), *(average for _, average in cell.ema.named_averages())]
    tensors += [cell.optimizer.state[p]["exp_avg"] for p in cell.optimizer.state]
    return [(t.to_local() if hasattr(t, "to_local") else t).clone() for t in tensors]


def _result(cell: MFTrainOneStepCell) -> dict[str, Any]:
    """Return the whole weights and averages by the names of one process."""

    def plain(name: str) -> str:
        return name.replace("module.", "")

    return {
        "weights": {plain(name): whole(p) for name, p in cell.network.named_parameters()},
        "averages": {plain(name): whole(average) for name, average in cell.ema.named_averages()},
    }


@reset_accelerate_after()
def train(rank: int, name: str) -> dict[str, Any]:
    """Train a layout as one of its ranks."""
    layout = layout_of(name)
    cell = _new_cell(layout)
    return _do_steps(layout, cell, rank, range(NUM_STEPS)) | _result(cell)


@reset_accelerate_after()
def local_norms(rank: int, name: str) -> dict[str, Any]:
    """Do one update that reports local norms.

    Returns:
        ``norms`` by parameter, and ``expected``: those of the same network without reduction of
        gradients. If local norms are refused, ``refused`` is the error.
    """
    layout = layout_of(name)
    try:
        cell = layout.cell(layout.network(), local_norm=True)
    except ValueError as error:
        return {"refused": str(error)}
    batches = [layout.batch(number, rank) for number in batches_of(0)]
    norms = layout.update(cell, batches).local_norm
    alone = layout.whole_network()
    for batch in batches:
        (_loss_of(alone(**batch)) / 2).backward()
    expected = [alone.get_parameter(name).grad.norm() for name in cell.local_norm_names]
    return {"norms": norms, "expected": torch.stack(expected)}


@reset_accelerate_after()
def resume(
    rank: int, name: str, steps: tuple[int, int], saved: str | None, folder: str | None
) -> dict[str, Any]:
    """Continue a checkpoint for some steps, and save the next checkpoint.

    Args:
        rank: Rank of this process.
        name: Name of the layout.
        steps: First step, and the step before which to end.
        saved: Folder of the checkpoint; ``None`` to start.
        folder: Folder of the next checkpoint; ``None`` for none.
    """
    layout = layout_of(name)
    cell = _new_cell(layout)
    if saved is not None:
        with torch.no_grad():
            for parameter in cell.network.parameters():
                parameter.add_(1.0)
        load_sharded(saved, cell)
    done = _do_steps(layout, cell, rank, range(*steps))
    if folder is not None:
        save_sharded(folder, cell)
    return done | _result(cell)
