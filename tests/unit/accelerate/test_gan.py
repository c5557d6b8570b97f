"""Two networks train in turn in an attached loop, as in torch's DCGAN tutorial."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from mfwrap import DynamicLossScaleUpdateCell, StepConfig
from mfwrap.accelerate import attach
from support.accelerate_loops import new_accelerator
from support.spoilt.training import BadElement

INF = math.inf
NUM_UPDATES = 12

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "fused SGD": lambda weights: SGD(weights, lr=0.05, momentum=0.9, fused=True),
    "SGD": lambda weights: SGD(weights, lr=0.05, momentum=0.9, fused=False),
    "foreach Adam": lambda weights: Adam(weights, lr=1e-2, betas=(0.5, 0.999), foreach=True),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


BAD = {
    "none": (set(), set()),
    # Update 0 is never bad: if it is skipped, torch's fused SGD leaves its momentum uninitialized.
    "both": ({1, 5, 6}, {1, 5, 6}),
    "in turn": ({1, 7}, {2, 9}),
}


class Nets(NamedTuple):
    """A discriminator and a generator, each with an optimizer and an element to corrupt."""

    discriminator: Any
    generator: Any
    optimizers: tuple[Any, Any]
    bad_elements: tuple[BadElement, BadElement]


def nets(optimizer: str) -> Nets:
    """Return a small discriminator and generator, each with the named optimizer."""
    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    pair = (discriminator, generator)
    return Nets(
        *pair,
        tuple(OPTIMIZERS[optimizer](net.parameters()) for net in pair),
        tuple(BadElement(net[0].weight, INF) for net in pair),
    )


def loss_of(discriminator: nn.Module, samples: Tensor, target: float) -> Tensor:
    """Return the loss of classifying samples as real (target 1) or fake (target 0)."""
    scores = discriminator(samples).squeeze(1)
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


class GanTrace(NamedTuple):
    """Results of training a GAN."""

    losses: list[tuple[float, float]]
    norms: list[tuple[Tensor, Tensor]]
    weights: list[Tensor]


def train_gan(
    trained: Nets,
    backward: Callable[[Tensor], None],
    update: Callable[[int, int], Tensor],
    *,
    by_module: bool,
    on_update: Callable[[], None] = lambda: None,
    bad: tuple[set[int], set[int]] = (set(), set()),
) -> GanTrace:
    """Train with the loop of torch's DCGAN tutorial.

    Args:
        trained: Networks and optimizers to train.
        backward: Function that runs backward on a loss.
        update: Function that clips, updates the discriminator (0) or the generator (1) and returns
            the norm. Its second argument is the number of the update.
        by_module: Zero gradients by the networks instead of by the optimizers.
        on_update: Function that is called after each of the generator's updates.
        bad: Updates of discriminator and generator whose gradient is corrupted.
    """
    discriminator, generator, optimizers, bad_elements = trained
    random = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for index in range(NUM_UPDATES):
        real, noise = (torch.randn(8, size, generator=random) for size in (4, 2))
        (discriminator if by_module else optimizers[0]).zero_grad()
        bad_elements[0].active = index in bad[0]
        real_loss = loss_of(discriminator, real + 2, 1.0)
        backward(real_loss)
        fake = generator(noise)
        fake_loss = loss_of(discriminator, fake.detach(), 0.0)
        backward(fake_loss)
        discriminator_norm = update(0, index)
        bad_elements[0].active = False
        (generator if by_module else optimizers[1]).zero_grad()
        bad_elements[1].active = index in bad[1]
        generator_loss = loss_of(discriminator, fake, 1.0)
        backward(generator_loss)
        generator_norm = update(1, index)
        losses.append(((real_loss + fake_loss).item(), generator_loss.item()))
        norms.append((discriminator_norm, generator_norm))
        on_update()
    parameters = [*discriminator.parameters(), *generator.parameters()]
    return GanTrace(losses, norms, [parameter.detach() for parameter in parameters])


def gan_plainly(optimizer: str, bad: tuple[set[int], set[int]], limit: float) -> GanTrace:
    """Train with plain torch without a loss scale, and skip corrupted updates explicitly."""
    trained = nets(optimizer)

    def update(which: int, index: int) -> Tensor:
        parameters = (trained.discriminator, trained.generator)[which].parameters()
        norm = nn.utils.clip_grad_norm_(parameters, limit)
        if index not in bad[which]:
            trained.optimizers[which].step()
        return norm

    return train_gan(trained, Tensor.backward, update, by_module=False, bad=bad)


class AttachedGan:
    """The networks of `nets`, trained in an attached loop.

    Args:
        optimizer: Name of both optimizers.
        scale_sense: Loss scale.
    """

    def __init__(self, optimizer: str, scale_sense: Any) -> None:
        self.accelerator = new_accelerator()
        config = StepConfig(max_consecutive_skips=None)
        self.step = attach(self.accelerator, config, scale_sense=scale_sense)
        trained = nets(optimizer)
        discriminator, generator, *optimizers = self.accelerator.prepare(
            trained.discriminator, trained.generator, *trained.optimizers
        )
        self.nets = Nets(discriminator, generator, tuple(optimizers), trained.bad_elements)
        self.reports: list[Any] = []
        self.skipped: list[tuple[bool, bool]] = []
        self.scales: list[float] = []
        self._limit = INF

    def train(self, *, limit: float, **settings: Any) -> GanTrace:
        """Train with `train_gan`, clipping by `limit`; `settings` are further arguments."""
        self._limit = limit
        return train_gan(
            self.nets, self.accelerator.backward, self._update, on_update=self._note, **settings
        )

    def _update(self, which: int, _: int) -> Tensor:
        parameters = (self.nets.discriminator, self.nets.generator)[which].parameters()
        norm = self.accelerator.clip_grad_norm_(parameters, self._limit)
        self.nets.optimizers[which].step()
        return norm

    def _note(self) -> None:
        self.reports.append(self.step.last_reports)
        self.skipped.append(tuple(each.step_was_skipped for each in self.nets.optimizers))
        self.scales.append(self.step.loss_scale.item())


def assert_near(expected: list[Any], actual: list[Any], *, rtol: float) -> None:
    """Check that pairs of numbers agree within a relative tolerance."""
    torch.testing.assert_close(
        torch.tensor(actual), torch.tensor(expected), rtol=rtol, atol=0, equal_nan=True
    )


SCALES = {
    "scale 1": lambda: 1.0,
    "scale 2**16": lambda: 2.0**16,
    # This scale changes at every update, so the test fails if a gradient is divided by a wrong
    # scale.
    "moving scale": lambda: DynamicLossScaleUpdateCell(2.0**10, 2, 1),
}
each_scale = pytest.mark.parametrize("make_scale", SCALES.values(), ids=SCALES)
each_zeroing = pytest.mark.parametrize(
    "by_module", [False, True], ids=["zeroed by optimizers", "zeroed by networks"]
)


@pytest.mark.fast_sample(16)
@pytest.mark.parametrize("limit", [INF, 0.1], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@each_zeroing
@each_scale
@each_optimizer
def test_a_gan_trains_as_with_plain_torch(optimizer, make_scale, by_module, bad, limit):
    """Losses, norms, weights and skips of a GAN equal those with plain torch.

    The generator's backward leaves gradients in the discriminator that no update uses.
    """
    expected = gan_plainly(optimizer, bad, limit)
    gan = AttachedGan(optimizer, make_scale())

    actual = gan.train(limit=limit, by_module=by_module, bad=bad)

    assert gan.skipped == [
        tuple(index in updates for updates in bad) for index in range(NUM_UPDATES)
    ]
    assert_near(expected.losses, actual.losses, rtol=0.0 if limit == INF else 1e-5)
    assert_near(expected.norms, actual.norms, rtol=5e-6)
    tolerance = 0.0 if limit == INF else 2e-6
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=tolerance)


@each_zeroing
@each_optimizer
def test_losses_of_a_gan_are_reported_apart(optimizer, by_module):
    """Each optimizer reports only the losses of its own network."""
    gan = AttachedGan(optimizer, 2.0**16)

    trace = gan.train(limit=INF, by_module=by_module)

    reported = [[each.output.loss.item() for each in reports] for reports in gan.reports]
    assert_near(trace.losses, reported, rtol=1e-6)


@each_zeroing
@pytest.mark.parametrize("optimizer", ["fused SGD", "SGD"])
def test_the_scale_of_a_gan_falls_for_the_overflow_of_either(optimizer, by_module):
    """Each overflowing update of either network lowers the scale once."""
    gan = AttachedGan(optimizer, DynamicLossScaleUpdateCell(2.0**20, 2, 1000))
    bad = ({1, 8}, {2, 5, 8})

    gan.train(limit=INF, by_module=by_module, bad=bad)
    # An overflow of the generator lowers the scale only when the discriminator's unused gradients
    # are zeroed. The scale stays constant in the second training, which has no overflows: all
    # overflows of the first training have been counted by then.
    gan.train(limit=INF, by_module=by_module)

    scales = gan.scales
    assert scales[0] == 2.0**20
    assert scales[-1] == 2.0**15
    assert scales == sorted(scales, reverse=True)
    assert scales[NUM_UPDATES:] == [2.0**15] * NUM_UPDATES


@each_zeroing
def test_the_scale_of_a_gan_grows_after_as_many_good_updates_as_it_should(by_module):
    """Each optimizer's applied update counts as one step towards growth of the scale."""
    gan = AttachedGan("fused SGD", DynamicLossScaleUpdateCell(2.0**10, 2, 2 * NUM_UPDATES))

    gan.train(limit=INF, by_module=by_module)
    before = gan.scales[-1]
    gan.train(limit=INF, by_module=by_module)

    assert before == 2.0**10
    assert gan.scales[NUM_UPDATES] == 2.0**11
    assert gan.scales[-1] == 2.0**11
