"""Find networks, optimizers and distributed modules inside the wrappers around them."""

import sys
from typing import TYPE_CHECKING, Any, Self, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.compatibility.torch import COMPILED_MODULE

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def distributed_parts(network: nn.Module) -> list[DistributedDataParallel]:
    """Return all DistributedDataParallel modules in a network, including the network itself."""
    return [part for part in network.modules() if isinstance(part, DistributedDataParallel)]


def is_deepspeed_engine(network: object) -> bool:
    """Return whether a network is a DeepSpeed engine, which has a training step of its own."""
    # Do not import DeepSpeed here, because that is slow. If no other code has imported DeepSpeed,
    # no engine exists.
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(network, deepspeed.DeepSpeedEngine)


def contains_fsdp1(network: nn.Module) -> bool:
    """Return whether version 1 of FSDP wraps the network or a module in it."""
    # As in `sharded_parts`: if no other code has imported the module, no such wrapper exists.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(part, fsdp.FullyShardedDataParallel) for part in network.modules()
    )


def sharded_parts(network: nn.Module) -> "list[FSDPModule]":
    """Return the modules of a network, root included, to which ``fully_shard`` was applied."""
    # Do not import the module here, because that is slow. If no other code has imported the module,
    # `fully_shard` has not been called.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [part for part in network.modules() if isinstance(part, fsdp.FSDPModule)]


def reshard(network: nn.Module) -> None:
    """Put the sharded parameters back into all modules; the next forward gathers them again.

    After a forward without a backward, the root module would otherwise still hold whole parameters.
    """
    for part in sharded_parts(network):
        part.reshard()


@final
class PipelineStages(nn.ModuleDict):
    """The stages of a pipeline that this rank runs, by name: ``stage_0``, ``stage_1``, ...

    The numbers count the stages of the whole pipeline, so names of parameters differ between ranks
    that run different stages.
    """

    def unwrapped(self) -> Self:
        """Return the same stages without DistributedDataParallel and ``torch.compile``."""
        return type(self)({name: unwrapped_network(stage) for name, stage in self.items()})


def unwrapped_network(network: nn.Module) -> nn.Module:
    """Return the network inside DistributedDataParallel and ``torch.compile``."""
    while True:
        if isinstance(network, PipelineStages):
            return network.unwrapped()
        if isinstance(network, DistributedDataParallel):
            network = network.module
        elif any(name == COMPILED_MODULE for name, _ in network.named_children()):
            network = network.get_submodule(COMPILED_MODULE)
        else:
            return network


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix that ``torch.compile`` adds."""
    return name.replace(f"{COMPILED_MODULE}.", "")


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper, or `optimizer` itself without one."""
    # Remove only wrappers of accelerate's class. Other optimizers (Lookahead, for example) may also
    # hold an optimizer in the attribute `optimizer`, but the step of the outer optimizer must run.
    # Do not import accelerate here, for the reason in `is_deepspeed_engine`.
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
