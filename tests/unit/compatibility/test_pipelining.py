"""The parts of a pipeline schedule are read and replaced."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from mfwrap.compatibility import pipelining as names


@pytest.mark.usefixtures("_one_rank")
def test_a_schedule_runs_with_another_loss():
    """A replaced loss function is called once for each micro-batch, and gradients follow it."""
    module = nn.Linear(1, 1, bias=False)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    assert names.stages_of(schedule) == [stage]
    assert names.num_micro_batches(schedule) == 2
    assert names.splits_by_rows(schedule) == (True, True)
    assert names.loss_function(schedule) is nn.functional.mse_loss
    seen = []

    def loss(output, target):
        seen.append((output.detach(), target))
        return (output - target).sum()

    names.set_loss_function(schedule, loss)
    inputs, target = torch.arange(4.0).reshape(4, 1), torch.zeros(4, 1)
    names.run(schedule, [inputs], {"target": target})

    last = seen[-2:]  # torch calls the function once more in the first step, to find out shapes
    assert torch.equal(torch.cat([output for output, _ in last]), module(inputs))
    assert module.weight.grad == inputs.sum() / 2  # torch divides by the number of micro-batches
    names.forget_losses(schedule)
