"""Updates with finite gradients that are skipped: spikes and empty batches."""

import math

import pytest
import torch
from torch.optim import SGD

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell
from support.small_networks import IGNORED, LinearProbe, TokenClassifier, labelled_batches
from support.spoilt.training import OPTIMIZERS, SpoiltTraining
from support.training_state import assert_same_state, assert_unchanged, training_state


def probe_cell(*, threshold: float, **settings) -> MFTrainOneStepCell:
    """Return a cell without clipping; its gradient is the mean of the rows of its inputs."""
    network = LinearProbe()
    return MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=1.0, fused=True),
        use_clip_grad=True,
        max_grad_norm=math.inf,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=threshold,
        **settings,
    )


@pytest.mark.parametrize(
    ("threshold", "skipped"), [(4.99, True), (5.0, True), (5.01, False)], ids=str
)
def test_a_norm_at_the_threshold_is_a_spike(threshold, skipped):
    """A global norm (here 5) at or above the threshold skips the update."""
    cell = probe_cell(threshold=threshold)

    output = cell(torch.tensor([[3.0, 4.0]]))

    assert output.global_norm.item() == 5.0
    assert cell.last_report.skipped.item() is skipped
    assert cell.network.weight.tolist() == ([0.0, 0.0] if skipped else [-3.0, -4.0])
    assert not output.overflow.item()


def test_a_norm_that_is_nan_is_skipped_as_overflow():
    """A global norm of NaN is skipped as an overflow."""
    cell = probe_cell(threshold=5.0)

    output = cell(torch.tensor([[math.nan, 1.0]]))

    assert output.overflow.item()
    assert cell.last_report.skipped.item()


def test_a_spike_does_not_disturb_the_loss_scale():
    """A spike counts as a finite step for the growth of the loss scale."""
    cell = probe_cell(threshold=5.0, scale_sense=DynamicLossScaleUpdateCell(4.0, 2, 3))
    small, spike = torch.tensor([[1.0, 1.0]]), torch.tensor([[30.0, 40.0]])

    scales = [cell(batch).loss_scale.item() for batch in (small, spike, small, spike)]

    assert scales == [4.0, 4.0, 8.0, 8.0]
    assert cell.last_report.skipped_updates.item() == 2


def test_a_spike_changes_nothing():
    """A spike leaves weights, optimizer state, schedule and average bitwise unchanged.

    The spike comes at the third step. At the first step the average equals the weights, so an
    average that followed a skipped update would not change either.
    """
    training = SpoiltTraining(
        OPTIMIZERS["fused AdamW"],
        value=1e6,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=1e3,
    )
    *batches, spike = labelled_batches(3)
    for batch in batches:
        assert not training.step(batch).skipped.item()
    before, averages_before = training.state(), training.averages()

    report = training.step(spike, bad=True)

    assert report.skipped.item()
    assert not report.output.overflow.item()
    assert_unchanged(before, training.state())
    assert_same_state(averages_before, training.averages())
    weights = dict(training.network.named_parameters())
    assert not any(torch.equal(weights[name], each) for name, each in averages_before.items())


def test_a_batch_without_targets_is_skipped():
    """A batch without targets is skipped without overflow and changes nothing."""
    network = TokenClassifier()
    optimizer = OPTIMIZERS["fused AdamW"](network.parameters())
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        local_norm=True,
        calculate_per_token_loss=True,
        scale_sense=2.0**16,
    )
    [(inputs, labels)] = labelled_batches(1)
    before = training_state(network, optimizer)

    output = cell(inputs, torch.full_like(labels, IGNORED))

    assert output.loss.isnan()
    assert output.global_norm.item() == 0
    assert output.local_norm.tolist() == [0.0] * 4
    assert not output.overflow.item()
    assert cell.last_report.skipped.item()
    assert_unchanged(before, training_state(network, optimizer))
    assert cell(inputs, labels).loss.isfinite()
    assert not cell.last_report.skipped.item()
