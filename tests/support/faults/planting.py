"""How faults are planted: in a micro-batch, or in the network and its optimizer around a step.

A fault of a micro-batch is planted when the micro-batch is collated, because loaders fetch batches
ahead of the step.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from support.faults.networks import NUM_CLASSES, Architecture

__all__ = [
    "Around",
    "Fault",
    "Planted",
    "Spoil",
    "activation",
    "all_gradients",
    "bright_row",
    "collapsed_router",
    "gradient",
    "growing_query",
    "heavy_decay",
    "large_variance",
    "layer_gradients",
    "loss_factor",
    "moments",
    "nan_buffers",
    "nan_moments",
    "nan_row",
    "no_targets",
    "noisy_gradients",
    "noisy_weights",
    "one_target",
    "other_targets",
    "weight_element",
    "whole_weight",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planted fault."""

    kind: str
    """Key of `KINDS`."""

    step: int
    """First step of the fault, counted from 1."""

    layer: int = 1
    """Number of the layer; without effect for kinds that have none."""

    rank: int = 0
    """Rank of the fault; without effect for kinds that change all ranks alike."""

    micro_batch: int = 0
    row: int = 0
    """Row in its micro-batch; without effect for kinds that have none."""


@dataclass(frozen=True, slots=True)
class Planted:
    """The parts of a training that a fault may change."""

    architecture: Architecture
    network: nn.Module
    """Network without wrappers."""

    optimizer: Optimizer


Spoil = Callable[[dict[str, Tensor], Fault], None]
"""Changes a collated micro-batch in place."""

Around = Callable[[Planted, Fault], contextlib.AbstractContextManager[Any]]
"""Changes network or optimizer within the steps of a fault. A change that lasts, such as that of a
weight, is not undone at the end."""


def _weight(planted: Planted, fault: Fault) -> nn.Parameter:
    return planted.network.get_parameter(planted.architecture.weight_name(fault.layer))


def _layer(planted: Planted, fault: Fault) -> nn.Module:
    return planted.network.get_submodule(planted.architecture.layer_name(fault.layer))


def moments(name: str, factor: float) -> Around:
    """Multiply a moment of AdamW, ``exp_avg`` or ``exp_avg_sq``, of all weights."""

    def change(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
        del fault
        for state in planted.optimizer.state.values():
            state[name].mul_(factor)
        return contextlib.nullcontext()

    return change


def nan_moments(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
    """Make one element of the first moment of a layer's weight NaN."""
    planted.optimizer.state[_weight(planted, fault)]["exp_avg"].view(-1)[0] = torch.nan
    return contextlib.nullcontext()


def weight_element(factor: float) -> Around:
    """Multiply one element of a weight, as a flipped bit of the exponent does."""

    def change(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
        weight = _weight(planted, fault).data.view(-1)
        # The second largest of the weight's elements: neither an extreme one nor a zero.
        weight[weight.abs().topk(2).indices[-1]] *= factor
        return contextlib.nullcontext()

    return change


def noisy_weights(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
    """Add noise with ten times its standard deviation to a weight, the same on all ranks."""
    weight = _weight(planted, fault).data
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight += 10 * weight.std() * noise
    return contextlib.nullcontext()


@contextlib.contextmanager
def growing_query(planted: Planted, fault: Fault) -> Iterator[None]:
    """Multiply the weight of the projection with which attention logits grow by 1.3 at each update.

    The gradients of an attention that looks at one token alone no longer stop the growth.
    """
    weight = _layer(planted, fault).get_submodule(planted.architecture.query).weight
    hook = planted.optimizer.register_step_post_hook(lambda *_: weight.data.mul_(1.3))
    yield
    hook.remove()


def collapsed_router(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
    """Give all experts the same logit, so that every token goes to the first experts."""
    weight = _layer(planted, fault).get_submodule(planted.architecture.router).weight.data
    weight.copy_(weight[:1].clone().expand_as(weight))
    return contextlib.nullcontext()


def nan_buffers(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
    """Make one element of a layer's running variance NaN, which training does not read."""
    _layer(planted, fault).get_buffer("norm.running_var")[0] = torch.nan
    return contextlib.nullcontext()


def gradient(factor: float) -> Around:
    """Multiply the gradient of one weight."""
    return _hooked(lambda planted, fault: [_weight(planted, fault)], factor)


def layer_gradients(factor: float) -> Around:
    """Multiply the gradients of all weights of a layer."""
    return _hooked(
        lambda planted, fault: [
            weight for weight in _layer(planted, fault).parameters() if weight.requires_grad
        ],
        factor,
    )


def all_gradients(factor: float) -> Around:
    """Multiply all gradients."""
    return _hooked(
        lambda planted, _: [one for one in planted.network.parameters() if one.requires_grad],
        factor,
    )


def _hooked(weights: Callable[[Planted, Fault], list[nn.Parameter]], factor: float) -> Around:
    @contextlib.contextmanager
    def around(planted: Planted, fault: Fault) -> Iterator[None]:
        hooks = [
            weight.register_hook(lambda gradient: gradient * factor)
            for weight in weights(planted, fault)
        ]
        yield
        for hook in hooks:
            hook.remove()

    return around


def activation(code: int) -> Spoil:
    """Multiply the output of a layer by a factor, see `FACTORS`."""

    def spoil(batch: dict[str, Tensor], fault: Fault) -> None:
        batch["layer_codes"][fault.layer] = code

    return spoil


def loss_factor(code: int) -> Spoil:
    """Multiply the loss inside of the network by a factor, see `FACTORS`."""

    def spoil(batch: dict[str, Tensor], fault: Fault) -> None:
        del fault
        batch["loss_code"].fill_(code)

    return spoil


def one_target(batch: dict[str, Tensor], fault: Fault) -> None:
    """Replace all targets by the same one."""
    del fault
    batch["labels"][batch["labels"] >= 0] = 3


def other_targets(batch: dict[str, Tensor], fault: Fault) -> None:
    """Replace each target by another one, by the same rule for all targets."""
    del fault
    labels = batch["labels"]
    if labels.dim() == 1:
        labels.copy_((labels + 1) % NUM_CLASSES)
    else:
        labels.copy_(torch.where(labels < 0, labels, (labels + 7) % 32))


def no_targets(batch: dict[str, Tensor], fault: Fault) -> None:
    """Leave no target, so that the mean over targets is 0 / 0."""
    del fault
    batch["labels"].fill_(-100)


def bright_row(batch: dict[str, Tensor], fault: Fault) -> None:
    """Multiply one image by 1,000, and give it another class."""
    batch["pixel_values"][fault.row] *= 1_000.0
    batch["labels"][fault.row] = (batch["labels"][fault.row] + 1) % NUM_CLASSES


def nan_row(batch: dict[str, Tensor], fault: Fault) -> None:
    """Make one pixel of one image NaN."""
    batch["pixel_values"][fault.row, 0, 1, 1] = torch.nan


def whole_weight(factor: float) -> Around:
    """Multiply a whole weight: by zero, as a memory page that was lost does, or by -1."""

    def change(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
        _weight(planted, fault).data.mul_(factor)
        return contextlib.nullcontext()

    return change


@contextlib.contextmanager
def noisy_gradients(planted: Planted, fault: Fault) -> Iterator[None]:
    """Add noise to the gradient of a weight, a hundred times as large as the gradient."""

    def noise(gradient: Tensor) -> Tensor:
        drawn = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))
        return gradient + 100 * gradient.norm() / drawn.norm() * drawn

    hook = _weight(planted, fault).register_hook(noise)
    yield
    hook.remove()


def large_variance(planted: Planted, fault: Fault) -> contextlib.AbstractContextManager[Any]:
    """Multiply a layer's running variance by 10,000, which training does not read."""
    _layer(planted, fault).get_buffer("norm.running_var").mul_(1e4)
    return contextlib.nullcontext()


@contextlib.contextmanager
def heavy_decay(planted: Planted, fault: Fault) -> Iterator[None]:
    """Multiply the weight decay by 100,000 for one update."""
    del fault
    for group in planted.optimizer.param_groups:
        group["weight_decay"] *= 1e5
    yield
    for group in planted.optimizer.param_groups:
        group["weight_decay"] /= 1e5
