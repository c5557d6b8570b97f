"""An error for lack of memory in a loop says in which micro-batch it was raised."""

import copy
import gc
import weakref

import pytest
import torch
from accelerate import Accelerator

from mfwrap.accelerate import attach
from mfwrap.memory import memory_note
from support.memory import Filling, FillingSGD

X, Y = torch.ones(6, 4), torch.zeros(6, 1)


def raised(call, *arguments):
    """Return the error for lack of memory that a call raises."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        call(*arguments)
    return caught.value


def attached(network, optimizer=None, steps=1):
    """Return a step, and a function that does forward, backward and update of a micro-batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    step = attach(accelerator)
    optimizer = optimizer or torch.optim.SGD(network.parameters(), 0.1)
    model, optimizer = accelerator.prepare(network, optimizer)

    def train(batch):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch, y=Y))
            optimizer.step()
            optimizer.zero_grad()

    return step, train


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_loop_is_explained(where):
    """A loop calls its model itself; the error has the same note as that of a cell."""
    _, train = attached(Filling(call=4, where=where), steps=2)
    for _ in range(3):
        train(X)

    assert memory_note(raised(train, X)).startswith(
        "out of memory in step 2, forward and backward, micro-batch 2 of 2, inputs[0] (6, 4) and "
        "y (6, 1); peak before it: "
    )


def test_an_error_in_an_update_of_a_loop_is_explained():
    """The update is that of the attached step."""
    network = Filling()
    _, train = attached(network, FillingSGD(network.parameters(), fills_at=3))
    for _ in range(2):
        train(X)

    note = memory_note(raised(train, X))
    assert note.startswith("out of memory in step 3, the update (norms, optimizer and average); ")


def test_an_evaluation_is_no_micro_batch():
    """Only forwards in training are followed."""
    network = Filling(most_rows=7)
    step, train = attached(network)
    train(X)
    network.eval()

    assert memory_note(raised(network, torch.ones(8, 4))) is None
    step.detach()


def test_the_model_keeps_nothing_of_the_step():
    """Detached, the model has no hook; a copy has none, and the model does not hold the step."""
    network = Filling()
    step, train = attached(network)
    train(X)
    assert network._forward_hooks
    assert not copy.deepcopy(network)._forward_hooks
    step.detach()
    assert not network._forward_hooks

    step, train = attached(network)
    reference = weakref.ref(step.attachment)
    Accelerator(cpu=True).free_memory()
    del step, train
    gc.collect()
    assert reference() is None
    network(X)  # the hook does nothing
