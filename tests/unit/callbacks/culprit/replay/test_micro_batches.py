"""Losses and factors of micro-batches, and the loss of the step before computed again."""

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.micro_batches import (
    factor_change,
    factors_of,
    losses_again,
    losses_of,
)
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder


class Noisy(nn.Module):
    """Network with dropout and running statistics, whose loss is its output's square."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.fails = False

    def forward(self, inputs):
        """Return the loss alone."""
        if self.fails:
            msg = "no"
            raise RuntimeError(msg)
        return nn.functional.dropout(self.norm(self.linear(inputs)), 0.5).square().mean()


def trained(num_steps: int) -> StepRecorder:
    """Return a recorder that has seen steps of two micro-batches."""
    torch.manual_seed(0)
    recorder = StepRecorder(Noisy())
    for _ in range(num_steps):
        for factor in (0.5, 500.0):
            (recorder.network(torch.randn(6, 4)) * factor).backward()
        recorder.end_step()
    return recorder


def test_losses_and_factors_are_those_of_the_last_step():
    """The network's own losses, and what the loop multiplied them with."""
    recorder = trained(2)
    assert losses_of(recorder.last_step) == tuple(call.loss.item() for call in recorder.last_step)
    assert factors_of(recorder.last_step) == (0.5, 500.0)


def test_the_change_of_the_factors_is_that_of_their_mean():
    """Against the step before, whose factors must be known."""
    recorder = StepRecorder(Noisy())
    found = []
    for factors in ((0.5, -0.5), (5.0, 10.0), (0.0, 0.0), (1.0,)):
        for factor in factors:
            (recorder.network(torch.randn(6, 4)) * factor).backward()
        recorder.end_step()
        found.append(factor_change(*map(factors_of, (recorder.last_step, recorder.earlier_step))))
    assert found == [None, 15.0, 0.0, None]


def test_without_a_backward_factors_are_unknown():
    """A loss that no backward has reached has no factor."""
    recorder = StepRecorder(Noisy())
    recorder.network(torch.randn(6, 4))
    recorder.end_step()
    assert factors_of(recorder.last_step) == ()


def test_the_same_weights_have_the_same_loss_again():
    """Random numbers are those of that step, and nothing is left changed."""
    recorder = trained(3)
    then = [call.loss.item() for call in recorder.earlier_step]
    random, mean = torch.get_rng_state(), recorder.network.norm.running_mean.clone()

    found = losses_again(recorder, recorder.earlier_step)
    assert [each[0] for each in found] == then
    assert [each[1] for each in found] == pytest.approx(then)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(recorder.network.norm.running_mean, mean)
    assert len(recorder.last_step) == 2


def test_worse_weights_have_another_loss():
    """The loss of the step before tells whether the weights have become worse."""
    recorder = trained(3)
    recorder.network.norm.weight.data.mul_(10)
    assert all(again > 50 * then for then, again in losses_again(recorder, recorder.earlier_step))


def test_what_is_unknown():
    """There may be no step before, and a call may fail."""
    recorder = trained(1)
    assert losses_again(recorder, recorder.earlier_step) == ()
    recorder = trained(3)
    recorder.network.fails = True
    assert losses_again(recorder, recorder.earlier_step) == ()
    recorder.earlier_step[0].loss = None
    assert losses_again(recorder, recorder.earlier_step) == ()
    recorder.last_step[0].loss = None
    assert losses_of(recorder.last_step) == ()
