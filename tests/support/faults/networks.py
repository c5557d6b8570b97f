"""Networks into which a fault is planted: by the marks of a micro-batch, or in their settings."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from support.faults.architecture import Architecture
from support.faults.changes import changed
from support.faults.faults import (
    FLOWING,
    GROUP_SETTINGS,
    NETWORK_PARTS,
    NETWORK_SETTINGS,
    Fault,
    How,
    What,
    Where,
)
from support.faults.judged_networks import JUDGED_NETWORKS
from support.faults.library_networks import LIBRARY_NETWORKS
from support.faults.parts import plant_in_part
from support.faults.plain_networks import PLAIN_NETWORKS

__all__ = [
    "ARCHITECTURES",
    "PlantedNetwork",
    "group_of",
    "new_network",
    "parameter_names",
    "target_modules",
    "target_weights",
    "weight_groups",
]

ARCHITECTURES = LIBRARY_NETWORKS | PLAIN_NETWORKS | JUDGED_NETWORKS
"""Architectures by name."""

_MAPS = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d, Conv1D)
"""Modules whose output an activation fault may change: networks call them as modules."""


def parameter_names(network: nn.Module, weight: nn.Parameter) -> list[str]:
    """Return all names of a weight, which may be tied."""
    named = network.named_parameters(remove_duplicate=False)
    return [name for name, each in named if each is weight]


def target_weights(
    network: nn.Module, architecture: Architecture, fault: Fault
) -> dict[str, nn.Parameter]:
    """Return the weights that a fault is in, by name: trainable ones, unless it says otherwise."""
    is_frozen = fault.kind.what is What.FROZEN_WEIGHT
    named = {
        name: weight
        for name, weight in network.named_parameters()
        if weight.requires_grad is not is_frozen
    }
    # An adapter is merged into matrices.
    is_moved = fault.kind.what is What.WEIGHT and fault.kind.how in {How.TRANSPOSED, How.REPEATED}
    if is_frozen or is_moved:
        named = {name: weight for name, weight in named.items() if weight.dim() > 1}
    if fault.where is Where.ALL and fault.kind.how is not How.SWAPPED:
        return named
    if fault.kind.what in GROUP_SETTINGS:
        return weight_groups(network, architecture)[group_of(architecture, fault)]
    if fault.kind.how is How.SWAPPED:
        return _swapped(named, architecture, fault)
    if fault.layer is None:
        inside = tuple(f"{layer}." for layer in architecture.layers)
        named = {name: one for name, one in named.items() if not name.startswith(inside)} or named
    else:
        layer = _layer(architecture, fault)
        named = {name: one for name, one in named.items() if name.startswith(f"{layer}.")}
        if fault.where is Where.LAYER:
            return named
    # A weight of one element has neither rows nor elements.
    named = {name: weight for name, weight in named.items() if weight.numel() > 1}
    name = list(named)[fault.pick % len(named)]
    return {name: named[name]}


def _swapped(
    named: dict[str, nn.Parameter], architecture: Architecture, fault: Fault
) -> dict[str, nn.Parameter]:
    """Return pairs of weights of the same shape, in turn: all of them, of two layers, or one."""
    if fault.where is Where.LAYER:
        number = group_of(architecture, fault)
        layer, other = architecture.layers[number - 1], architecture.layers[number]
        pairs = [
            (name, name.replace(layer, other, 1)) for name in named if name.startswith(f"{layer}.")
        ]
        of_layers = {
            name: named[name]
            for pair in pairs
            if pair[1] in named and named[pair[0]].shape == named[pair[1]].shape
            for name in pair
        }
        if of_layers:
            return of_layers
    by_shape: dict[Any, dict[str, nn.Parameter]] = {}
    for name, weight in named.items():
        if weight.numel() > 1:
            by_shape.setdefault(weight.shape, {})[name] = weight
    if fault.where is Where.ALL:
        names = [list(group)[: len(group) // 2 * 2] for group in by_shape.values()]
        return {name: named[name] for group in names for name in group}
    neighbors = [
        dict(pair) for group in by_shape.values() for pair in itertools.pairwise(group.items())
    ]
    return neighbors[fault.pick % len(neighbors)]


def weight_groups(network: nn.Module, architecture: Architecture) -> list[dict[str, nn.Parameter]]:
    """Return the trainable weights by name, in a group for each layer and one for the others."""
    groups: list[dict[str, nn.Parameter]] = [{} for _ in (*architecture.layers, "others")]
    for name, weight in network.named_parameters():
        if weight.requires_grad:
            number = next(
                (
                    number
                    for number, layer in enumerate(architecture.layers)
                    if name.startswith(f"{layer}.")
                ),
                -1,
            )
            groups[number][name] = weight
    return groups


def group_of(architecture: Architecture, fault: Fault) -> int:
    """Return the number of the group of `weight_groups` that a fault is in."""
    return -1 if fault.layer is None else fault.layer % len(architecture.layers)


def target_modules(network: nn.Module, architecture: Architecture, fault: Fault) -> list[str]:
    """Return the names of the modules whose outputs a fault is in."""
    if fault.kind.what is What.LOGITS:
        return [architecture.head or ""]
    if fault.where is Where.ALL:
        return list(architecture.layers)
    layer = _layer(architecture, fault)
    if fault.where is Where.LAYER:
        return [layer]
    inside = [
        f"{layer}.{name}"
        for name, module in network.get_submodule(layer).named_modules()
        if isinstance(module, _MAPS)
    ]
    return [inside[fault.pick % len(inside)]] if inside else [layer]


def _layer(architecture: Architecture, fault: Fault) -> str:
    assert fault.layer is not None
    return architecture.layers[fault.layer % len(architecture.layers)]


class _Mask(nn.Module):
    """Return minus infinity above the diagonal, as the mask of a causal attention does."""

    def forward(self, like: Tensor) -> Tensor:
        """Return a mask of shape ``(2, 2)``."""
        return like.new_full((2, 2), -torch.inf).triu(1)


def _call_mask(layer: nn.Module, inputs: Any) -> None:
    layer.mask(inputs[0])


def new_network(architecture: Architecture, *, width: int = 16, seed: int = 0) -> nn.Module:
    """Return a network with fixed initial weights.

    Its first layer has a healthy submodule that returns minus infinity: no monitor may take it for
    a fault.

    Args:
        architecture: Architecture of the network.
        width: Hidden size.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    network = architecture.make(width)
    network.train()
    first = network.get_submodule(architecture.layers[0])
    first.add_module("mask", _Mask())
    first.register_forward_pre_hook(_call_mask)
    return network


class PlantedNetwork:
    """Let a network take the marks of a micro-batch, and plant a fault in its passes.

    The fault is in the rows that are marked. A replay calls the network with the inputs that it has
    recorded, marks included, so it finds the fault again. A fault of the program that lasts is in
    all rows, also in those of older steps that are run again.

    Args:
        network: Network, from `new_network`.
        architecture: Its architecture.
        fault: Fault to plant; ``None`` for a twin.
    """

    def __init__(self, network: nn.Module, architecture: Architecture, fault: Fault | None) -> None:
        self._network, self._architecture = network, architecture
        self._marks = torch.zeros(1)
        self.step_of_program = 0
        """Number of the step of a fault that is in all rows, from 1; 0 for none."""
        self._in_evaluation = False
        self._undo: list[Callable[[], None]] = []
        self._fault = fault
        forward = network.forward

        @functools.wraps(forward)
        def with_marks(*inputs: Any, marks: Tensor, indices: Tensor, **batch: Any) -> Any:
            del indices
            number = self.step_of_program
            self._marks = torch.full_like(marks, number) if number else marks
            if self._in_evaluation:
                network.eval()
            output = forward(*inputs, **batch)
            if fault is not None and bool(self._marks.any()):
                if fault.kind.what is What.LOSS:
                    output.loss = self._changed_loss(output.loss)
                elif fault.kind.what is What.LOSS_GRADIENT:
                    # The root of zero, whose slope is infinite.
                    output.loss = output.loss + (0 * output.logits).sum().sqrt()
            return output

        network.forward = with_marks
        is_in_pass = fault is not None and fault.kind.how not in {How.KEPT, How.SWAPPED}
        if fault is not None and fault.kind.what in FLOWING and is_in_pass:
            self._plant(fault)

    @property
    def _size(self) -> float:
        """Size of the fault: marks are the number of the step of the fault, counted from 1."""
        assert self._fault is not None
        return self._fault.size_at(self._fault.step + int(self._marks.max()) - 1)

    def _changed_loss(self, loss: Tensor) -> Tensor:
        assert self._fault is not None
        how, size = self._fault.kind.how, self._size
        if how is How.SHIFTED:
            return loss + size
        if how is How.TERM:
            weights = [each for each in self._network.parameters() if each.requires_grad]
            return (
                loss + size * torch.stack([each.float().square().mean() for each in weights]).mean()
            )
        return changed(loss, self._fault, size)

    def _plant(self, fault: Fault) -> None:
        if fault.kind.what is What.GRADIENT:
            for weight in target_weights(self._network, self._architecture, fault).values():
                weight.register_hook(self._changed_gradient)
            return
        for name in target_modules(self._network, self._architecture, fault):
            self._network.get_submodule(name).register_forward_hook(self._after_module)

    def _changed_gradient(self, gradient: Tensor) -> Tensor:
        if not bool(self._marks.any()):
            return gradient
        assert self._fault is not None
        return changed(gradient, self._fault, self._size)

    def _after_module(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not bool(self._marks.any()):
            return output
        assert self._fault is not None
        tensor = output if isinstance(output, Tensor) else output[0]
        marks, size = self._marks, self._size
        if self._fault.kind.what in {What.ACTIVATION, What.LOGITS}:
            tensor = changed(tensor, self._fault, size, marks)
        elif tensor.requires_grad:
            tensor = tensor.clone()
            tensor.register_hook(lambda one: changed(one, self._fault, size, marks))
        return tensor if isinstance(output, Tensor) else (tensor, *output[1:])

    def change_setting(self, fault: Fault) -> None:
        """Change a setting or a part of the network; `restore` undoes it."""
        if fault.kind.what in NETWORK_PARTS:
            self._undo += plant_in_part(self._network, self._architecture, fault)
            return
        name = NETWORK_SETTINGS[fault.kind.what]
        settings = getattr(self._network, "settings", {})
        if fault.kind.what is What.MODE:
            self._in_evaluation = True
            self._undo.append(self._leave_evaluation)
        elif fault.kind.what is What.DROPOUT:
            for module in self._network.modules():
                if isinstance(module, nn.Dropout):
                    self._set(module, "p", fault.size)
        elif fault.kind.what is What.SOFT_CAP:
            cap = self._network.config.final_logit_softcapping
            self._set(self._network.config, "final_logit_softcapping", _changed_number(cap, fault))
        elif name in settings:
            before = settings[name]
            settings[name] = (
                fault.size
                if fault.kind.what is What.LABEL_SMOOTHING
                else _changed_number(before, fault)
            )
            self._undo.append(lambda: settings.__setitem__(name, before))
        else:
            head = self._network.get_submodule(self._architecture.head or "")
            factor = _changed_number(1.0, fault)
            hook = head.register_forward_hook(lambda _, __, logits: factor * logits)
            self._undo.append(hook.remove)

    def _set(self, owner: Any, name: str, value: float) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _leave_evaluation(self) -> None:
        self._in_evaluation = False
        self._network.train()

    def restore(self) -> None:
        """Restore the settings."""
        while self._undo:
            self._undo.pop()()


def _changed_number(number: float, fault: Fault) -> float:
    return {
        How.RAISED: number * fault.size,
        How.LOWERED: number / fault.size,
        How.ZERO: 0.0,
    }[fault.kind.how]
