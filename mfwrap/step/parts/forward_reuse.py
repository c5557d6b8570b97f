"""Differentiate a forward pass that has run already, instead of running the network again.

In MindSpore, ``loss = network(*inputs)`` followed by ``grad(network, weights)(*inputs, sens)`` runs
the network once. Without this module, PyTorch would run it twice. That takes longer, needs the
memory of two sets of activations, draws dropout twice, and counts each batch twice in batch
normalization.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mfwrap.compatibility.torch import version_of
from mfwrap.tensors.module_hooks import keep_out_of_copies


@dataclass(frozen=True, slots=True)
class _Forward:
    """One forward pass. The weak references keep neither inputs nor activations in memory."""

    inputs: "list[weakref.ref[Tensor]]"
    output: "weakref.ref[Tensor]"
    is_training: bool
    """Whether the network was in training mode."""
    versions: list[int]
    """How often each input, the output, and each tensor of the state had been changed in place."""


@dataclass(slots=True)
class _Record:
    state: Sequence[Tensor]
    """Parameters and buffers on which a forward pass depends."""
    last: _Forward | None = None


# The values hold weights, but not the modules that are the keys. So an entry lives as long as its
# network.
_records: "weakref.WeakKeyDictionary[nn.Module, _Record]" = weakref.WeakKeyDictionary()


def remember_forwards(network: nn.Module, weights: Sequence[Tensor]) -> None:
    """Remember the last forward pass of a network from now on.

    Args:
        network: The network, with its wrappers.
        weights: Parameters whose change makes a forward pass obsolete, in addition to the
            parameters and buffers of the network.
    """
    if network not in _records:
        hook = network.register_forward_hook(_remember, with_kwargs=True)
        keep_out_of_copies(network, hook)
    state = dict.fromkeys([*weights, *network.parameters(), *network.buffers()])
    _records[network] = _Record(list(state))


def take_output(fn: object, inputs: Sequence[Any]) -> Tensor | None:
    """Return the output of a network's last forward pass if it is what a new pass would compute.

    Each forward pass is returned only once, because differentiating it frees its activations.

    Args:
        fn: Function or network.
        inputs: Positional arguments of the new pass, which has no other arguments.

    Returns:
        The output. ``None`` if `fn` is not a network whose forward passes are remembered, if the
        last pass had other inputs, if the network's mode has changed, if an input, the output, a
        parameter or a buffer was changed in place, or if the output no longer exists. As in torch's
        own check, changes through ``tensor.data`` go unnoticed.
    """
    if not isinstance(fn, nn.Module):
        return None
    record = _records.get(fn)
    if record is None or record.last is None:
        return None
    last, record.last = record.last, None
    output = last.output()
    if output is None or [id(given()) for given in last.inputs] != [id(given) for given in inputs]:
        return None
    is_current = last.is_training == fn.training and last.versions == _versions(
        [*inputs, output, *record.state]
    )
    return output if is_current else None


def _remember(
    network: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
) -> None:
    # In a compiled network, this hook is traced, and then does nothing.
    record = None if torch.compiler.is_compiling() else _records.get(network)
    if record is None:  # A copy has the hook, too, if its class defines ``__deepcopy__``.
        return
    record.last = None
    # torch does not count the changes of inference tensors.
    counted = all(isinstance(given, Tensor) and not given.is_inference() for given in inputs)
    if counted and not keywords and isinstance(output, Tensor) and output.requires_grad:
        record.last = _Forward(
            [weakref.ref(given) for given in inputs],
            weakref.ref(output),
            network.training,
            _versions([*inputs, output, *record.state]),
        )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]
