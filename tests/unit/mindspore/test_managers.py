"""Loss-scale managers and their update cells follow MindSpore's rules."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfwrap import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    LossScaleManager,
    MFTrainOneStepCell,
    TrainOneStepWithLossScaleCell,
)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.sampled_from([2, 4, 8]))
def test_manager_scaler_and_cell_agree(overflows, window, factor):
    """Manager, scaler and update cell have the same loss scale after every step."""
    manager = DynamicLossScaleManager(64, factor, window)
    scaler = DynamicLossScaler(64, factor, window)
    cell, on_device = manager.get_update_cell(), torch.full((), 64.0)
    for overflow in overflows:
        manager.update_loss_scale(overflow)
        scaler.adjust(not overflow)
        cell(on_device, torch.full((), overflow))

        assert manager.get_loss_scale() == scaler.scale_value.item() == on_device.item()


def test_a_managers_numbers_are_mindspores():
    """A manager has MindSpore's attributes, and uses values that are assigned to them."""
    manager = DynamicLossScaleManager(2**10, 4, 7)
    assert (manager.increase_ratio, manager.decrease_ratio) == (4, 0.25)
    assert (manager.scale_factor, manager.scale_window, manager.bad_step_max) == (4, 7, 1000)
    assert (manager.cur_iter, manager.last_overflow_iter, manager.bad_step) == (1, 0, 0)

    manager.decrease_ratio, manager.bad_step_max = 0.5, 1
    manager.update_loss_scale(True)  # noqa: FBT003  (MindSpore's signature)
    assert manager.loss_scale == 2**9
    with pytest.raises(RuntimeError, match="more than 1,"):
        manager.update_loss_scale(True)  # noqa: FBT003  (MindSpore's signature)


def test_too_many_overflows():
    """The 1001st consecutive overflow is an error; a finite step restarts the count."""
    manager = DynamicLossScaleManager(2**10)
    for _ in range(1000):
        manager.update_loss_scale(True)  # noqa: FBT003  (MindSpore's signature)

    message = "1001 updates in a row overflowed, more than 1000, .* 1001 the loss scale is 1;"
    with pytest.raises(RuntimeError, match=message):
        manager.update_loss_scale(True)  # noqa: FBT003  (MindSpore's signature)
    manager.update_loss_scale(False)  # noqa: FBT003  (MindSpore's signature)
    manager.update_loss_scale(True)  # noqa: FBT003  (MindSpore's signature)
    assert manager.bad_step == 1


@pytest.mark.parametrize("overflow", [torch.ones((), dtype=torch.bool), torch.ones(1)])
def test_a_manager_takes_a_tensor(overflow):
    """A manager accepts the overflow flag of a cell's output."""
    manager = DynamicLossScaleManager(8)
    manager.update_loss_scale(overflow)
    assert manager.get_loss_scale() == 4


def test_growth_to_infinity_is_not_done():
    """The scale does not grow beyond the largest float, and can still fall."""
    manager = DynamicLossScaleManager(1.5e308, 2, 1)
    manager.update_loss_scale(False)  # noqa: FBT003  (MindSpore's signature)
    assert manager.get_loss_scale() == 1.5e308
    manager.update_loss_scale(True)  # noqa: FBT003  (MindSpore's signature)
    assert manager.get_loss_scale() == 0.75e308


def test_an_update_cell_goes_on_from_the_scale_as_it_is():
    """An update cell starts from the manager's current scale."""
    manager = DynamicLossScaleManager(1024, 4, 7)
    manager.update_loss_scale(True)  # noqa: FBT003  (MindSpore's signature)
    cell = manager.get_update_cell()

    assert type(cell) is DynamicLossScaleUpdateCell
    assert (cell.get_loss_scale(), cell.scale_factor, cell.scale_window) == (256.0, 4.0, 7)


def test_a_manager_of_ones_own():
    """A user's manager must define MindSpore's three methods; by default it skips overflows."""

    class Manager(LossScaleManager):
        def get_loss_scale(self):
            return 2.0

        def update_loss_scale(self, overflow):
            pass

        def get_update_cell(self):
            return FixedLossScaleUpdateCell(2.0)

    assert Manager().get_drop_overflow_update() is True
    with pytest.raises(TypeError, match="abstract"):
        LossScaleManager()


def cells(scale_sense):
    """Yield a network and its cell, for each kind of cell that takes an update cell.

    The network multiplies its input by 2.
    """
    for kind in (MFTrainOneStepCell, TrainOneStepWithLossScaleCell):
        network = nn.Linear(1, 1, bias=False)
        network.weight.data.fill_(2.0)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
        yield network, kind(network, optimizer, scale_sense=scale_sense())


MANAGERS = {
    "fixed": (lambda: FixedLossScaleManager(64.0), 64.0, 64.0),
    "dynamic": (lambda: DynamicLossScaleManager(64, 4, 1), 256.0, 64.0),
}


@pytest.mark.parametrize(("manager", "grown", "fallen"), MANAGERS.values(), ids=MANAGERS)
def test_cells_take_what_a_manager_gives(manager, grown, fallen):
    """Cells apply a finite update and skip an overflow."""
    for network, cell in cells(lambda: manager().get_update_cell()):
        output = cell(torch.full((1, 1), 0.5))
        loss_scale = output.loss_scale if hasattr(output, "loss_scale") else output[2]
        assert loss_scale == grown
        assert network.weight.item() == 1.5

        output = cell(torch.full((1, 1), math.inf))
        assert output.overflow
        assert output.loss_scale == fallen
        assert network.weight.item() == 1.5


@pytest.mark.parametrize("kind", [MFTrainOneStepCell, TrainOneStepWithLossScaleCell])
def test_a_manager_without_an_update_cell_is_refused(kind):
    """``scale_sense=None`` raises a TypeError that says what to do with such a manager."""
    network = nn.Linear(1, 1)
    manager = FixedLossScaleManager(64.0, drop_overflow_update=False)

    with pytest.raises(TypeError, match=r"got None .*; a loss-scale manager .* to `Model`$"):
        kind(
            network,
            torch.optim.SGD(network.parameters(), lr=1.0),
            scale_sense=manager.get_update_cell(),
        )
