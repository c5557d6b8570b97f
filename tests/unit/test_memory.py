"""The numbers of the memory are right, and an error for lack of it says where and what helps."""

import resource
import traceback

import psutil
import pytest
import torch
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.collectives import Section
from mfwrap.memory import (
    Training,
    device_memory,
    explain_out_of_memory,
    host_memory,
    is_out_of_memory,
    memory_note,
    peak_memory,
    shapes_of,
)
from support.device import needs_backends, run
from support.memory import TOO_MUCH, Filling, FillingSGD
from support.trainer_runs import tiny_llama

CPU = torch.device("cpu")
X, Y = torch.ones(6, 4), torch.zeros(6, 1)


def raised(call, *arguments, **keywords):
    """Return the error for lack of memory that a call raises."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        call(*arguments, **keywords)
    return caught.value


def note_of(training, *, section=Section.FORWARD_BACKWARD, shapes=None):
    """Return the note of an error that is raised in a section of a training."""
    error = raised(torch.empty, TOO_MUCH, dtype=torch.uint8)
    explain_out_of_memory(error, CPU, section, training, step=7, shapes=shapes)
    return memory_note(error)


def training_of(network, **changes):
    """Return what decides how much memory the training of a network needs."""
    others = {"is_sharded": False, "accumulates": False, "reduces_each": False, "average": None}
    return Training(networks=[network], **(others | changes))


# The numbers


def test_host_memory_is_that_of_the_process():
    """Resident memory and its peak are those that psutil and the system say."""
    held = torch.ones(2**24)
    memory, of_psutil = host_memory(), psutil.Process().memory_info().rss
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    del held

    assert memory.resident == pytest.approx(of_psutil, rel=0.05)
    assert memory.peak == pytest.approx(peak, rel=0.05)
    assert peak_memory(CPU) == pytest.approx(memory.peak, rel=0.05)


def test_a_device_without_an_allocator_has_no_numbers():
    """A CPU has none, and the meta device has none either."""
    assert device_memory(CPU) is None
    assert device_memory(torch.device("meta")) is None


@needs_backends
def test_device_memory_is_that_of_the_allocator():
    """The numbers of a device are those of its allocator; reading them waits for nothing."""
    found = run("support.device.memory:numbers")

    assert found["read"] == found["of the allocator"]
    assert found["events"] == []
    assert found["resets"] == 0


# Errors


def test_an_error_of_a_micro_batch_is_explained():
    """The note has step, micro-batch, section, shapes and peak; type and text stay."""
    network = Filling(call=5)
    cell = MFTrainOneStepCell(
        network,
        torch.optim.SGD(network.parameters(), 0.1, fused=True),
        gradient_accumulation_steps=3,
    )
    cell(X, y=Y)
    error = raised(cell, X, y=Y)
    note = memory_note(error)

    assert type(error) is RuntimeError
    assert len(error.args) == 1
    assert note.startswith(
        "out of memory in step 2, forward and backward, micro-batch 2 of 3, inputs[0] (2, 4) and "
        "y (2, 1); peak before it: "
    )
    assert "GiB of this process; what needs less: micro-batches of fewer rows" in note
    assert note in "".join(traceback.format_exception(error))
    # The training goes on: the error has not counted as an update.
    cell(X, y=Y)
    assert int(cell.last_report.applied_updates) == 2


def test_an_error_of_backward_is_explained():
    """Backward belongs to the micro-batch of its forward; a lone micro-batch has no number."""
    network = Filling(call=1, where="backward")
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), 0.1, fused=True))

    note = memory_note(raised(cell, X))
    assert note.startswith("out of memory in step 1, forward and backward, inputs[0] (6, 4); peak")


def test_an_error_of_the_update_is_explained():
    """An update has no micro-batch, and other remedies."""
    network = Filling()
    cell = MFTrainOneStepCell(network, FillingSGD(network.parameters(), fills_at=2))
    cell(X)
    note = memory_note(raised(cell, X))

    assert note.startswith("out of memory in step 2, the update (norms, optimizer and average); ")
    assert note.endswith("`fully_shard` on several ranks, or an optimizer with a smaller state")


def test_a_resumed_cell_goes_on_counting():
    """The number of the step is that of the whole training."""
    first, network = Filling(), Filling(call=1)
    cell = MFTrainOneStepCell(first, torch.optim.SGD(first.parameters(), 0.1))
    for _ in range(3):
        cell(X)
    resumed = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), 0.1))
    resumed.load_state_dict(cell.state_dict())

    assert memory_note(raised(resumed, X)).startswith("out of memory in step 4, ")


def test_accelerate_still_finds_a_batch_size():
    """Accelerate's decorator recognizes the error, and makes the batch smaller until it fits."""
    sizes = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size):
        network = Filling(most_rows=5)
        cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), 0.1))
        sizes.append(batch_size)
        cell(torch.ones(batch_size, 4))

    train()

    assert sizes[0] == 16
    assert 5 in sizes or 4 in sizes
    assert sizes == sorted(sizes, reverse=True)


def test_other_errors_stay_as_they_are():
    """Only errors for lack of memory are explained, each once."""
    cell_error = ValueError("out of memory, says a text")
    explain_out_of_memory(cell_error, CPU, Section.UPDATE, training_of(nn.Linear(1, 1)), step=1)
    of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    for section in (Section.UPDATE, Section.DATA):
        explain_out_of_memory(of_memory, CPU, section, training_of(nn.Linear(1, 1)), step=1)

    assert memory_note(cell_error) is None
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert should_reduce_batch_size(of_memory)
    assert len(of_memory.__notes__) == 1
    assert "step 1, the update" in of_memory.__notes__[0]


@needs_backends
def test_an_error_in_a_trainer_is_explained():
    """The note names the micro-batch that filled the device, and torch's snapshot is written."""
    found = run("support.device.memory:trainer")

    assert found["text"].startswith("SIMULATED out of memory. ")
    assert found["note"].startswith(
        "out of memory in step 3, forward and backward, micro-batch 2, input_ids (2, 8) and labels "
        "(2, 8); peak before it: 0.00 GiB allocated, "
    )
    assert "`gradient_accumulation_steps`" in found["note"]
    assert "`update_every`" in found["note"]
    assert found["history"] == [{"max_entries": 100_000}]
    assert "allocated_bytes" in found["snapshot"]
    assert ", max_memory: 0.00 GiB" in found["said"][0]


# Remedies


def test_remedies_are_those_of_the_setting():
    """What is on already, and what does not apply, is not named."""
    plain = nn.Linear(1, 1)
    assert note_of(training_of(plain), shapes={"x": (1, 9)}).endswith(
        "what needs less: shorter rows; gradient checkpointing (a setting of transformers' models "
        "and of a Trainer; elsewhere `torch.utils.checkpoint`)"
    )
    llama = tiny_llama()
    turn_on = getattr(llama, "activation_checkpointing_enable", None)
    (turn_on or llama.gradient_checkpointing_enable)()
    assert note_of(training_of(llama), shapes={"x": (2, 9)}).endswith(
        "what needs less: micro-batches of fewer rows, and more of them "
        "(`gradient_accumulation_steps`)"
    )
    sharded = training_of(plain, is_sharded=True, accumulates=True)
    assert "`sync_each_batch=True`" in note_of(sharded)
    reduced = training_of(plain, is_sharded=True, accumulates=True, reduces_each=True)
    assert "sync_each_batch" not in note_of(reduced)
    assert "what needs less" not in note_of(reduced, section=Section.UPDATE)
    assert "what needs less" not in note_of(training_of(plain), section=Section.DATA)


def test_an_average_on_the_cpu_is_no_remedy():
    """Only an average that takes memory of the device could be elsewhere."""
    average = ExponentialMovingAverage(nn.Linear(1, 1))

    assert not average.is_on_accelerator
    assert "`update_every`" not in note_of(training_of(nn.Linear(1, 1), average=average))


def test_shapes_are_found_in_nested_inputs():
    """Tensors in mappings and lists have names, too; of many tensors the first eight are shown."""
    assert shapes_of(({"a": X, "flag": True}, [Y]), {"z": torch.ones(())}) == {
        "a": (6, 4),
        "inputs[1][0]": (6, 1),
    }
    many = {f"x{number}": (number, 2) for number in range(10)}
    note = note_of(training_of(nn.Linear(1, 1)), shapes=many)
    assert "x7 (7, 2) and others; peak" in note
    assert "x8" not in note
