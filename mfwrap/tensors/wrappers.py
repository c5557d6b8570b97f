"""What lies inside the wrappers that training puts around networks and optimizers."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mfwrap.arguments import described

__all__ = [
    "distributed_parts",
    "inner_optimizer",
    "is_deepspeed_engine",
    "parameter_names",
    "plain_name",
    "plain_network",
    "reshard",
    "sharded_parts",
    "tensor_norms",
    "trainable",
    "unwrapped_network",
    "unwrapped_optimizer",
]

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def distributed_parts(network: nn.Module) -> list[DistributedDataParallel]:
    """Return what reduces gradients over ranks, wherever in the network it is."""
    return [part for part in network.modules() if isinstance(part, DistributedDataParallel)]


def is_deepspeed_engine(network: object) -> bool:
    """Return whether a network is in an engine of DeepSpeed, which has a step of its own."""
    # Slow to import, and where nobody has imported it there is none.
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(network, deepspeed.DeepSpeedEngine)


def sharded_parts(network: nn.Module) -> "list[FSDPModule]":
    """Return the modules that ``fully_shard`` was applied to, wherever in the network they are."""
    # Slow to import, and where nobody has imported it nothing is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [part for part in network.modules() if isinstance(part, fsdp.FSDPModule)]


def reshard(network: nn.Module) -> None:
    """Let every module hold its shards, and gather them anew at its next forward.

    A forward without a backward leaves whole parameters in the root module, in place of its shards.
    """
    for part in sharded_parts(network):
        part.reshard()


def unwrapped_network(network: nn.Module) -> nn.Module:
    """Return the network inside DistributedDataParallel and ``torch.compile``."""
    while True:
        if isinstance(network, DistributedDataParallel):
            network = network.module
        elif any(name == "_orig_mod" for name, _ in network.named_children()):
            network = network.get_submodule("_orig_mod")
        else:
            return network


def plain_name(name: str) -> str:
    """Return a parameter's name without what ``torch.compile`` puts before compiled modules."""
    return name.replace("_orig_mod.", "")


def unwrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer inside accelerate's wrapper.

    Raises:
        TypeError: If `optimizer` is no torch optimizer.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        msg = f"`optimizer` must be a torch.optim.Optimizer, got {described(optimizer)}"
        raise TypeError(msg)
    return optimizer


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the L2 norm of each tensor, reading each once.

    Args:
        tensors: ``N`` floating tensors of any shape, at least one. Of a sharded one it is the norm
            of the whole, for which all ranks have to ask.

    Returns:
        Shape ``(N,)``, float32, on the device of the first. Does not wait for it.
    """
    norms: list[Tensor] = [
        _whole(norm).float()
        for kind in _by_kind(tensors)
        for norm in torch._foreach_norm(kind, 2, dtype=_accumulation_dtype(kind[0].dtype))
    ]
    order = [index for indices in _indices_by_kind(tensors) for index in indices]
    device = norms[0].device
    sorted_norms = [norm for _, norm in sorted(zip(order, norms, strict=True), key=lambda p: p[0])]
    return torch.stack([norm.to(device, non_blocking=True) for norm in sorted_norms])


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _indices_by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    kinds: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.device, tensor.dtype, type(tensor.detach()))
        kinds.setdefault(key, []).append(index)
    return list(kinds.values())


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[tensors[i].detach() for i in indices] for indices in _indices_by_kind(tensors)]


def _whole(norm: Tensor) -> Tensor:
    full = getattr(norm, "full_tensor", None)
    whole: Tensor = norm if full is None else full()
    return whole


def plain_network(model: nn.Module) -> nn.Module:
    """Return the network inside DistributedDataParallel, or `model` itself."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model by their plain names."""
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in plain_network(model).named_parameters()
        if parameter.requires_grad and parameter.numel()
    }


def parameter_names(model: nn.Module) -> Mapping[Tensor, str]:
    """Return the plain names of trainable parameters."""
    return {parameter: name for name, parameter in trainable(model).items()}


def inner_optimizer(optimizer: Any) -> Optimizer | None:
    """Return the torch optimizer inside accelerate's wrapper; ``None`` if there is none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, Optimizer) else None
