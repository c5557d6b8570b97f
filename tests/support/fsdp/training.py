"""Program that each rank runs to train with sharded parameters."""

import itertools
from typing import Any

import torch
from torch import Tensor

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from support.fsdp.networks import (
    NUM_STEPS,
    Case,
    micro_batches_of,
    new_model,
    optimizer_of,
    sharded,
)

__all__ = ["CASES", "MAX_NORM", "OTHER_CASES", "train", "whole"]

MAX_NORM = 0.5

CASES = [
    Case(),
    Case("root", 4, "float32", "fused SGD"),
    Case("root", 1, "float32", "fused dampened SGD"),
    Case("layers", 4, "bf16", "fused AdamW"),
    Case("children", 1, "bf16", "fused SGD"),
    Case("layers", 1, "float32", "Muon with AdamW"),
    Case("layers", 4, "float32", "foreach SGD"),
    Case("replicas", 4, "float32", "fused AdamW"),
    Case("two meshes", 1, "float32", "fused AdamW", per_token=True),
    Case("layers", 4, "float32", "fused SGD", per_token=True),
    Case("partly replicated", 4, "float32", "AdamWeightDecay"),
    Case("layers", 4, "bf16", "fused AdamW", sync_each_batch=True),
    Case("replicas", 4, "float32", "fused SGD", sync_each_batch=True),
    Case("two meshes", 4, "float32", "fused SGD", per_token=True, sync_each_batch=True),
    Case("partly replicated", 4, "float32", "fused AdamW", sync_each_batch=True),
]

OTHER_CASES = [
    case
    for case in itertools.starmap(
        Case,
        itertools.product(
            ("layers",), (1, 4), ("float32", "bf16"), ("fused AdamW", "fused SGD"), (False, True)
        ),
    )
    if case not in CASES
]
"""The combinations of accumulation, precision, optimizer and loss that are not in `CASES`."""


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a full copy of a sharded or ordinary tensor; every rank must call this function."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def train(rank: int, case: Case) -> dict[str, Any]:
    """Train a case as one of the ranks; return its outputs and the full weights and averages."""
    network = sharded(new_model(per_token=case.per_token), case)
    optimizer = optimizer_of(case.optimizer, network)
    ema = ExponentialMovingAverage(network, decay=0.75)
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=MAX_NORM,
        scale_sense=2.0**16,
        local_norm=not case.sync_each_batch,
        gradient_accumulation_steps=case.accumulation,
        sync_each_batch=case.sync_each_batch,
        ema=ema,
        calculate_per_token_loss=case.per_token,
    )
    outputs = [cell.step(micro_batches_of(case, step, rank)) for step in range(NUM_STEPS)]
    norms = [getattr(output, "local_norm", torch.empty(0)) for output in outputs]
    return {
        "losses": torch.stack([output.loss for output in outputs]),
        "norms": torch.stack([output.global_norm for output in outputs]),
        "local norms": torch.stack(norms),
        "overflow": [output.overflow.item() for output in outputs],
        "sizes": getattr(outputs[0], "size", torch.empty(0)),
        "names": cell.local_norm_names,
        "weights": [whole(parameter) for parameter in network.parameters()],
        "averages": [whole(average) for _, average in ema.named_averages()],
        "applied": cell.last_report.applied_updates.item(),
    }
