"""An attached loop supports several optimizers, and parameters that are added or frozen later."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import attach
from support.accelerate_loops import DECAY, OPTIMIZERS, inverse, new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.spoilt.training import BadElement

NAN = math.nan
NUM_UPDATES = 6

each_scale = pytest.mark.parametrize("scale", [1.0, 2.0**16], ids=["scale 1", "scale 2**16"])
each_precision = pytest.mark.parametrize("precision", ["no", "bf16"])


def average(network: nn.Module) -> ExponentialMovingAverage:
    """Return an average of a network."""
    return ExponentialMovingAverage(network, DECAY)


class Pair(NamedTuple):
    """Results of training one network with two optimizers."""

    norms: list[Tensor]
    rates: list[tuple[float, float]]
    skipped: list[list[bool]]
    weights: list[Tensor]
    averages: list[Tensor]
    step: Any


def train_pair(
    precision: str,
    scale: float | None,
    *,
    optimizers: tuple[str, str] = ("fused AdamW", "SGD"),
    accumulation: int = 1,
    limit: float | None = None,
    bad_updates: tuple[int, ...] = (),
    zero_each_at_once: bool = False,
) -> Pair:
    """Train the first layer with one optimizer and the second layer with another.

    Args:
        precision: accelerate's ``mixed_precision``.
        scale: Loss scale of the attached step; ``None`` for accelerate alone.
        optimizers: Names of the two optimizers.
        accumulation: Number of micro-batches in an update.
        limit: Maximum norm of the whole network's gradients; ``None`` for no clipping.
        bad_updates: Updates whose gradient of the first layer contains a NaN.
        zero_each_at_once: Zero each optimizer's gradients right after its step.
    """
    accelerator = new_accelerator(precision, gradient_accumulation_steps=accumulation)
    step = None if scale is None else attach(accelerator, None, average, scale_sense=scale)
    torch.manual_seed(0)
    network = Classifier()
    bad_element = BadElement(network.layers[0].weight, NAN)
    averages = [weight.detach().clone() for weight in network.parameters()]
    first = OPTIMIZERS[optimizers[0]](network.layers[0].parameters())
    second = OPTIMIZERS[optimizers[1]](network.layers[2].parameters())
    network, first, second, *schedules = accelerator.prepare(
        network, first, second, LambdaLR(first, inverse), StepLR(second, 2)
    )
    norms, rates, skipped = [], [], []
    for index, batch in enumerate(labelled_batches(NUM_UPDATES * accumulation)):
        with accelerator.accumulate(network):
            bad_element.active = index // accumulation in bad_updates
            accelerator.backward(network(*batch))
            if accelerator.sync_gradients and limit is not None:
                norms.append(accelerator.clip_grad_norm_(network.parameters(), limit))
            for optimizer in (first, second):
                optimizer.step()
                if zero_each_at_once:
                    optimizer.zero_grad()
            used = tuple(optimizer.param_groups[0]["lr"] for optimizer in (first, second))
            for schedule in schedules:
                schedule.step()
            for optimizer in (first, second):
                optimizer.zero_grad()
        if accelerator.sync_gradients:
            rates.append(used)
            skipped.append([first.step_was_skipped, second.step_was_skipped])
            weights = [weight.detach() for weight in network.parameters()]
            get_ema_multi_avg_fn(DECAY)(averages, weights, 1)
    if step is not None:
        averages = [tensor for _, tensor in step.ema.named_averages()]
    return Pair(norms, rates, skipped, weights, averages, step)


@pytest.mark.fast_sample(12)
@pytest.mark.parametrize("zero_each_at_once", [False, True], ids=["zeroed later", "zeroed at once"])
@pytest.mark.parametrize(
    "optimizers",
    [("fused AdamW", "SGD"), ("SGD", "fused SGD"), ("foreach AdamW", "Adafactor")],
    ids=", ".join,
)
@pytest.mark.parametrize("accumulation", [1, 4])
@each_precision
@each_scale
def test_two_optimizers_of_one_network_train_as_alone(
    scale, precision, accumulation, optimizers, zero_each_at_once
):
    """Two optimizers give rates, weights and averages bitwise equal to accelerate alone."""
    settings = {"optimizers": optimizers, "accumulation": accumulation}
    expected = train_pair(precision, None, **settings)

    actual = train_pair(precision, scale, zero_each_at_once=zero_each_at_once, **settings)

    assert actual.rates == expected.rates
    assert actual.skipped == expected.skipped == [[False, False]] * NUM_UPDATES
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=0)
    torch.testing.assert_close(actual.averages, expected.averages, rtol=0, atol=0)


@pytest.mark.parametrize("limit", [0.2, math.inf])
@each_precision
@each_scale
def test_two_optimizers_are_clipped_by_one_norm(scale, precision, limit):
    """Both optimizers clip by the norm of the whole network, and report this norm."""
    expected = train_pair(precision, None, limit=limit)

    actual = train_pair(precision, scale, limit=limit)

    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=2e-7)
    reports = actual.step.last_reports
    assert [report.output.global_norm for report in reports] == [actual.norms[-1]] * 2


@each_scale
def test_without_clipping_each_optimizer_skips_for_itself(scale):
    """One optimizer and its schedule skip an update while the other optimizer applies one."""
    actual = train_pair("no", scale, bad_updates=(1, 4))

    bad = [index in {1, 4} for index in range(NUM_UPDATES)]
    assert actual.skipped == [[is_bad, False] for is_bad in bad]
    first = [rates[0] / actual.rates[0][0] for rates in actual.rates]
    assert first == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3, 1 / 4, 1 / 4])
    second = [rates[1] / actual.rates[0][1] for rates in actual.rates]
    assert second == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert all(weight.isfinite().all() for weight in [*actual.weights, *actual.averages])


@each_scale
def test_a_norm_of_both_that_is_not_finite_skips_both(scale):
    """Both optimizers skip if their common norm is not finite."""
    actual = train_pair("no", scale, limit=0.2, bad_updates=(1,))

    assert actual.skipped == [[index == 1] * 2 for index in range(NUM_UPDATES)]
    assert [norm.isfinite().item() for norm in actual.norms] == [i != 1 for i in range(6)]
    assert all(weight.isfinite().all() for weight in [*actual.weights, *actual.averages])


def train_with_changes(change, scale: float | None, optimizer: str, **settings: Any):
    """Train a network and call `change` before each update.

    Args:
        change: Function that is called with update number, network and optimizer.
        scale: Loss scale of the attached step; ``None`` for accelerate alone.
        optimizer: Name of the optimizer, which at first holds only the second layer.
        settings: `outside`: also train a parameter outside the network; `prepares_network`: whether
            the network is prepared; `config`: settings of the attached step.

    Returns:
        Weights, and the reports of all updates.
    """
    accelerator = new_accelerator()
    step = None
    if scale is not None:
        step = attach(accelerator, settings.get("config"), scale_sense=scale)
    torch.manual_seed(0)
    network = Classifier()
    outside = nn.Parameter(torch.full((3,), 0.1))
    held = [*network.layers[2].parameters()]
    if settings.get("outside"):
        held.append(outside)
    prepared = OPTIMIZERS[optimizer](held)
    if settings.get("prepares_network", True):
        network, prepared = accelerator.prepare(network, prepared)
    else:
        prepared = accelerator.prepare(prepared)
    reports = []
    for index, batch in enumerate(labelled_batches(NUM_UPDATES)):
        change(index, network, prepared)
        accelerator.backward(network(*batch, loss_factor=outside.sum().exp()))
        prepared.step()
        network.zero_grad()
        prepared.zero_grad()
        outside.grad = None
        reports.append(None if step is None else step.last_report)
    return [*(w.detach() for w in network.parameters()), outside.detach()], reports


def assert_trained_alike(expected, actual) -> None:
    """Check that all weights are bitwise equal."""
    for theirs, ours in zip(expected, actual, strict=True):
        assert torch.equal(ours, theirs)


def add_first_layer(index: int, network: nn.Module, optimizer: Any) -> None:
    """Add the first layer to the optimizer at the third update."""
    if index == 2:
        parameters = list(network.layers[0].parameters())
        optimizer.add_param_group({"params": parameters, "lr": 0.02})


def freeze_and_thaw(index: int, network: nn.Module, optimizer: Any) -> None:
    """Freeze a weight at the third and fourth update."""
    network.layers[2].weight.requires_grad_(index not in {2, 3})


def leave_alone(index: int, network: nn.Module, optimizer: Any) -> None:
    """Change nothing."""


each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@each_optimizer
@each_scale
def test_parameters_may_be_added_to_a_prepared_optimizer(scale, optimizer):
    """Added parameters are trained at their own rate and appear in the reports."""
    config = StepConfig(local_norm=True)
    expected, _ = train_with_changes(add_first_layer, None, optimizer)

    actual, reports = train_with_changes(add_first_layer, scale, optimizer, config=config)

    assert_trained_alike(expected, actual)
    assert not torch.equal(actual[0], Classifier().layers[0].weight)
    assert [len(report.learning_rates) for report in reports] == [1, 1, 2, 2, 2, 2]
    assert [len(report.local_norm_names) for report in reports] == [2, 2, 4, 4, 4, 4]
    assert [report.applied_updates.item() for report in reports] == [1, 2, 3, 4, 5, 6]


@each_optimizer
@each_scale
def test_parameters_may_be_frozen_for_a_while(scale, optimizer):
    """Freezing parameters has the same effect as with accelerate alone; reports omit them."""
    config = StepConfig(local_norm=True)
    expected, _ = train_with_changes(freeze_and_thaw, None, optimizer)

    actual, reports = train_with_changes(freeze_and_thaw, scale, optimizer, config=config)

    assert_trained_alike(expected, actual)
    both = ("layers.2.weight", "layers.2.bias")
    names = [report.local_norm_names for report in reports]
    assert names == [both, both, both[1:], both[1:], both, both]


@pytest.mark.parametrize("prepares_network", [True, False])
@each_optimizer
@each_scale
def test_parameters_outside_of_any_prepared_network_are_trained(scale, optimizer, prepares_network):
    """Parameters outside a prepared network are updated and are reported by number."""
    settings = {"outside": True, "prepares_network": prepares_network}
    expected, _ = train_with_changes(leave_alone, None, optimizer, **settings)

    actual, reports = train_with_changes(
        leave_alone, scale, optimizer, config=StepConfig(local_norm=True), **settings
    )

    assert_trained_alike(expected, actual)
    assert not torch.equal(actual[-1], torch.full((3,), 0.1))
    inside = ("layers.2.weight", "layers.2.bias") if prepares_network else ()
    names = reports[-1].local_norm_names
    assert names == (*inside, *(f"outside.{index}" for index in range(3 - len(inside))))


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("limit", [None, 0.2], ids=["not clipped", "clipped"])
@each_precision
@each_scale
def test_a_compiled_network_trains_as_alone(scale, precision, limit, backend):
    """A compiled network trains as with accelerate alone and reports plain parameter names."""

    def train(scale: float | None):
        torch.compiler.reset()
        accelerator = new_accelerator(precision, dynamo_backend=backend)
        step = None
        if scale is not None:
            step = attach(accelerator, StepConfig(local_norm=True), average, scale_sense=scale)
        torch.manual_seed(0)
        network = Classifier()
        network, optimizer = accelerator.prepare(
            network, OPTIMIZERS["fused SGD"](network.parameters())
        )
        norms = []
        for batch in labelled_batches(4):
            accelerator.backward(network(*batch))
            if limit is not None:
                norms.append(accelerator.clip_grad_norm_(network.parameters(), limit))
            optimizer.step()
            optimizer.zero_grad()
        return norms, [weight.detach() for weight in network.parameters()], step

    norms, weights, _ = train(None)
    actual_norms, actual_weights, step = train(scale)

    tolerance = 0.0 if limit is None else 2e-7
    torch.testing.assert_close(actual_norms, norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual_weights, weights, rtol=0, atol=tolerance)
    assert step.local_norm_names == tuple(name for name, _ in Classifier().named_parameters())
    assert step.ema is not None


def test_reports_and_checkpoints_have_the_order_of_prepare():
    """Optimizers are numbered in the order in which they were prepared, whatever their models."""
    accelerator = new_accelerator()
    step = attach(accelerator)
    networks = [nn.Linear(1, 1), nn.Linear(1, 1)]
    first, second = (SGD(network.parameters(), lr=0.1) for network in networks)
    # The first optimizer is added to the step after the second one, because its model is prepared
    # last.
    first = accelerator.prepare(first)
    second, _ = accelerator.prepare(second, networks[1])
    accelerator.prepare(networks[0])
    accelerator.backward(networks[0](torch.ones(1, 1)).sum())
    first.step()

    assert [report is not None for report in step.last_reports] == [True, False]
    updates = step.attachment.step.state_dict()["updates"]
    assert [updates[number]["applied_updates"].item() for number in ("0", "1")] == [1, 0]


def test_a_replaced_parameter_is_an_error_or_a_warning():
    """A parameter replaced after `prepare` is an error in the next update, a warning at a save."""
    accelerator = new_accelerator()
    step = attach(accelerator)
    network = nn.Linear(1, 1)
    network, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=0.1))
    step.attachment.build(final=True)
    network.bias = nn.Parameter(torch.zeros(1))
    accelerator.backward(network(torch.ones(1, 1)).sum())

    with pytest.raises(RuntimeError, match=r"no longer in the network: \['bias'\]"):
        optimizer.step()
    with pytest.warns(UserWarning, match="no longer in the network"):
        step.attachment.step.state_dict()
