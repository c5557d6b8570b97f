"""Optimizers of every kind, and runs that step an optimizer with or without the wrapper."""

import functools
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RMSprop

from mfwrap import AdamWeightDecay, ChainedOptimizer
from mfwrap.optimizers import Muon
from mfwrap.step.skipping import SkippableOptimizer

# Vectorized kernels have separate code for more elements than a vector holds, for fewer elements,
# and for a scalar. Test each.
SHAPES = [(7, 9), (5,), ()]
HALF = [torch.bfloat16, torch.float16]
# torch's defaults are 0 in float16.
EPS = 1e-6
# The wrapper and the plain optimizer divide gradients in different ways, so gradients differ by two
# roundings, 1.2e-7 relative. The weights' steps differ in the same proportion, and momentum adds up
# a few steps. At learning rates of at most 0.1, an `atol` of 2e-6 is ample.
CLOSE = {"rtol": 1e-6, "atol": 2e-6}


class OwnStep(AdamW):
    """A user's optimizer that ignores ``grad_scale`` and ``found_inf``."""

    def step(self, closure=None):
        """Subtract the momentum divided by its norm plus one."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                state["step"] = state.get("step", 0) + 1
                momentum.lerp_(parameter.grad, 0.5)
                parameter.data.sub_(momentum.div(momentum.norm() + 1), alpha=group["lr"])


class Kind(NamedTuple):
    """A builder of optimizers; `folds` says whether a fused kernel takes divisor and skip flag."""

    build: functools.partial
    folds: bool

    def __call__(self, parameters):
        return self.build(parameters)


def kind(cls, *, folds=False, **settings):
    """Return a builder of an optimizer, by default without a fused kernel."""
    return Kind(functools.partial(cls, **settings), folds)


def fused(cls, **settings):
    """Return a builder of an optimizer whose fused kernel takes the divisor and the skip flag."""
    return kind(cls, folds=True, fused=True, **settings)


def rate():
    """Return a learning rate that is a tensor."""
    return torch.tensor(0.05)


def muon_with_adamw(kind, parameters):
    """Return a kind of Muon for matrices, and fused AdamW for all others, as one optimizer."""
    # Muon computes in bfloat16, whose roundings may differ by 1 % of a step between two ways to
    # divide. So the steps are small.
    return ChainedOptimizer(
        kind([p for p in parameters if p.ndim == 2], lr=1e-5),
        AdamW([p for p in parameters if p.ndim != 2], lr=0.1, fused=True),
    )


def two_fused(parameters):
    """Return two optimizers with fused kernels as one optimizer."""
    return ChainedOptimizer(
        AdamWeightDecay(parameters[:1], lr=0.1, weight_decay=0.1),
        Adam(parameters[1:], lr=0.1, fused=True),
    )


FOLDED = {
    "fused Adam": fused(Adam, lr=0.1),
    "fused Adam amsgrad": fused(Adam, lr=0.1, amsgrad=True, weight_decay=0.1, maximize=True),
    "fused AdamW": fused(AdamW, lr=0.1, weight_decay=0.1),
    "fused AdamW tensor rate": fused(AdamW, lr=rate()),
    "fused SGD": fused(SGD, lr=0.1),
    "fused SGD momentum": fused(SGD, lr=0.1, momentum=0.9),
    "fused SGD nesterov": fused(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused SGD maximize": fused(SGD, lr=0.1, momentum=0.5, maximize=True),
    "fused SGD tensor rate": fused(SGD, lr=rate(), momentum=0.9),
    "fused Adagrad": fused(Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "AdamWeightDecay": fused(AdamWeightDecay, lr=0.1, weight_decay=0.1),
    "AdamWeightDecay float32 state": fused(AdamWeightDecay, lr=rate(), fp32_state=True),
    "AdamWeightDecay bias correction": fused(
        AdamWeightDecay, lr=0.1, fp32_state=True, bias_correction=True
    ),
    "chain of two fused": Kind(functools.partial(two_fused), folds=True),
    "Muon with AdamW": Kind(functools.partial(muon_with_adamw, Muon), folds=True),
    "fused Adagrad decay": fused(Adagrad, lr=0.1, weight_decay=0.1),
}
# This optimizer reads the flag on the host until its first applied update, not afterwards.
DAMPENED = {"fused SGD dampening": fused(SGD, lr=0.1, momentum=0.9, dampening=0.5)}
IN_PLACE = {
    "Adam": kind(Adam, lr=0.1, eps=EPS),
    "AdamW": kind(AdamW, lr=0.1, eps=EPS, weight_decay=0.1, foreach=True),
    "SGD": kind(SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD foreach": kind(SGD, lr=0.1, foreach=True),
    "Adagrad": kind(Adagrad, lr=0.1, eps=EPS),
    "RMSprop": kind(RMSprop, lr=0.01, eps=EPS, momentum=0.9, centered=True),
    "Adafactor": kind(Adafactor, lr=0.01),
    "unfused AdamWeightDecay": kind(AdamWeightDecay, lr=0.1, fp32_state=True, fused=False),
    "torch's Muon with AdamW": Kind(
        functools.partial(muon_with_adamw, torch.optim.Muon), folds=False
    ),
    "NAdam": kind(NAdam, lr=0.1, eps=EPS),
    "own step": kind(OwnStep, lr=0.1, fused=True),
}
ALL = FOLDED | DAMPENED | IN_PLACE

# Leave fused SGD out: with half-precision weights on CPU, the wrapper raises an error.
HALF_ALL = {name: kind for name, kind in ALL.items() if not name.startswith("fused SGD")}

EACH = pytest.mark.parametrize("kind", ALL.values(), ids=ALL)
EACH_OF_EACH_TYPE = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(pytest.param(kind, torch.float32, id=f"{name}, float32") for name, kind in ALL.items()),
        *(
            pytest.param(kind, dtype, id=f"{name}, {str(dtype).removeprefix('torch.')}")
            for name, kind in HALF_ALL.items()
            for dtype in HALF
        ),
    ],
)


def flag(*, skip):
    """Return the skip flag of one step."""
    return torch.full((), skip)


def scalar(number):
    """Return a divisor as a float32 scalar, like the one that a step computes."""
    return torch.full((), number, dtype=torch.float32)


def parameters_of(dtype=torch.float32):
    """Return new parameters, with the same values at every call."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients_of(step, dtype=torch.float32):
    """Return the gradients of a step, with magnitudes of about 1."""
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(s, generator=generator) + 0.1).to(dtype) for s in SHAPES]


def give(parameters, gradients):
    """Set the gradients of parameters, as backward does."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


class Run:
    """Parameters, their optimizer, and the wrapper under test."""

    def __init__(self, build, parameters=None):
        self.parameters = parameters or parameters_of()
        self.optimizer = build(self.parameters)
        self.skippable = SkippableOptimizer(self.optimizer)

    def plain(self, gradients):
        """Step the optimizer without the wrapper."""
        give(self.parameters, gradients)
        self.optimizer.step()

    def divided(self, gradients, divisor):
        """Multiply the gradients by the divisor, and run the wrapper's step with that divisor."""
        give(self.parameters, [None if g is None else g * divisor for g in gradients])
        self.skippable.step(scalar(divisor), flag(skip=False))

    def skipped(self, *, divisor=math.nan, bad=math.nan):
        """Skip a step as in an overflow, with a non-finite gradient and divisor."""
        gradients = [torch.ones_like(parameter) for parameter in self.parameters]
        gradients[0].view(-1)[4] = bad
        give(self.parameters, gradients)
        self.skippable.step(None if divisor is None else scalar(divisor), flag(skip=True))

    def weights(self):
        """Return a copy of the parameters."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def state(self):
        """Return a copy of the optimizer's state, by parameter and name."""
        return {
            (index, name): value.clone() if isinstance(value, torch.Tensor) else value
            for index, parameter in enumerate(self.parameters)
            for name, value in self.optimizer.state.get(parameter, {}).items()
        }


def assert_same(left, right):
    """Fail unless two lists or dicts have bitwise equal tensors and equal other values."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), list(right.values())
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
