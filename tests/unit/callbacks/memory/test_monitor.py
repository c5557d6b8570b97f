"""MemoryMonitor records what the allocator says, and warns once of each kind."""

import pytest
import torch
from transformers import TrainerControl, TrainerState

from mfwrap import MFTrainOneStepCell, StepConfig, WithLossCell
from mfwrap.callbacks import LoopMonitor, MemoryMonitor
from mfwrap.callbacks.memory.monitor import with_memory_monitor
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from support.device import needs_backends, run
from support.memory import Filling
from support.trainer_runs import new_trainer


def records(folder):
    """Return the records of rank 0."""
    return read_json_lines(folder / "memory.jsonl")


@needs_backends
def test_the_numbers_are_those_of_the_allocator():
    """Each record has the numbers of its step; reading them waits for nothing, and resets nothing.

    Of the peaks, a user resets one after step 9. Before the training the device was full 7 times.
    """
    found = run("support.device.memory:loop")
    steps = [1, 2, 4, 8, 12]
    stats = [found["stats"][step - 1] for step in steps]
    retries = [each["num_alloc_retries"] for each in stats]

    assert [each["step"] for each in found["records"]] == steps
    for record, each in zip(found["records"], stats, strict=True):
        reserved = each["reserved_bytes"]["all"]["peak"]
        assert record["memory_allocated"] == each["allocated_bytes"]["all"]["current"]
        assert record["max_memory_allocated"] == each["allocated_bytes"]["all"]["peak"]
        assert record["max_memory_reserved"] == reserved
        assert record["max_memory_share"] == pytest.approx(reserved / found["capacity"], abs=1e-4)
    assert [each["num_alloc_retries"] for each in found["records"]] == [
        new - old for old, new in zip([7, *retries], retries, strict=False)
    ]
    # The state of AdamW appears in the first update; the rows of later steps grow.
    sections = [each.get("max_memory_section") for each in found["records"]]
    assert sections == ["update", *["forward_backward"] * 4]
    assert found["events"] == []
    assert found["resets"] == 1
    full, left = found["said"]  # each once, although it happens again in step 12
    assert retries[-1] > retries[-2]
    assert full.startswith(f"simulated:0 was full {retries[3] - 7} times by step 8: torch freed ")
    assert left.startswith("less than 5 % of simulated:0 is left at step 8: torch has reserved ")


def test_a_loop_and_a_trainer_on_a_cpu(tmp_path):
    """The records have the memory of the process, at the first two steps and every tenth."""
    network = WithLossCell(torch.nn.Linear(2, 1), torch.nn.MSELoss())
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), 0.1, fused=True))
    with LoopMonitor(cell, tmp_path / "loop") as monitor:
        for _ in range(20):
            cell(torch.ones(4, 2), torch.ones(4, 1))
            monitor.end_step()
    trainer = new_trainer(
        MFTrainer,
        tmp_path / "trainer",
        callbacks=[MemoryMonitor(2)],
        extras={"step": StepConfig()},
        max_steps=4,
    )
    trainer.train()

    assert [each["step"] for each in records(tmp_path / "loop")] == [1, 2, 10, 20]
    found = records(tmp_path / "trainer")
    assert [each["step"] for each in found] == [1, 2, 4]
    assert all(each["max_host_memory"] >= 0.9 * each["host_memory"] > 2**20 for each in found)
    assert not any("max_memory_allocated" in each for each in found)


def test_a_monitor_of_ones_own_takes_the_place_of_the_usual_one(tmp_path):
    """There is one monitor in a recipe or loop."""
    own = MemoryMonitor(memory_snapshot=True)

    assert with_memory_monitor([own], tmp_path) == [own]
    assert [type(each) for each in with_memory_monitor([], tmp_path)] == [MemoryMonitor]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"step_interval": 0}, ValueError, "`step_interval` must be"),
        ({"memory_snapshot": 1}, TypeError, "`memory_snapshot` must be"),
        ({"folder": 3}, TypeError, "`folder` must be"),
    ],
)
def test_arguments_are_checked(arguments, error, says):
    """Bad arguments are refused at once."""
    with pytest.raises(error, match=says):
        MemoryMonitor(**arguments)


def test_what_the_loop_lacks(tmp_path):
    """A run folder is needed, and a snapshot needs a device whose allocations torch notes."""
    state, control = TrainerState(), TrainerControl()
    with pytest.raises(ValueError, match="MemoryMonitor needs `folder`"):
        MemoryMonitor().on_train_begin(None, state, control)
    monitor = MemoryMonitor(memory_snapshot=True, folder=tmp_path)
    with pytest.raises(ValueError, match="`memory_snapshot` must be False on cpu"):
        monitor.on_train_begin(None, state, control, model=Filling())
