"""The loss scale in the cell, for every kind of update rule."""

import math

import pytest
import torch
from torch.optim import SGD

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    MFTrainOneStepCell,
)
from support.small_networks import LinearProbe, labelled_batches
from support.spoilt.training import OPTIMIZERS, PRECISIONS, SpoiltTraining

OVERFLOWS = [False, False, True, False, False, False, True, True, False, False, False, False]


def expected_scales(overflows: list[bool], *, start: float, window: int) -> list[float]:
    """Return the scale after each step, by MindSpore's rule with factor 2."""
    scale, fine, scales = start, 0, []
    for overflow in overflows:
        fine = 0 if overflow else fine + 1
        if overflow:
            scale = max(scale / 2, 1.0)
        elif fine == window:
            scale, fine = scale * 2, 0
        scales.append(scale)
    return scales


def test_the_loss_scale_falls_at_an_overflow_and_grows_after_the_window():
    """The reported scale is the scale of the next step, by MindSpore's rule."""
    training = SpoiltTraining(
        OPTIMIZERS["fused AdamW"], scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3)
    )
    [batch] = labelled_batches(1)

    scales = [training.step(batch, bad=bad).output.loss_scale.item() for bad in OVERFLOWS]

    assert scales == expected_scales(OVERFLOWS, start=2.0**10, window=3)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
@pytest.mark.parametrize("use_clip_grad", [True, False], ids=["clipped", "not clipped"])
def test_a_step_is_unscaled_by_the_scale_it_was_scaled_with(use_clip_grad, fused):
    """Gradients are divided by the scale that multiplied their loss, not by the next scale."""
    network, row = LinearProbe(), torch.tensor([[3.0, 4.0]])
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=1.0, fused=fused),
        use_clip_grad=use_clip_grad,
        max_grad_norm=6.0,
        scale_sense=DynamicLossScaleUpdateCell(4.0, 2, 1),
        local_norm=True,
    )

    outputs = [cell(row) for _ in range(3)]

    assert [output.loss_scale.item() for output in outputs] == [8.0, 16.0, 32.0]
    assert [output.local_norm.item() for output in outputs] == [5.0, 5.0, 5.0]
    assert network.weight.tolist() == [-9.0, -12.0]


UPDATE_CELLS = {
    "fixed": lambda: FixedLossScaleUpdateCell(2.0**10),
    "dynamic": lambda: DynamicLossScaleUpdateCell(2.0**10, 4, 2),
    "dynamic with hysteresis": lambda: DynamicLossScaleUpdateCell(2.0**10, 2, 2, hysteresis=2),
    "dynamic with a floor": lambda: DynamicLossScaleUpdateCell(
        2.0**10, 2, 4, min_loss_scale=2.0**9
    ),
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**10, 2, 20),
}


@pytest.mark.parametrize("make_update_cell", UPDATE_CELLS.values(), ids=UPDATE_CELLS)
def test_the_scale_goes_as_the_update_cell_alone_has_it(make_update_cell):
    """The scale follows the update cell, which gets the overflow flag of each step once."""
    training = SpoiltTraining(OPTIMIZERS["fused AdamW"], scale_sense=make_update_cell())
    alone, scale = make_update_cell(), torch.full((), 2.0**10)
    [batch] = labelled_batches(1)

    for overflow in OVERFLOWS:
        reported = training.step(batch, bad=overflow).output.loss_scale
        alone(scale, torch.full((), overflow))
        assert torch.equal(reported, scale)
        assert torch.equal(training.cell.scale_sense, scale)


def test_an_overflow_of_the_scaled_gradients_heals_by_itself():
    """With float16 weights, a scale that is too large falls until gradients are finite."""
    training = SpoiltTraining(
        OPTIMIZERS["fused AdamW"],
        PRECISIONS["fp16 weights"],
        scale_sense=DynamicLossScaleUpdateCell(2.0**20, 2, 1000),
    )
    [batch] = labelled_batches(1)

    reports = [training.step(batch) for _ in range(8)]

    skipped = [report.skipped.item() for report in reports]
    assert skipped == sorted(skipped, reverse=True)
    assert skipped[0]
    assert not skipped[-1]
    assert reports[-1].output.loss_scale.item() == 2.0 ** (20 - sum(skipped))


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_set_sense_scale_holds_from_the_next_step_on(shape, dtype):
    """From the next step on, losses are multiplied and gradients divided by the new scale."""
    network, row = LinearProbe(), torch.tensor([[3.0, 4.0]])
    optimizer = SGD(network.parameters(), lr=1.0, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, scale_sense=torch.tensor(4.0))
    seen = []
    network.weight.register_hook(lambda gradient: seen.append(gradient.tolist()))

    first = cell(row)
    cell.set_sense_scale(torch.full(shape, 1024, dtype=dtype))
    second = cell(row)

    assert (first.loss_scale.item(), second.loss_scale.item()) == (4.0, 1024.0)
    assert seen == [[12.0, 16.0], [3072.0, 4096.0]]
    assert network.weight.tolist() == [-6.0, -8.0]


def test_set_sense_scale_takes_over_from_a_scale_of_one():
    """A cell that started with scale 1 uses a scale that is set later."""
    network = LinearProbe()
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=1.0, fused=True))

    cell.set_sense_scale(torch.tensor(8.0))
    cell(torch.tensor([[3.0, 4.0]]))

    assert network.weight.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("sens", [0.0, -4.0, math.nan, math.inf], ids=str)
def test_a_scale_that_cannot_be_one_shows_as_overflow(sens):
    """Steps with an invalid scale are skipped as overflows until the scale is replaced."""
    network, row = LinearProbe(), torch.tensor([[3.0, 4.0]])
    cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=1.0, fused=True))

    cell.set_sense_scale(torch.tensor(sens))
    output = cell(row)

    assert output.overflow.item()
    assert network.weight.tolist() == [0.0, 0.0]
    cell.set_sense_scale(torch.tensor(2.0))
    assert not cell(row).overflow.item()
    assert network.weight.tolist() == [-3.0, -4.0]
