"""Each kind of loop has its network, its optimizer and a call before the weights change."""

import math

import pytest
import torch
from torch import nn

from mfwrap import MFTrainOneStepCell, StepConfig, WithLossCell
from mfwrap.accelerate import attach
from mfwrap.callbacks.loop.source import source_of
from support.attached_runs import new_accelerator


def attached_loop():
    """Return an attached step, its network, and a function that does an update."""
    accelerator = new_accelerator()
    attached = attach(accelerator)
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    network, optimizer = accelerator.prepare(network, optimizer)

    def update():
        accelerator.backward(network(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()

    return attached, network, update


def cell_loop():
    """Return a cell, its network, and a function that does an update."""
    network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.5))
    return cell, network, lambda: cell(torch.ones(4, 2), torch.ones(4, 1))


def plain_loop():
    """Return an optimizer, its network, and a function that does an update."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)

    def update():
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return optimizer, network, update


@pytest.mark.parametrize("make", [attached_loop, cell_loop, plain_loop])
def test_the_call_comes_before_the_weights_change(make):
    """The function sees gradients and unchanged weights, until it is removed."""
    step, network, update = make()
    source = source_of(step, network if make is plain_loop else None)
    before = [p.detach().clone() for p in network.parameters()]
    seen = []

    def look():
        unchanged = [torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)]
        seen.append((all(unchanged), all(p.grad is not None for p in network.parameters())))

    end = source.call_before_update(look)
    update()
    end()
    update()

    assert seen == [(True, True)]
    assert source.model is network
    assert source.optimizer is not None


def test_the_limit_of_clipping():
    """It is that of the step, or of the loop's last call, unless that clips nothing."""
    attached, network, _ = attached_loop()
    source, found = source_of(attached, network), []
    for limit in (0.25, math.inf, 0.5):
        found.append(source.max_grad_norm)
        attached.accelerator.backward(network(torch.ones(1, 2)).sum())
        attached.accelerator.clip_grad_norm_(network.parameters(), limit)
    assert [*found, source.max_grad_norm] == [None, 0.25, 0.25, 0.5]

    config = StepConfig(use_clip_grad=True, max_grad_norm=0.125)
    attached = attach(new_accelerator(), config)
    assert source_of(attached, network).max_grad_norm == 0.125
    cell, *_ = cell_loop()
    assert source_of(cell, None).max_grad_norm is None
    optimizer, *_ = plain_loop()
    assert source_of(optimizer, network).max_grad_norm is None


def test_a_cell_may_have_a_config_of_its_own():
    """Settings of the step are left out for a subclass whose ``config`` is something else."""
    cell, *_ = cell_loop()
    assert source_of(cell, None).settings["step"]["max_grad_norm"] == 1.0
    cell.config = {"hidden_size": 8}
    assert "step" not in source_of(cell, None).settings


def test_an_attached_loop_may_clip_and_accumulate_itself():
    """The settings of the step leave out what the accelerator or the loop sets."""
    attached, network, _ = attached_loop()
    own = {"gradient_accumulation_steps", "use_clip_grad", "max_grad_norm"}
    assert own.isdisjoint(source_of(attached, network).settings["step"])

    attached = attach(new_accelerator(), StepConfig(use_clip_grad=True, max_grad_norm=0.125))
    assert source_of(attached, network).settings["step"]["max_grad_norm"] == 0.125


@pytest.mark.parametrize("make_rate", [float, torch.tensor])
def test_a_plain_loop_has_the_rate_of_its_last_update(make_rate):
    """A schedule that sets the next rate before the step ends does not change it."""
    optimizer, network, update = plain_loop()
    group = optimizer.param_groups[0]
    group["lr"] = make_rate(0.25)
    source = source_of(optimizer, network)
    source.call_before_update(lambda: None)

    update()
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(0.125)
    else:
        group["lr"] = 0.125

    assert source.output(torch.tensor(1.0), None).learning_rate.item() == 0.25


def test_the_rate_that_was_set():
    """A schedule moves the rate of each step; a resume must not take that for another setting."""
    optimizer, network, _ = plain_loop()
    source = source_of(optimizer, network)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.1)

    assert optimizer.param_groups[0]["lr"] == 0.05
    assert source.settings["optimizer"]["lr"] == 0.5
