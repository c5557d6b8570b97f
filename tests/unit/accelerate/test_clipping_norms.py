"""Clipping in an attached loop returns and reports correct norms without extra passes."""

import copy
import math

import pytest
import torch

from mfwrap import StepConfig
from support.accelerate_loops import BytesRead
from support.clipped_training import LIMIT, WAYS, ClippedTraining, Setting, norm_of
from support.small_networks import Classifier, labelled_batches

INF = math.inf

each_scale = pytest.mark.parametrize("scale", [1.0, 2.0**16], ids=["scale 1", "scale 2**16"])


@pytest.mark.parametrize("limit", [LIMIT, INF], ids=["clipped", "measured"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@each_scale
def test_the_returned_norm_is_that_of_float64(scale, precision, accumulation, limit):
    """Clipping returns the norm of the unscaled gradients before they are clipped.

    The tolerance covers a float32 sum of 212 squares, whose error is about 1e-7.
    """
    training = ClippedTraining("fused SGD", Setting(precision, scale, accumulation), attached=True)
    # A copy of the prepared network computes in accelerate's precision. Its loss is scaled like
    # the loop's loss, because the scale changes the rounding of float16 gradients.
    network = copy.deepcopy(training.network)
    batches = labelled_batches(accumulation)
    for batch in batches:
        (network(*batch) / accumulation * scale).backward()
    gradients = [parameter.grad.double().view(-1) for parameter in network.parameters()]
    expected = torch.cat(gradients).norm().item() / scale

    [norm] = training.update(norm_of(limit=limit), batches, each_micro_batch=False)

    assert (norm.shape, norm.dtype) == ((), torch.float32)
    assert norm.item() == pytest.approx(expected, rel=5e-7)
    assert expected > LIMIT
    assert torch.equal(training.step.last_output.global_norm, norm)


@each_scale
def test_reported_names_are_those_of_the_norms(scale):
    """Reported names match the norms even if a layer is frozen between clipping and step."""
    config = StepConfig(local_norm=True)
    training = ClippedTraining("fused SGD", Setting(scale=scale), attached=True, config=config)
    network = training.network
    num_trainable = []
    for batch in labelled_batches(2):
        num_trainable.append(sum(p.requires_grad for p in network.parameters()))
        training.backward(batch)
        training.accelerator.clip_grad_norm_(network.parameters(), LIMIT)
        network.layers[0].requires_grad_(False)  # noqa: FBT003  (torch's signature)
        training.optimizer.step()
        training.optimizer.zero_grad()

        report = training.step.last_report
        assert len(report.local_norm_names) == num_trainable[-1]
        assert report.output.local_norm.numel() == num_trainable[-1]
        assert len(report.output.size) == num_trainable[-1]
    assert num_trainable[0] > num_trainable[1]


@pytest.mark.fast_sample(16)
@each_scale
@pytest.mark.parametrize("way", WAYS)
def test_reported_norms_are_those_before_any_clipping(way, scale):
    """Reported global and local norms are those before any clipping by the loop."""
    torch.manual_seed(0)
    network = Classifier()
    batches = labelled_batches(1)
    network(*batches[0]).backward()
    expected = torch.stack([parameter.grad.norm() for parameter in network.parameters()])
    config = StepConfig(local_norm=True, use_clip_grad=True, max_grad_norm=INF)
    training = ClippedTraining("fused SGD", Setting(scale=scale), attached=True, config=config)

    training.update(WAYS[way], batches, each_micro_batch=False)

    output = training.step.last_output
    torch.testing.assert_close(output.global_norm, expected.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(output.local_norm, expected, rtol=1e-6, atol=0)


@each_scale
@pytest.mark.parametrize("limit", [LIMIT, INF])
def test_the_configurations_clipping_reports_the_norm_that_the_loops_returns(limit, scale):
    """Clipping by config reports norms bitwise equal to those that the loop's clipping returns."""
    config = StepConfig(use_clip_grad=True, max_grad_norm=limit)
    setting = Setting(scale=scale)
    by_config = ClippedTraining("fused SGD", setting, attached=True, config=config)
    reports = by_config.run(lambda _: None).reports

    by_loop = ClippedTraining("fused SGD", setting, attached=True).run(norm_of(limit=limit))
    assert [report.output.global_norm for report in reports] == by_loop.returned


@pytest.mark.parametrize("optimizer", ["fused AdamW", "fused SGD"])
@each_scale
def test_clipping_reads_the_gradients_once_and_the_step_once_more(scale, optimizer):
    """Clipping reads the gradients once, where accelerate alone reads them twice."""
    num_passes = {}
    for attached in (True, False):
        training = ClippedTraining(optimizer, Setting(scale=scale), attached=attached)
        # The first steps allocate the optimizer's state, which must not be counted.
        training.run(norm_of())
        training.backward(labelled_batches(1)[0])
        size = sum(gradient.numel() * 4 for gradient in training.gradients)
        with BytesRead(training.gradients) as clipping:
            norm_of()(training)
        with BytesRead(training.gradients) as step:
            training.optimizer.step()
        num_passes[attached] = (clipping.num_bytes / size, step.num_bytes / size)

    assert num_passes == {True: (1, 1), False: (2, 1)}


@pytest.mark.parametrize("optimizer", ["SGD", "foreach AdamW"])
@each_scale
def test_without_a_fused_optimizer_there_are_no_more_passes_than_alone(scale, optimizer):
    """Without a fused optimizer the loop reads as many gradient bytes as accelerate alone."""
    num_bytes = {}
    for attached in (True, False):
        training = ClippedTraining(optimizer, Setting(scale=scale), attached=attached)
        training.run(norm_of())
        training.backward(labelled_batches(1)[0])
        with BytesRead(training.gradients) as total:
            norm_of()(training)
            training.optimizer.step()
        num_bytes[attached] = total.num_bytes

    assert num_bytes[True] == num_bytes[False]
