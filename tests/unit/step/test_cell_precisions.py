"""Training in half precision, with autocast or half-precision weights."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch.optim import SGD, AdamW

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from support.small_networks import Classifier, LinearProbe, labelled_batches
from support.training_runs import (
    DECAY,
    NUM_STEPS,
    OPTIMIZERS,
    Trace,
    train_plainly,
    train_with_cell,
)

FUSED_ADAMW = OPTIMIZERS["fused AdamW"]


def assert_bitwise(expected: Trace, actual: Trace) -> None:
    """Fail unless losses and weights are the same to the last bit."""
    assert torch.equal(actual.losses, expected.losses)
    for ours, theirs in zip(actual.weights, expected.weights, strict=True):
        assert torch.equal(ours, theirs)


def test_bf16_autocast_around_the_call_is_plain_torchs():
    """Training in bfloat16 autocast equals plain torch bitwise."""
    network, batches = Classifier(), labelled_batches(NUM_STEPS)
    settings = {"max_norm": None, "autocast": torch.bfloat16}

    expected = train_plainly(network, FUSED_ADAMW, batches, **settings)
    actual = train_with_cell(network, FUSED_ADAMW, batches, scale=1.0, **settings)

    assert_bitwise(expected, actual)
    assert actual.weights[0].dtype == torch.float32


def test_clipping_inside_autocast_is_done_in_float32():
    """Norm and clipped update are computed in float32 inside autocast."""
    network, batches = Classifier(), labelled_batches(NUM_STEPS)
    settings = {"max_norm": 0.5, "autocast": torch.bfloat16}

    expected = train_plainly(network, OPTIMIZERS["fused SGD"], batches[:1], **settings)
    actual = train_with_cell(
        network, OPTIMIZERS["fused SGD"], batches[:1], scale=2.0**16, **settings
    )

    # Computed in bfloat16, norms and weights would be wrong by up to 4e-3.
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=1e-7)


def test_bf16_by_accelerate_is_accelerates_own_loop():
    """Training a prepared model in bfloat16 equals a loop with ``accelerator.backward`` bitwise."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    network, batches = Classifier(), labelled_batches(NUM_STEPS)
    reference = copy.deepcopy(network)
    network, optimizer = accelerator.prepare(network, FUSED_ADAMW(network.parameters()))
    reference, plain = accelerator.prepare(reference, FUSED_ADAMW(reference.parameters()))
    cell = MFTrainOneStepCell(network, optimizer, scale_sense=2.0**16, accelerator=accelerator)

    for batch in batches:
        output = cell(*batch)
        loss = reference(*batch)
        accelerator.backward(loss)
        plain.step()
        plain.zero_grad()
        assert torch.equal(output.loss, loss.detach().float())

    for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["not clipped", "clipped"])
def test_fp16_autocast_is_torchs_grad_scaler(max_norm):
    """With a fixed scale, fp16 training equals a plain loop with torch's GradScaler."""
    network, batches = Classifier(), labelled_batches(NUM_STEPS)
    reference = copy.deepcopy(network)
    optimizer = FUSED_ADAMW(network.parameters())
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=max_norm is not None,
        max_grad_norm=max_norm or 1.0,
        scale_sense=2.0**10,
    )
    plain = FUSED_ADAMW(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    for inputs, labels in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            cell(inputs, labels)
            loss = reference(inputs, labels)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(plain)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()

    assert cell.last_report.applied_updates.item() == NUM_STEPS
    # Clipped weights differ by float32 rounding. Where this changes a float16 rounding in the
    # forward pass, gradients differ by 5e-4 relative. Over 30 updates at a rate of 3e-3, weights
    # differ by at most 30 * 3e-3 * 5e-4 = 4.5e-5.
    tolerance = 0 if max_norm is None else 4.5e-5
    for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_bf16_weights_are_plain_torchs():
    """Training with bfloat16 weights equals plain torch bitwise at any loss scale."""
    network = Classifier().bfloat16()
    batches = [(inputs.bfloat16(), labels) for inputs, labels in labelled_batches(NUM_STEPS)]

    expected = train_plainly(network, FUSED_ADAMW, batches, max_norm=None)
    actual = train_with_cell(network, FUSED_ADAMW, batches, max_norm=None, scale=2.0**16)

    assert_bitwise(expected, actual)
    assert actual.weights[0].dtype == torch.bfloat16


def test_the_average_of_bf16_weights_is_in_float32():
    """The average of bfloat16 weights agrees with their average in float64."""
    network = Classifier().bfloat16()
    optimizer = AdamW(network.parameters(), lr=1e-2, fused=True)
    ema = ExponentialMovingAverage(network, decay=DECAY)
    cell = MFTrainOneStepCell(network, optimizer, ema=ema)
    expected = [weight.detach().double() for weight in network.parameters()]

    for inputs, labels in labelled_batches(NUM_STEPS):
        cell(inputs.bfloat16(), labels)
        for average, weight in zip(expected, network.parameters(), strict=True):
            average.lerp_(weight.detach().double(), 1 - DECAY)

    for (_, average), reference in zip(ema.named_averages(), expected, strict=True):
        assert average.dtype == torch.float32
        # The tolerance is the float32 rounding of 30 lerps of numbers below 1.
        torch.testing.assert_close(average.double(), reference, rtol=0, atol=30 * 6e-8)


def test_scaling_saves_gradients_that_float16_cannot_hold():
    """Scaled float16 gradients of a tiny loss have the norm of float32 gradients."""
    network, [(inputs, labels)] = Classifier(), labelled_batches(1)
    tiny = torch.full((), 2.0**-20)
    (network(inputs, labels) * tiny).backward()
    expected = torch.nn.utils.get_total_norm([weight.grad for weight in network.parameters()])
    half = copy.deepcopy(network).half()

    def norm_at(scale: float) -> torch.Tensor:
        cell = MFTrainOneStepCell(
            half, SGD(half.parameters(), lr=0.0), use_clip_grad=True, scale_sense=scale
        )
        return cell(inputs.half(), labels, tiny.half()).global_norm

    torch.testing.assert_close(norm_at(2.0**15), expected, rtol=5e-3, atol=0)
    assert (norm_at(1.0) / expected - 1).abs() > 5e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_norms_accumulate_in_float32_whatever_the_gradients_are(dtype):
    """In every dtype, the norm of large gradients is correct, even above float16's range."""
    network = LinearProbe(4096).to(dtype)
    cell = MFTrainOneStepCell(
        network, AdamW(network.parameters(), eps=1e-4), use_clip_grad=True, local_norm=True
    )

    output = cell(torch.full((1, 4096), 3000.0, dtype=dtype))

    expected = 64 * float(torch.full((), 3000.0, dtype=dtype))
    assert output.global_norm.item() == pytest.approx(expected, rel=1e-5)
    assert output.local_norm.item() == pytest.approx(expected, rel=1e-5)
    assert not output.overflow.item()


def test_a_float16_loss_does_not_overflow_before_its_backward():
    """A float16 loss is scaled in float32 and does not overflow by itself."""
    network = LinearProbe().half()
    with torch.no_grad():
        network.weight.fill_(8.0)
    cell = MFTrainOneStepCell(network, AdamW(network.parameters(), eps=1e-6), scale_sense=2.0**13)

    # The loss is 16 and the scale 8192. Their product, 131,072, exceeds float16's maximum of
    # 65,504. The scaled gradients are 8192, which float16 can hold.
    output = cell(torch.ones(1, 2).half())

    assert output.loss.item() == 16.0
    assert output.loss.dtype == torch.float32
    assert not output.overflow.item()


def test_a_scale_above_float16_overflows_with_a_float16_loss():
    """With a float16 loss, whose gradient is float16, a scale above 65504 overflows."""
    network = LinearProbe().half()
    cell = MFTrainOneStepCell(network, AdamW(network.parameters(), eps=1e-6), scale_sense=2.0**17)

    assert cell(torch.ones(1, 2).half()).overflow.item()
