"""Networks whose gradients are known exactly, and programs that accumulate them on ranks."""

import weakref
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.step.ranks.fsdp import ShardedParts
from mfwrap.tensors.shards import local_tensors

__all__ = [
    "NUM_STEPS",
    "Products",
    "accumulate_in_cell",
    "accumulate_in_loop",
    "bytes_of_gradients",
    "gradients_of",
    "micro_batch",
]

SIZE = 6
NUM_STEPS = 2


class Products(nn.Module):
    """Two weights of zeros whose gradients are the inputs.

    Args:
        dtype: Dtype of the weights.
        may_skip: Whether the second weight is used only if the second input is not all zeros.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, may_skip: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
        self.may_skip = may_skip
        self.seen: list[tuple[torch.dtype | None, torch.dtype | None]] = []
        """In each forward: ``grad_dtype`` of the first weight, and dtype of its gradient."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the sum of the products of weights and inputs, in float32."""
        gradient = self.first.grad
        self.seen.append((self.first.grad_dtype, None if gradient is None else gradient.dtype))
        loss = (self.first * first).sum().float()
        if self.may_skip and not second.any():
            return loss
        return loss + (self.second * second).sum().float()


def micro_batch(step: int, index: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Return the inputs of one micro-batch: large ones in the first, small ones in the others.

    The second weight is not used in the last micro-batch of rank 1, nor in the first of rank 0.
    """
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    inputs = torch.randn(2, SIZE, generator=generator) + 1
    if index == 0:
        inputs = inputs * 1024
    if (index, rank) in {(0, 0), (3, 1)}:
        inputs[1] = 0
    first, second = inputs.bfloat16()
    return first, second


def gradients_of(step: int, num_micro_batches: int, *ranks: int) -> Tensor:
    """Return the exact mean gradient, shape ``(2, SIZE)``, float64."""
    parts = [
        torch.stack(micro_batch(step, index, rank)).double()
        for rank in ranks
        for index in range(num_micro_batches)
    ]
    return torch.stack(parts).sum(0) / len(parts)


def _wrapped(way: str, network: Products) -> nn.Module:
    if way.startswith("replicated"):
        return DistributedDataParallel(
            network,
            find_unused_parameters=network.may_skip,
            gradient_as_bucket_view="views" in way,
        )
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    policy = half if "float32 weights" in way else MixedPrecisionPolicy()
    return fully_shard(network, mesh=mesh, mp_policy=policy)


def _optimizer(network: nn.Module, *, fused: bool) -> Optimizer:
    kind = Adam if fused else SGD
    return kind(network.parameters(), lr=1.0, fused=fused)


def _network(way: str) -> Products:
    dtype = torch.float32 if "float32 weights" in way else torch.bfloat16
    return Products(dtype, may_skip="unused" in way)


def accumulate_in_cell(
    rank: int, way: str, num_micro_batches: int, settings: dict[str, Any]
) -> dict[str, Tensor]:
    """Train `NUM_STEPS` updates with a cell, and return their norms and this rank's weights."""
    plain = _network(way)
    network = _wrapped(way, plain)
    cell = MFTrainOneStepCell(
        network,
        _optimizer(network, fused="fused" in way),
        use_clip_grad=True,
        max_grad_norm=float("inf"),
        scale_sense=2.0**10,
        accumulate_allreduce_grads_in_fp32=True,
        **settings,
    )
    outputs = [
        cell.step([micro_batch(step, index, rank) for index in range(num_micro_batches)])
        for step in range(NUM_STEPS)
    ]
    result = {"global_norm": torch.stack([each.global_norm for each in outputs])}
    if settings.get("local_norm"):
        result["local_norm"] = torch.stack([each.local_norm for each in outputs])
    result["dtypes"] = torch.tensor([p.grad_dtype == p.dtype for p in network.parameters()])
    return result


def accumulate_in_loop(
    rank: int, num_micro_batches: int, *, is_alone: bool = False
) -> dict[str, Tensor]:
    """Train `NUM_STEPS` updates with an attached loop; return the same as `accumulate_in_cell`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_micro_batches)
    config = StepConfig(local_norm=True, accumulate_allreduce_grads_in_fp32=True)
    attached = attach(accelerator, config, scale_sense=2.0**10)
    plain = Products()
    network, optimizer = accelerator.prepare(plain, _optimizer(plain, fused=False))
    norms, local_norms = [], []
    for step in range(NUM_STEPS):
        for index in range(num_micro_batches):
            with accelerator.accumulate(network):
                loss = network(*micro_batch(step, index, rank))
                accelerator.backward(loss * num_micro_batches)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(network.parameters(), float("inf")))
                optimizer.step()
                optimizer.zero_grad()
        output = attached.last_output
        local_norms.append(output.local_norm)
    attached.detach()
    AcceleratorState._reset_state(reset_partial_state=not is_alone)
    return {
        "global_norm": torch.stack(norms) / num_micro_batches,
        "local_norm": torch.stack(local_norms) / num_micro_batches,
        "weights": torch.stack([plain.first.detach(), plain.second.detach()]).float(),
        "dtypes": torch.tensor([p.grad_dtype == p.dtype for p in plain.parameters()]),
    }


class _Counting(SGD):
    """SGD that counts the bytes of the gradients that exist in its step."""

    def step(self, closure: None = None) -> None:
        del closure
        present = [p.grad for group in self.param_groups for p in group["params"]]
        alive = [earlier for reference in self.earlier if (earlier := reference()) is not None]
        self.bytes = _num_bytes({id(each): each for each in [*present, *alive]}.values())
        super().step()


def _num_bytes(gradients: Any) -> int:
    return sum(local.numel() * local.element_size() for local in local_tensors(list(gradients)))


def bytes_of_gradients(rank: int, way: str) -> dict[bool, dict[str, int]]:
    """Return this rank's bytes between two micro-batches and in the optimizer, without and with."""
    return {in_float32: _bytes(rank, way, in_float32=in_float32) for in_float32 in (False, True)}


def _bytes(rank: int, way: str, *, in_float32: bool) -> dict[str, int]:
    plain = Products()
    network = plain if way == "alone" else _wrapped(way, plain)
    optimizer = _Counting(network.parameters(), lr=1.0)
    sharded = ShardedParts(network)
    counts = {"weights": _num_bytes(plain.parameters())}

    def count(*_: object) -> None:
        held = [p.grad for p in plain.parameters() if p.grad is not None]
        optimizer.earlier = [weakref.ref(each) for each in held]
        whole = [gradient for unit in sharded.units for _, gradient in unit.gradients()]
        counts["between"] = _num_bytes(whole or held)

    plain.register_forward_pre_hook(count)
    cell = MFTrainOneStepCell(
        network, optimizer, use_clip_grad=True, accumulate_allreduce_grads_in_fp32=in_float32
    )
    cell.step([micro_batch(0, index, rank) for index in range(3)])
    return counts | {"in the optimizer": optimizer.bytes}
