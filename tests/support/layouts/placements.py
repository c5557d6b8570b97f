"""Programs that each rank runs with gradients that are placed unlike their parameters."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mfwrap import (
    MFTrainOneStepCell,
    StepConfig,
    TrainOneStepWithLossScaleCell,
    clip_by_global_norm,
)
from mfwrap.accelerate import attach
from mfwrap.tensors.placements import place_gradients, without_partial_sums
from mfwrap.tensors.sharded_norms import has_non_finite, square_of_all, tensor_norms
from support.attached_runs import new_accelerator
from support.fsdp.accelerated import reset_accelerate_after
from support.fsdp.incidents import Messages
from support.fsdp.training import whole
from support.layouts.layouts import layout_of

__all__ = [
    "WAYS",
    "count_messages",
    "norms_of_partial_sums",
    "place",
    "train_as_mindspore",
    "train_in_a_loop",
    "train_in_one_process",
]

WAYS = ("no clip", "norm", "norm in two parts", "value", "unscaled", "clipped, then accumulated")
"""What a loop does with its gradients between backward and the optimizer's step."""
_SEQUENCE = "sequence parallelism"


def place(rank: int) -> dict[str, Any]:
    """Place gradients; return whole gradients before and after, and what was sent."""
    world = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    cases = [
        (Replicate(), Partial(), torch.float32),
        (Replicate(), Partial(), torch.float32),
        (Shard(1), Partial(), torch.float32),
        (Replicate(), Partial(), torch.bfloat16),
        (Replicate(), Partial("avg"), torch.float32),
        (Shard(1), Replicate(), torch.float32),
        (Shard(0), Replicate(), torch.float32),
        (Replicate(), Replicate(), torch.float32),
        (Shard(0), Shard(0), torch.float32),
    ]
    parameters, expected = [], []
    for index, (placement, of_gradient, dtype) in enumerate(cases):
        # A weight that is not contiguous in memory, as a convolution's with channels last.
        weight = torch.zeros(4, 5, dtype=dtype).t()
        parameter = nn.Parameter(distribute_tensor(weight, mesh, [placement]))
        shape = (3 - rank, 4) if of_gradient == Shard(0) else (5, 4)
        first = index + (rank + 1 if of_gradient.is_partial() else 0)
        local = (torch.arange(20.0)[: shape[0] * shape[1]] + first).to(dtype).view(shape)
        strides = {"shape": weight.shape, "stride": weight.stride()}
        parameter.grad = DTensor.from_local(local, mesh, [of_gradient], run_check=False, **strides)
        expected.append(parameter.grad.full_tensor().float())
        parameters.append(parameter)
    placed = parameters[-1].grad
    with Messages() as messages:
        place_gradients([*parameters, nn.Parameter(torch.zeros(1))])
    with Messages() as again:
        place_gradients(parameters)
    return {
        "expected": expected,
        "ours": [p.grad.full_tensor().float() for p in parameters],
        "are placed": [p.grad.placements == p.placements for p in parameters],
        "sent": sorted((name, number) for name, number in messages.sent if "all" in name),
        "sent again": list(again.sent),
        "is untouched": parameters[-1].grad is placed,
    }


def norms_of_partial_sums(rank: int) -> dict[str, Any]:
    """Compute norms of a tensor of partial sums, and of one whose ranks hold parts of a mean."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    value = torch.arange(1.0, 5.0)
    tensor = DTensor.from_local(value * (rank + 1), mesh, [Partial()], run_check=False)
    spoilt = DTensor.from_local(value / rank, mesh, [Partial()], run_check=False)
    cpu = torch.device("cpu")
    mean = DTensor.from_local(value * (rank + 1), mesh, [Partial("avg")], run_check=False)
    [clipped] = clip_by_global_norm([tensor], 0.5)
    plain = torch.ones(2)
    return {
        "square": square_of_all([tensor], cpu).item(),
        "norm": tensor_norms([tensor]).item(),
        "expected": tensor.full_tensor().norm().item(),
        "norm of means": (tensor_norms([mean]).item(), mean.full_tensor().norm().item()),
        "clipped": clipped.full_tensor().norm().item(),
        "non-finite": (has_non_finite([tensor], cpu).item(), has_non_finite([spoilt], cpu).item()),
        "plain is unchanged": without_partial_sums([plain])[0] is plain,
    }


def count_messages(rank: int, accumulation: int) -> dict[str, Any]:
    """Return the messages that a step sends, besides those of its forward and backward."""
    layout = layout_of(_SEQUENCE)
    network = layout.network()
    cell: MFTrainOneStepCell = layout.cell(network, gradient_accumulation_steps=accumulation)
    batches = [layout.batch(step, rank) for step in range(accumulation)]
    cell.step(batches)
    with Messages() as plain:
        for batch in batches:
            network(**batch).backward()
    network.zero_grad()
    with Messages() as ours:
        cell.step(batches)
    return {"more": dict(ours.sent - plain.sent), "less": dict(plain.sent - ours.sent)}


def train_as_mindspore(rank: int | None) -> list[Tensor]:
    """Train with MindSpore's cell; return the whole weights. `rank` is ``None`` for one process."""
    layout = layout_of(_SEQUENCE)
    network = layout.whole_network() if rank is None else layout.network()
    cell = TrainOneStepWithLossScaleCell(network, layout.optimizer(network), torch.tensor(1024.0))
    for step in range(3):
        cell(**(layout.whole_batch(step) if rank is None else layout.batch(step, rank)))
    return [whole(parameter) for parameter in network.parameters()]


def _act(accelerator: Any, parameters: list[Tensor], way: str) -> Any:
    """Do what a loop does between backward and the optimizer's step; return what it gets."""
    match way:
        case "norm" | "clipped, then accumulated":
            return accelerator.clip_grad_norm_(parameters, 0.1)
        case "norm in two parts":
            first = accelerator.clip_grad_norm_(parameters[:7], 0.01)
            return first + accelerator.clip_grad_norm_(parameters[7:], 0.1)
        case "value":
            accelerator.clip_grad_value_(parameters, 0.01)
        case "unscaled":
            accelerator.unscale_gradients()
    return torch.zeros(())


@reset_accelerate_after()
def train_in_a_loop(rank: int, way: str) -> dict[str, Any]:
    """Train under sequence parallelism in an attached loop."""
    layout = layout_of(_SEQUENCE)
    accelerator = new_accelerator()
    attach(accelerator, StepConfig(use_clip_grad=way == "no clip"), scale_sense=2.0**10)
    network = layout.network()
    # accelerate would wrap the network in DistributedDataParallel, which takes no DTensors.
    optimizer = accelerator.prepare(layout.optimizer(network))
    return _train(layout, network, optimizer, accelerator, way, rank)


@reset_accelerate_after()
def train_in_one_process(way: str) -> dict[str, Any]:
    """Train the same network with plain accelerate in one process."""
    layout = layout_of(_SEQUENCE)
    network = layout.whole_network()
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(layout.optimizer(network))
    return _train(layout, network, optimizer, accelerator, way, None)


def _train(
    layout: Any, network: nn.Module, optimizer: Any, accelerator: Any, way: str, rank: int | None
) -> dict[str, Any]:
    results = []
    for step in range(3):
        batch = layout.whole_batch(step) if rank is None else layout.batch(step, rank)
        accelerator.backward(network(**batch))
        results.append(float(_act(accelerator, list(network.parameters()), way)))
        if way == "unscaled":
            first = next(network.parameters()).grad
            results.append(float(whole(first).norm()))
        if way == "clipped, then accumulated":
            accelerator.backward(network(**batch))
        optimizer.step()
        optimizer.zero_grad()
    return {"results": results, "weights": [whole(p) for p in network.parameters()]}
