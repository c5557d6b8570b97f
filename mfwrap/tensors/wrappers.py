"""What lies inside the wrappers that training puts around networks and optimizers."""

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "distributed_parts",
    "is_deepspeed_engine",
    "plain_name",
    "reshard",
    "sharded_parts",
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


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper; anything else is returned itself."""
    # An optimizer that keeps another one in `optimizer` (Lookahead, for example) is no wrapper to
    # take off: its own step must run. accelerate is not imported here; see `is_deepspeed_engine`.
    accelerate = sys.modules.get("accelerate.optimizer")
    while accelerate is not None and isinstance(optimizer, accelerate.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model, with or without wrappers, by plain name."""
    return {
        plain_name(name): parameter
        for name, parameter in unwrapped_network(model).named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
