"""Where nothing is skipped, the attached loop trains as accelerate alone does, at any scale."""

import functools
import math

import pytest
import torch

from mfwrap import StepConfig
from support.accelerate_loops import OPTIMIZERS, Loop, Trace, train, train_alone

MAX_NORM = 0.3
"""Below every norm of these runs, so that every update is clipped."""

LOOPS = [
    pytest.param(
        Loop(
            optimizer=optimizer,
            precision=precision,
            scale=scale,
            accumulation=accumulation,
            # The last window is shorter: 8 updates of 1, or 5 of 4 and one of 2.
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
    """Return the trace of accelerate alone, which in fp16 only has a loss scale."""
    if loop.precision != "fp16":
        loop = changed(loop, scale=1.0)
    return train_alone(loop)


def changed(loop: Loop, **settings) -> Loop:
    """Return a loop with other settings."""
    return Loop(**{**vars(loop), **settings})


@functools.cache
def attached(loop: Loop) -> Trace:
    """Return the trace of the attached loop, which is not to be changed."""
    return train(loop, attached=True)


def assert_bitwise(expected: Trace, actual: Trace) -> None:
    """Fail unless losses, rates, skips, weights, averages and schedule agree to the last bit."""
    assert actual.losses == expected.losses
    assert actual.rates == expected.rates
    assert actual.skipped == expected.skipped == [False] * len(expected.rates)
    assert actual.schedule == expected.schedule
    assert_near(expected, actual, weights=0.0)


def assert_same_norms(expected: Trace, actual: Trace) -> None:
    """Fail unless the same weights gave the same norms.

    A norm adds 212 squares up, in float32, in two orders: a few units of 6e-8.
    """
    torch.testing.assert_close(actual.norms, expected.norms, rtol=5e-7, atol=0)


def assert_near(expected: Trace, actual: Trace, *, weights: float) -> None:
    """Fail unless weights and averages agree after every update.

    Args:
        expected: Of accelerate alone.
        actual: Of the attached loop.
        weights: Largest difference.
    """
    for theirs, ours in zip(expected.states, actual.states, strict=True):
        for name in expected.weights:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=weights)
    for theirs, ours in zip(expected.averages, actual.averages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=weights)


@pytest.mark.fast_sample(12)
@each_loop
def test_without_clipping_weights_are_accelerates_to_the_last_bit(loop):
    """A power of two goes into the gradients and out of them without rounding."""
    assert_bitwise(alone(loop), attached(loop))


@pytest.mark.fast_sample(12)
@each_loop
def test_a_limit_of_infinity_measures_and_changes_no_bit(loop):
    """Norms are accelerate's, of unscaled gradients, and the weights those without clipping."""
    measuring = changed(loop, max_norm=math.inf)

    assert_bitwise(alone(loop), attached(measuring))
    assert_same_norms(alone(measuring), attached(measuring))


@pytest.mark.fast_sample(12)
@each_loop
def test_clipped_training_agrees_with_accelerates(loop):
    """Losses, norms, rates, weights and averages are accelerate's, clipping included.

    The step divides each gradient by ``scale / coefficient``, where accelerate multiplies it by the
    coefficient, and takes the norm in another order: together at most 4 units in the last place,
    5e-7 of an update, and no update is above 0.1 (AdamW's first are its rate, 0.01; SGD's are
    0.05 * 0.3 * 10 at most). Over 8 updates that is 4e-7, if all errors have one sign. (Seen:
    6e-8.) In half precision a weight that differs by that may round to the other side, and then
    moves the gradients by 2**-8; these runs come by no such weight.
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
    """The comparisons above compare something."""
    trace = alone(changed(loop, max_norm=MAX_NORM))

    quarter = len(trace.losses) // 4
    assert sum(trace.losses[-quarter:]) < 0.97 * sum(trace.losses[:quarter])
    assert torch.stack(trace.norms).min() > MAX_NORM
    assert len(set(trace.rates)) == len(trace.rates)
    unclipped, clipped = alone(loop).weights, trace.weights
    assert all(not torch.equal(unclipped[name], clipped[name]) for name in clipped)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_gradients_may_be_zeroed_before_forward(precision, accumulation, scale):
    """That order of calls means what it means to accelerate: the last micro-batch alone counts."""
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
    """A loop that does not ask whether updates were skipped trains in the same way."""
    loop = Loop(optimizer=optimizer, num_batches=8)

    assert_bitwise(alone(loop), train(loop, attached=True, asks=False))


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_reports_say_what_the_loop_saw(precision, accumulation, scale):
    """The loss is the mean over an update's micro-batches, also where an epoch ends early.

    Norm and rate are what clipping returned and the optimizer used.
    """
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
    """Local norms, and the check for spikes of the norm, only look."""
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
    """They are unscaled, and from the same read."""
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
