"""Find networks, optimizers and distributed modules inside the wrappers around them."""

import sys
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.compatibility.torch import COMPILED_MODULE

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


FSDP = "torch.distributed.fsdp"
"""Module with the classes of both versions of FSDP."""


def is_instance_of(value: object, module: str, name: str) -> bool:
    """Return whether a value is an instance of a class, without importing the class.

    Imports of large libraries are slow. If no other code has imported the module, there is no
    instance of its classes.

    Args:
        value: Any object.
        module: Full name of the module that has the class.
        name: Name of the class.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def distributed_parts(network: nn.Module) -> list[DistributedDataParallel]:
    """Return all DistributedDataParallel modules in a network, including the network itself."""
    return [part for part in network.modules() if isinstance(part, DistributedDataParallel)]


def sharded_parts(network: nn.Module) -> "list[FSDPModule]":
    """Return the modules of a network, root included, to which ``fully_shard`` was applied."""
    modules: Any = network.modules()
    return [part for part in modules if is_instance_of(part, FSDP, "FSDPModule")]


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
    while is_instance_of(optimizer, "accelerate.optimizer", "AcceleratedOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def frozen_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the other parameters of a model that have memory of their own, by plain name.

    Parameters that are offloaded, sparse or quantized by torch are left out.
    """
    return {
        plain_name(name): parameter
        for name, parameter in unwrapped_network(model).named_parameters()
        if not (parameter.requires_grad or parameter.is_meta or parameter.is_quantized)
        and parameter.layout is torch.strided
        and parameter.numel()
    }


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model, with or without wrappers, by plain name."""
    return {
        plain_name(name): parameter
        for name, parameter in unwrapped_network(model).named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
