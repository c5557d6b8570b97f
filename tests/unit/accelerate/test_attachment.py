"""What was prepared is settled and dropped when an accelerator frees it or ends."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from support.attached_runs import FACTORS, AttachedRun, RunSettings, new_accelerator
from support.deferral import late_results
from support.training_state import assert_same_state
from support.versions import needs

PLAIN = RunSettings(loss_scale="none", max_norm=None)
"""Settings with which an attached run is bitwise equal to accelerate alone."""
APPLIED = (1.0,) * len(FACTORS)


@pytest.mark.parametrize("method", ["free_memory", "clear"])
def test_a_freed_accelerator_trains_what_is_prepared_next(method):
    """After `free_memory` or `clear`, a newly prepared training starts with fresh state."""
    fresh = AttachedRun(replace(PLAIN, seed=1))
    fresh.train(0, 4, APPLIED)
    expected = fresh.state()

    run = AttachedRun(PLAIN)
    run.train(0, 3)
    getattr(run.accelerator, method)()
    run.settings = replace(PLAIN, seed=1)
    run.prepare()
    run.train(0, 4, APPLIED)

    assert_same_state(expected, run.state())


@pytest.mark.parametrize("method", ["free_memory", "end_training"])
def test_freeing_and_ending_settle_what_is_pending(method):
    """`free_memory` and `end_training` apply the pending step of the schedule."""
    run = AttachedRun()
    schedule = run.schedule.scheduler
    with late_results():
        run.train(0, 3)
        behind = schedule.last_epoch

        getattr(run.accelerator, method)()

    assert (behind, schedule.last_epoch) == (1, 2)


def test_a_parameter_that_the_loop_replaces_is_trained():
    """A loop may replace a parameter in the network and the optimizer between two updates."""
    accelerator = new_accelerator()
    attach(accelerator)
    network = nn.Linear(2, 1, bias=False)
    network, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=0.5))
    for _ in range(2):
        network.weight = nn.Parameter(torch.zeros(1, 2))
        optimizer.param_groups[0]["params"][0] = network.weight
        accelerator.backward(network(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()

        assert torch.equal(network.weight, torch.full((1, 2), -0.5))


@needs("torch", "2.10", "Tensor.grad_dtype")
def test_a_model_that_is_prepared_later_accumulates_in_float32_too():
    """Each half-precision model gets float32 gradients, whenever it was prepared."""
    accelerator = new_accelerator(gradient_accumulation_steps=4)
    attach(accelerator, StepConfig(accumulate_allreduce_grads_in_fp32=True))
    for _ in range(2):
        network = nn.Linear(2, 1).bfloat16()
        network, _ = accelerator.prepare(network, SGD(network.parameters(), lr=0.5))
        with accelerator.accumulate(network):
            accelerator.backward(network(torch.ones(1, 2).bfloat16()).sum())

        assert network.weight.grad.dtype == torch.float32
