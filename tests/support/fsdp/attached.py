"""Programs that each rank runs to train a sharded network, with the cell or an attached loop."""

from typing import Any

import torch
from accelerate import Accelerator

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from support.fsdp.networks import Case, micro_batches_of, new_model, optimizer_of, sharded
from support.fsdp.training import whole

__all__ = ["train_attached", "train_by_cell"]

NUM_STEPS = 3
MAX_NORM = 0.5


def train_by_cell(rank: int, accumulation: int) -> dict[str, Any]:
    """Train with the cell, as the reference for `train_attached`."""
    case = Case(accumulation=accumulation)
    network = sharded(new_model(per_token=False), case)
    cell = MFTrainOneStepCell(
        network,
        optimizer_of("fused AdamW", network),
        use_clip_grad=True,
        max_grad_norm=MAX_NORM,
        local_norm=True,
    )
    outputs = [cell.step(micro_batches_of(case, step, rank)) for step in range(NUM_STEPS)]
    return {
        "weights": [whole(parameter) for parameter in network.parameters()],
        "norms": torch.stack([output.global_norm for output in outputs]),
        "local norms": torch.stack([output.local_norm for output in outputs]),
    }


def train_attached(rank: int, accumulation: int, way: str) -> dict[str, Any]:
    """Train with an attached loop; with `way` ``"in place"``, the loop unscales before it clips."""
    case = Case(accumulation=accumulation)
    network = sharded(new_model(per_token=False), case)
    accelerator = Accelerator(cpu=True)
    attached = attach(accelerator, StepConfig(local_norm=True), scale_sense=2.0**16)
    # Mark the network as prepared: otherwise accelerate wraps it in DistributedDataParallel, which
    # does not support sharded parameters.
    network._is_accelerate_prepared = True
    network, optimizer = accelerator.prepare(network, optimizer_of("fused AdamW", network))
    norms, local_norms, reduction_norms = [], [], []
    for step in range(NUM_STEPS):
        micro_batches = micro_batches_of(case, step, rank)
        for index, batch in enumerate(micro_batches):
            network.set_requires_gradient_sync(index == len(micro_batches) - 1)
            accelerator.backward(network(*batch) / len(micro_batches))
        if way == "in place":
            accelerator.unscale_gradients()
        norms.append(accelerator.clip_grad_norm_(network.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        local_norms.append(attached.last_output.local_norm)
        reduction_norms.append(attached.last_report.reduction_norms)
    return {
        "weights": [whole(parameter) for parameter in network.parameters()],
        "norms": torch.stack(norms),
        "local norms": torch.stack(local_norms),
        "reduction norms": torch.stack(reduction_norms),
    }
