"""Train accelerate loops that clip their gradients in many different ways."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from support.accelerate_loops import OPTIMIZERS, new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.spoilt.training import BadElement

__all__ = [
    "LIMIT",
    "NOT_CLIPPING",
    "ONE_CALL",
    "WAYS",
    "Clip",
    "ClippedTraining",
    "Outcome",
    "Setting",
    "assert_agree",
    "calls",
    "clipped_alone",
    "doubled",
    "norm_of",
    "unscale",
    "value",
]

INF = math.inf
NUM_UPDATES = 3
LIMIT = 0.2
"""A limit below every gradient norm of these runs, including the norm of each single layer."""


class Setting(NamedTuple):
    """Precision, loss scale and accumulation; plain accelerate scales the loss in fp16 only."""

    precision: str = "no"
    scale: float = 1.0
    accumulation: int = 1


class Outcome(NamedTuple):
    """The results of a training with clipping."""

    returned: list[Any]
    """Return values of the clipping calls."""

    weights: list[Tensor]
    """Weights after the last update."""

    skipped: list[bool]
    """Whether each update was skipped."""

    reports: list[Any]
    """Reports of the attached step; ``None`` without it."""


class ClippedTraining:
    """Train a network with accelerate and clip its gradients.

    Args:
        optimizer: Name of the optimizer in `OPTIMIZERS`.
        setting: Precision, loss scale and accumulation.
        attached: Whether to attach mfwrap's step to the accelerator.
        config: Settings of the attached step.
        select: Function from the network to the parameters, or groups, that the optimizer gets.
    """

    def __init__(
        self,
        optimizer: str,
        setting: Setting,
        *,
        attached: bool,
        config: StepConfig | None = None,
        select: Callable[[nn.Module], Any] = nn.Module.parameters,
    ) -> None:
        self.accelerator = new_accelerator(
            setting.precision,
            scale=setting.scale,
            gradient_accumulation_steps=setting.accumulation,
        )
        self.step = None
        if attached:
            scale = None if setting.precision == "fp16" else setting.scale
            self.step = attach(self.accelerator, config, scale_sense=scale)
        torch.manual_seed(0)
        network = Classifier()
        self.bad_element = BadElement(network.layers[0].weight, INF)
        inner = OPTIMIZERS[optimizer](select(network))
        self.network, self.optimizer = self.accelerator.prepare(network, inner)

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients of the network that are not None."""
        return [p.grad for p in self.network.parameters() if p.grad is not None]

    def backward(self, batch: tuple[Tensor, Tensor]) -> None:
        """Run the forward and backward of one micro-batch."""
        self.accelerator.backward(self.network(*batch))

    def update(
        self, clip: "Clip", micro_batches: list[tuple[Tensor, Tensor]], *, each_micro_batch: bool
    ) -> list[Any]:
        """Run one update, and return the results of all calls of `clip`.

        Args:
            clip: Function that clips the gradients.
            micro_batches: All micro-batches of the update.
            each_micro_batch: Whether to clip after every backward instead of only the last.
        """
        returned = []
        for batch in micro_batches:
            with self.accelerator.accumulate(self.network):
                self.backward(batch)
                if each_micro_batch or self.accelerator.sync_gradients:
                    returned.append(clip(self))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return returned

    def run_by_hand(self, clip: "Clip") -> Outcome:
        """Accumulate two backwards per update without ``accumulate``; clip after each backward."""
        returned, skipped = [], []
        for index, batch in enumerate(labelled_batches(2 * NUM_UPDATES)):
            self.backward(batch)
            returned.append(clip(self))
            if index % 2 == 1:
                self.optimizer.step()
                self.optimizer.zero_grad()
                skipped.append(self.accelerator.optimizer_step_was_skipped)
        weights = [weight.detach() for weight in self.network.parameters()]
        return Outcome(returned, weights, skipped, [])

    def run(self, clip: "Clip", *, each_micro_batch: bool = False) -> Outcome:
        """Run `NUM_UPDATES` updates; see `update` for the arguments."""
        returned, skipped, reports = [], [], []
        size = self.accelerator.gradient_accumulation_steps
        batches = labelled_batches(NUM_UPDATES * size)
        for start in range(0, len(batches), size):
            window = batches[start : start + size]
            returned += self.update(clip, window, each_micro_batch=each_micro_batch)
            skipped.append(self.accelerator.optimizer_step_was_skipped)
            reports.append(None if self.step is None else self.step.last_report)
        weights = [weight.detach() for weight in self.network.parameters()]
        return Outcome(returned, weights, skipped, reports)


Clip = Callable[[ClippedTraining], Any]
"""A function that a loop calls between backward and step, usually to clip gradients."""


def norm_of(*layers: int, limit: float = LIMIT, norm_type: float = 2.0) -> Clip:
    """Return a function that clips the given layers, or the whole network, by norm."""

    def clip(training: ClippedTraining) -> Tensor:
        modules = [training.network.layers[index] for index in layers] or [training.network]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return training.accelerator.clip_grad_norm_(parameters, limit, norm_type=norm_type)

    return clip


def value(training: ClippedTraining, *, limit: float = 0.02) -> None:
    """Clip the whole network by value."""
    training.accelerator.clip_grad_value_(training.network.parameters(), limit)


def unscale(training: ClippedTraining) -> None:
    """Unscale all gradients."""
    training.accelerator.unscale_gradients()


def doubled(training: ClippedTraining) -> None:
    """Double all gradients in place: an example of a loop that changes gradients by hand."""
    for gradient in training.gradients:
        gradient.mul_(2)


def calls(*several: Clip) -> Clip:
    """Return a function that calls the given functions in order."""
    return lambda training: [call(training) for call in several]


NOT_CLIPPING: dict[str, Clip] = {
    "nothing": lambda t: t.accelerator.clip_grad_norm_([], LIMIT),
    "unscaled only": unscale,
    "unscaled by name": lambda t: t.accelerator.unscale_gradients(t.optimizer),
    "unscaled in a list": lambda t: t.accelerator.unscale_gradients([t.optimizer]),
    "unscaled, then changed": calls(unscale, doubled),
}

ONE_CALL: dict[str, Clip] = {
    **NOT_CLIPPING,
    "whole": norm_of(),
    "whole, as a generator": lambda t: t.accelerator.clip_grad_norm_(
        (p for p in t.network.parameters()), LIMIT
    ),
    "one weight": lambda t: t.accelerator.clip_grad_norm_([t.network.layers[0].weight], LIMIT),
    "a part": norm_of(0),
    "below the limit": norm_of(limit=100.0),
    "max_norm of infinity": norm_of(limit=INF),
    "max_norm of 0": norm_of(limit=0.0),
    "largest element": norm_of(limit=0.02, norm_type=INF),
    "largest element as a str": norm_of(limit=0.02, norm_type="inf"),
    "largest element of a part": norm_of(2, limit=0.02, norm_type=INF),
    "sum of magnitudes": norm_of(norm_type=1.0),
    "L3 norm": norm_of(norm_type=3),
    "value": value,
    "value of a part": lambda t: t.accelerator.clip_grad_value_(
        t.network.layers[2].parameters(), 0.02
    ),
    "value of one tensor": lambda t: t.accelerator.clip_grad_value_(
        t.network.layers[0].weight, 0.02
    ),
}
"""Ways to clip that work with plain accelerate in fp16 too.

They unscale at most once per update; accelerate's scaler raises an error at the second time.
"""

WAYS: dict[str, Clip] = {
    **ONE_CALL,
    "twice": calls(norm_of(), norm_of(limit=0.1)),
    "twice, the first limit wins": calls(norm_of(limit=0.1), norm_of()),
    "part by part": calls(norm_of(0), norm_of(2, limit=0.1)),
    "whole, then a part": calls(norm_of(), norm_of(2, limit=0.05)),
    "a part, then whole": calls(norm_of(0, limit=0.1), norm_of()),
    "unscaled, then whole": calls(unscale, norm_of()),
    "unscaled, then a part": calls(unscale, norm_of(2)),
    "unscaled, then whole, then changed": calls(unscale, norm_of(), doubled),
    "unscaled, then changed, then whole": calls(unscale, doubled, norm_of()),
    "whole, then unscaled": calls(norm_of(), unscale),
    "whole, then unscaled, then changed": calls(norm_of(), unscale, doubled),
    "value, then whole": calls(value, norm_of()),
    "whole, then value": calls(norm_of(), value),
    "largest element, then whole": calls(norm_of(limit=0.02, norm_type=INF), norm_of()),
    "whole, then largest element": calls(norm_of(), norm_of(limit=0.01, norm_type=INF)),
    "measured, then whole": calls(norm_of(limit=INF), norm_of()),
}


@functools.cache
def clipped_alone(
    clip: Clip, optimizer: str, setting: Setting | None = None, **settings: bool
) -> Outcome:
    """Return the outcome of clipping with plain accelerate; it is cached, so do not modify it."""
    setting = setting or Setting()
    if setting.precision != "fp16":
        setting = setting._replace(scale=1.0)
    return ClippedTraining(optimizer, setting, attached=False).run(clip, **settings)


def assert_agree(expected: Outcome, actual: Outcome) -> None:
    """Assert that skips are equal, and that norms and weights agree up to rounding.

    mfwrap multiplies and sums in another order than accelerate, so results differ by a few float32
    rounding errors of 6e-8, relative to their size. Norms are compared with a relative tolerance.
    Weights are below 1 and updates below 0.1, so weights are compared with an absolute tolerance.
    """
    assert actual.skipped == expected.skipped
    norms = [torch.utils._pytree.tree_leaves(o.returned) for o in (actual, expected)]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=2e-7)
