"""What a step needs to be done again: its inputs and the random numbers it drew."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.tensors.wrappers import plain_network

__all__ = ["NetworkInputs", "RandomState", "StepRecorder", "inner_network"]


class RandomState(NamedTuple):
    """States of torch's generators: of the host, and of the network's device."""

    host: Tensor
    device: Tensor | None
    """``None`` where the network is on the host."""

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """Return the present states. Does not wait for the device."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


class NetworkInputs(NamedTuple):
    """One call of the network in training: references, no copies."""

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    random: RandomState
    autocast: Callable[[], AbstractContextManager[Any]]
    """Makes the context that it was called in."""


@final
class StepRecorder:
    """Keep the inputs of the calls of a network in the step that goes on and in the one before.

    Args:
        network: The network itself, in no wrapper.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.device = next((p.device for p in network.parameters()), torch.device("cpu"))
        self._this_step: list[NetworkInputs] = []
        self.last_step: list[NetworkInputs] = []
        """Calls of the last step that has ended, in their order."""
        self.is_on = True
        self._handle = network.register_forward_pre_hook(self._record, with_kwargs=True)

    def end_step(self) -> None:
        """Let go of the step before."""
        self.last_step, self._this_step = self._this_step, []

    def close(self) -> None:
        """Record no more, and let go of everything."""
        self._handle.remove()
        self.last_step, self._this_step = [], []

    def _record(
        self, network: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        if self.is_on and network.training and torch.is_grad_enabled():
            state = RandomState.now(self.device)
            autocast = _present_autocast(self.device.type)
            self._this_step.append(NetworkInputs(positional, keywords, state, autocast))


def _present_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


def inner_network(model: nn.Module) -> nn.Module | None:
    """Return what can be recorded of a model: the network inside DistributedDataParallel.

    Returns:
        ``None`` if its calls cannot be repeated on one rank (sharded weights), or hooks would
        change how it is compiled.
    """
    network = plain_network(model)
    sharded = any(hasattr(parameter, "full_tensor") for parameter in network.parameters())
    compiled = any(hasattr(module, "_orig_mod") for module in network.modules())
    return None if sharded or compiled else network
