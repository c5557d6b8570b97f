"""Without skips, the attached loop trains like accelerate alone at any loss scale."""

import contextlib
import copy
import functools
import math

import pytest
import torch

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from mfwrap.schedules import BatchGrowth
from support.accelerate_loops import OPTIMIZERS, Loop, Trace, train, train_alone
from support.attached_runs import new_accelerator

MAX_NORM = 0.3
"""Maximum norm, below every norm of these runs, so that every update is clipped."""

LOOPS = [
    pytest.param(
        Loop(
            optimizer=optimizer,
            precision=precision,
            scale=scale,
            accumulation=accumulation,
            # 8 updates of one micro-batch, or 5 updates of four micro-batches and a last update of
            # two micro-batches.
            num_batches=8 if accumulation == 1 else 22,
        ),
        id=f"{optimizer}-{precision}-scale {scale:g}-accumulation {accumulation}",
    )
    for optimizer in OPTIMIZERS
    for precision in ("no", "bf16", "fp16")
    for scale in (1.0, 2.0**16)
    for accumulation in (1, 4)
]
each_loop = pytest.mark.parametrize("loop", LOOPS)


def alone(loop: Loop) -> Trace:
    """Return the trace of accelerate alone, which uses a loss scale only in fp16."""
    if loop.precision != "fp16":
        loop = changed(loop, scale=1.0)
    return train_alone(loop)


def changed(loop: Loop, **settings) -> Loop:
    """Return a copy of a loop with some settings changed."""
    return Loop(**{**vars(loop), **settings})


@functools.cache
def attached(loop: Loop) -> Trace:
    """Return the trace of the attached loop. It is cached: callers must not change it."""
    return train(loop, attached=True)


def assert_bitwise(expected: Trace, actual: Trace) -> None:
    """Check that losses, rates, skips, weights, averages and schedule are bitwise equal."""
    assert actual.losses == expected.losses
    assert actual.rates == expected.rates
    assert actual.skipped == expected.skipped == [False] * len(expected.rates)
    assert actual.schedule == expected.schedule
    assert_near(expected, actual, weights=0.0)


def assert_same_norms(expected: Trace, actual: Trace) -> None:
    """Check that the norms agree for equal weights.

    Both norms sum 212 float32 squares, in different orders, so they differ by a few units of 6e-8.
    """
    torch.testing.assert_close(actual.norms, expected.norms, rtol=5e-7, atol=0)


def assert_near(expected: Trace, actual: Trace, *, weights: float) -> None:
    """Check that weights and averages agree after every update.

    Args:
        expected: Results of accelerate alone.
        actual: Results of the attached loop.
        weights: Largest allowed absolute difference.
    """
    for theirs, ours in zip(expected.states, actual.states, strict=True):
        for name in expected.weights:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=weights)
    for theirs, ours in zip(expected.averages, actual.averages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=weights)


@pytest.mark.fast_sample(12)
@each_loop
def test_without_clipping_weights_are_accelerates_to_the_last_bit(loop):
    """Without clipping, a run is bitwise equal to accelerate alone at any power-of-two scale."""
    assert_bitwise(alone(loop), attached(loop))


@pytest.mark.fast_sample(12)
@each_loop
def test_a_limit_of_infinity_measures_and_changes_no_bit(loop):
    """An infinite limit returns accelerate's norms and changes no bit of the training."""
    measuring = changed(loop, max_norm=math.inf)

    assert_bitwise(alone(loop), attached(measuring))
    assert_same_norms(alone(measuring), attached(measuring))


@pytest.mark.fast_sample(12)
@each_loop
def test_clipped_training_agrees_with_accelerates(loop):
    """Losses, norms, rates, weights and averages agree with accelerate's under clipping.

    The step divides each gradient by ``scale / coefficient``, where accelerate multiplies it by the
    coefficient, and the step sums the norm in another order. Both errors together are at most 4
    units in the last place, or 5e-7 of an update. An update is at most 0.1: AdamW's first updates
    equal its rate, 0.01, and SGD's are at most 0.05 * 0.3 * 10. If the errors of all 8 updates have
    one sign, they add up to 4e-7 (measured: 6e-8). In half precision such an error can round a
    weight to another neighbor, which changes the gradients by 2**-8. No weight of these runs is
    rounded that way.
    """
    loop = changed(loop, max_norm=MAX_NORM)
    expected, actual = alone(loop), attached(loop)

    assert actual.rates == expected.rates
    assert actual.skipped == expected.skipped == [False] * len(expected.rates)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-6)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=5e-6, atol=0)
    assert_near(expected, actual, weights=4e-7)


@pytest.mark.fast_sample(12)
@each_loop
def test_these_runs_learn_clip_and_move_the_rate(loop):
    """The compared runs reduce the loss, clip every update and change the rate."""
    trace = alone(changed(loop, max_norm=MAX_NORM))

    quarter = len(trace.losses) // 4
    assert sum(trace.losses[-quarter:]) < 0.97 * sum(trace.losses[:quarter])
    assert torch.stack(trace.norms).min() > MAX_NORM
    assert len(set(trace.rates)) == len(trace.rates)
    unclipped, clipped = alone(loop).weights, trace.weights
    assert all(not torch.equal(unclipped[name], clipped[name]) for name in clipped)


@pytest.mark.filterwarnings("ignore:`optimizer.zero_grad` discards")  # as accelerate does
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_gradients_may_be_zeroed_before_forward(precision, accumulation, scale):
    """Zeroing gradients before each forward trains like accelerate alone."""
    loop = Loop(
        precision=precision,
        accumulation=accumulation,
        scale=scale,
        num_batches=8,
        zero_grad_first=True,
        max_norm=math.inf,
    )

    assert_bitwise(alone(loop), attached(loop))
    assert_same_norms(alone(loop), attached(loop))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_question_need_be_asked(optimizer):
    """A loop that never asks whether updates were skipped trains like accelerate alone."""
    loop = Loop(optimizer=optimizer, num_batches=8)

    assert_bitwise(alone(loop), train(loop, attached=True, asks=False))


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_reports_say_what_the_loop_saw(precision, accumulation, scale):
    """Reports contain the mean loss, norm, rate and loss scale of each update."""
    loop = Loop(
        precision=precision, accumulation=accumulation, scale=scale, num_batches=10, max_norm=0.3
    )
    expected = alone(loop)
    windows = [
        expected.losses[start : start + accumulation] for start in range(0, 10, accumulation)
    ]

    trace = attached(loop)

    outputs = [report.output for report in trace.reports]
    losses = [sum(window) / len(window) for window in windows]
    assert [output.loss.item() for output in outputs] == pytest.approx(losses, rel=1e-6)
    assert [output.global_norm for output in outputs] == trace.norms
    rates = [output.learning_rate.item() for output in outputs]
    assert rates == pytest.approx(expected.rates, rel=1e-7)
    assert [output.loss_scale.item() for output in outputs] == [scale] * len(windows)
    assert [report.applied_updates.item() for report in trace.reports] == list(
        range(1, len(windows) + 1)
    )
    assert not any(output.overflow for output in outputs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_everything_switched_on_changes_no_bit(optimizer):
    """Local norms and the check for norm spikes change no bit of the training."""
    loop = Loop(optimizer=optimizer, precision="bf16", scale=2.0**16, num_batches=8)
    config = StepConfig(
        local_norm=True,
        use_clip_grad=True,
        max_grad_norm=math.inf,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=100.0,
    )

    assert_bitwise(alone(loop), train(loop, attached=True, config=config))


def test_local_norms_add_up_to_the_norm_that_clipping_returns():
    """The norm of the reported local norms is the norm that clipping returns."""
    loop = Loop(scale=2.0**16, max_norm=MAX_NORM, accumulation=4, num_batches=8)

    trace = train(loop, attached=True, config=StepConfig(local_norm=True))

    for report, norm in zip(trace.reports, trace.norms, strict=True):
        torch.testing.assert_close(report.output.local_norm.norm(), norm, rtol=1e-6, atol=0)
        assert report.output.size.tolist() == [8 * 16, 16, 16 * 4, 4]
        assert report.local_norm_names == (
            "layers.0.weight",
            "layers.0.bias",
            "layers.2.weight",
            "layers.2.bias",
        )


@pytest.mark.parametrize("accumulates", [True, False], ids=["accumulate", "no_sync"])
def test_a_batch_that_grows_is_a_loop_by_hand(accumulates):
    """Each update has another number of micro-batches; losses and weights are those of torch."""
    growth, rows = BatchGrowth([2, 2, 20], 8), torch.randn(64, 4)
    numbers = [growth.size(update) // 2 for update in range(9)]
    network = torch.nn.Linear(4, 1)
    expected, ours = copy.deepcopy(network), network
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1, fused=True)
    accelerator = new_accelerator()
    attached = attach(accelerator, StepConfig())
    model, optimizer = accelerator.prepare(
        ours, torch.optim.AdamW(ours.parameters(), lr=0.1, fused=True)
    )
    own, others = iter(rows.split(2)), iter(rows.split(2))
    for number in numbers:
        losses = [expected(next(others)).square().mean() for _ in range(number)]
        for loss in losses:
            (loss / number).backward()
        plain.step()
        plain.zero_grad()
        if accumulates:
            accelerator.gradient_accumulation_steps, accelerator.step = number, 0
        for index in range(number):
            waits = accelerator.accumulate(model)
            if not accumulates:
                is_last = index == number - 1
                waits = contextlib.nullcontext() if is_last else accelerator.no_sync(model)
            with waits:
                loss = model(next(own)).square().mean()
                accelerator.backward(loss if accumulates else loss / number)
                if accumulates:
                    optimizer.step()
                    optimizer.zero_grad()
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(attached.last_output.loss, torch.stack(losses).mean().detach())

    assert set(numbers) == {1, 2, 3, 4}
    assert int(attached.last_report.applied_updates) == len(numbers)
    for one, other in zip(ours.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
