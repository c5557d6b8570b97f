"""What lies inside the wrappers that training puts around networks and optimizers."""

import sys
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mfwrap.arguments import described

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "distributed_parts",
    "is_deepspeed_engine",
    "plain_name",
    "reshard",
    "sharded_parts",
    "unwrapped_network",
    "unwrapped_optimizer",
]


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
