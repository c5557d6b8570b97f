"""Programs that each rank runs to save a sharded checkpoint or to resume from one.

The number of ranks that save and the number of ranks that resume may differ.
"""

import errno
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    WithLossCell,
    sharded_checkpoint,
)
from mfwrap.checkpoints import host_copies
from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.checkpoints.step_files import save_tensors
from mfwrap.sharded_checkpoint import ShardedSaver, load_sharded, save_sharded
from support.fsdp.networks import Case, micro_batches_of, new_model, optimizer_of, sharded
from support.fsdp.training import whole

__all__ = [
    "end_the_group_first",
    "load",
    "load_damaged",
    "load_into_another",
    "refuse_folders",
    "save",
    "save_by_torch_alone",
    "save_later",
    "save_later_in_vain",
    "tied",
]

NUM_BEFORE, NUM_AFTER = 4, 2


class _Training(NamedTuple):
    cell: MFTrainOneStepCell
    scheduler: LRScheduler


def _training(layout: str, optimizer: str, *, dynamic: bool = True) -> _Training:
    network = new_model(per_token=False)
    if layout == "ddp":
        network = DistributedDataParallel(network, find_unused_parameters=True)
    elif layout != "plain":
        network = sharded(network, Case(layout))
    inner = optimizer_of(optimizer, network)
    scheduler = CosineAnnealingLR(inner, 50)
    cell = MFTrainOneStepCell(
        network,
        inner,
        use_clip_grad=True,
        scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 3) if dynamic else 1024.0,
        lr_scheduler=scheduler,
        ema=ExponentialMovingAverage(network, decay=0.75, warmup=True),
    )
    return _Training(cell, scheduler)


def _train(training: _Training, rank: int, steps: range) -> None:
    for step in steps:
        [batch] = micro_batches_of(Case(), step, rank)
        # One overflow, so that the loss scale and its counters differ from their initial values.
        training.cell(*batch, float("nan") if step == 1 else 1.0)
    training.cell.flush()


def _state(training: _Training) -> dict[str, Any]:
    """Return the whole state of a training, with sharded tensors gathered."""
    cell, network = training.cell, training.cell.network
    own = cell.state_dict()
    state = {name.replace("module.", ""): p for name, p in network.named_parameters()}
    tensors = {
        f"{kind} {name}": whole(value)
        for kind, values in (("weight", state), ("average", own["ema"]["averages"]))
        for name, value in values.items()
    }
    for name, parameter in state.items():
        for key, value in cell.optimizer.state.get(parameter, {}).items():
            tensors[f"{key} {name}"] = whole(value)
    counters = {**own["loss_scale"]["update_cell"], **own["ema"]["counters"]}
    counters |= {key: own[key] for key in ("applied_updates", "skipped_updates")}
    return {
        **tensors,
        **{name: value.clone() for name, value in counters.items()},
        "scale": own["loss_scale"]["value"],
        "rate": torch.tensor(cell.optimizer.param_groups[0]["lr"], dtype=torch.float64),
        "epoch": torch.tensor(training.scheduler.last_epoch),
    }


def save(rank: int, folder: str, layout: str, optimizer: str) -> dict[str, dict[str, Tensor]]:
    """Train, save a checkpoint and train further; return the saved state and the final state."""
    training = _training(layout, optimizer)
    _train(training, rank, range(NUM_BEFORE))
    save_sharded(folder, training.cell, training.scheduler)
    saved = _state(training)
    _train(training, rank, range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER))
    return {"saved": saved, "end": _state(training)}


def save_later(rank: int, folder: str, layout: str, optimizer: str) -> dict[str, dict[str, Tensor]]:
    """Do what `save` does, but save in the background, and write when the training has ended."""
    training = _training(layout, optimizer)
    _train(training, rank, range(NUM_BEFORE))
    has_ended = threading.Event()

    def write(*arguments: Any) -> None:
        has_ended.wait(60)
        save_tensors(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "save_tensors", write)
        with ShardedSaver(training.cell, training.scheduler) as saver:
            saver.save(folder)
            saved = _state(training)
            _train(training, rank, range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER))
            assert not Path(folder, MANIFEST).exists()
            has_ended.set()
    return {"saved": saved, "end": _state(training)}


def save_later_in_vain(rank: int, folder: str) -> list[str]:
    """Let saves in the background fail on one rank; return the errors, and save at last."""
    training = _training("layers", "fused SGD")
    _train(training, rank, range(NUM_BEFORE))
    errors = []

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def attempt(call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except (OSError, MemoryError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    saver = ShardedSaver(training.cell, training.scheduler)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HuggingFaceStorageWriter, "write_data", fails)
        saver.save(f"{folder}/of shards")
        attempt(saver.wait)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "available_memory", lambda: 10 if rank == 1 else None)
        saver = ShardedSaver(training.cell, training.scheduler)
        attempt(saver.save, f"{folder}/too large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "write_manifest", fails)
        saver.save(f"{folder}/of the manifest")
        attempt(saver.save, f"{folder}/next")
    attempt(saver.save, f"{folder}/of the manifest")
    saver.save(f"{folder}/last")
    saver.close()
    return errors


def refuse_folders(rank: int, folder: str) -> list[str]:
    """Save where the ranks cannot; return the errors, which come on all ranks."""
    training = _training("layers", "fused SGD")
    file = Path(folder, "file")
    if rank == 0:
        file.touch()
    distributed.barrier()
    errors = []
    for path in (f"{folder}/of rank {rank}", file if rank == 1 else f"{folder}/new"):
        try:
            save_sharded(path, training.cell, training.scheduler)
        except (OSError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def end_the_group_first(rank: int, folder: str) -> list[str]:
    """End the process group before a checkpoint is written; return this rank's errors."""
    training = _training("layers", "fused SGD")
    saver = ShardedSaver(training.cell, training.scheduler)
    has_ended = threading.Event()
    errors = []

    def write(*arguments: Any) -> None:
        has_ended.wait(60)
        save_tensors(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "save_tensors", write)
        saver.save(folder)
        distributed.destroy_process_group()
        has_ended.set()
        try:
            saver.close()
        except RuntimeError as error:
            errors.append(str(error))
    saver.close()
    return errors


def tied(rank: int, folder: str) -> bool:
    """Save a network with tied weights and a transposed buffer; return whether they are loaded."""
    first = _tied_cell()
    save_sharded(f"{folder}/at once", first)
    with ShardedSaver(first) as saver:
        saver.save(f"{folder}/later")
    found = []
    for name in ("at once", "later"):
        second = _tied_cell()
        with torch.no_grad():
            for each in (*second.network.parameters(), *second.network.buffers()):
                each.add_(1.0)
        load_sharded(f"{folder}/{name}", second)
        expected = first.network.state_dict()
        found += [
            torch.equal(whole(value), whole(expected[key]))
            for key, value in second.network.state_dict().items()
        ]
        found.append(len(list(second.network.parameters())) == 3)  # a weight and two biases
    return all(found)


def _tied_cell() -> MFTrainOneStepCell:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    network = WithLossCell(torch.nn.Sequential(first, second), torch.nn.MSELoss())
    network.register_buffer("turned", torch.randn(3, 4).t())
    if distributed.is_initialized():
        fully_shard(network, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return MFTrainOneStepCell(network, torch.optim.AdamW(network.parameters(), fused=True))


def load(rank: int, folder: str, layout: str, optimizer: str) -> dict[str, dict[str, Tensor]]:
    """Load a checkpoint into other weights and train further.

    Returns:
        The state after loading and the final state.
    """
    training = _training(layout, optimizer)
    with torch.no_grad():
        for parameter in training.cell.network.parameters():
            parameter.add_(1.0)
    load_sharded(folder, training.cell, training.scheduler)
    loaded = _state(training)
    _train(training, rank, range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER))
    return {"loaded": loaded, "end": _state(training)}


def load_damaged(rank: int, folder: str) -> dict[str, Any]:
    """Load a damaged checkpoint; return the error, and whether the training state is unchanged."""
    training = _training("layers", "fused SGD")
    before = _state(training)
    try:
        load_sharded(folder, training.cell, training.scheduler)
    except ValueError as error:
        after = _state(training)
        unchanged = all(torch.equal(after[name], value) for name, value in before.items())
        return {"message": str(error), "unchanged": unchanged}
    msg = "the damaged checkpoint was loaded"
    raise AssertionError(msg)


def load_into_another(rank: int, folder: str) -> dict[str, Any]:
    """Load a checkpoint in ways that must fail, and save into a folder that is not empty.

    Returns:
        The error messages, and whether the states of all trainings are unchanged.
    """
    messages = {}
    training = _training("layers", "fused AdamW", dynamic=False)
    other_shape = _training("layers", "fused AdamW")
    other_shape.cell.network.register_buffer("more", torch.zeros(3))
    few = _training("layers", "fused AdamW")
    few.cell.optimizer.param_groups[0]["params"].pop()
    other_order = _training("layers", "fused AdamW")
    other_order.cell.optimizer.param_groups[0]["params"].reverse()
    others = (training, other_shape, few, other_order)

    before = [_state(each) for each in others]

    def attempt(name: str, target: _Training, *schedule: Any, path: str = folder) -> None:
        try:
            load_sharded(path, target.cell, *schedule)
        except (KeyError, ValueError, OSError) as error:
            messages[name] = f"{type(error).__name__}: {error}"

    attempt("other loss scale", training, training.scheduler)
    attempt("more buffers", other_shape, other_shape.scheduler)
    attempt("fewer parameters", few, few.scheduler)
    attempt("other order", other_order, other_order.scheduler)
    attempt("no schedule", training)
    attempt("no checkpoint", training, training.scheduler, path=str(Path(folder).parent))
    try:
        save_sharded(folder, training.cell)
    except FileExistsError as error:
        messages["not empty"] = f"{type(error).__name__}: {error}"
    unchanged = all(
        values.keys() == (after := _state(each)).keys()
        and all(torch.equal(values[name], after[name]) for name in values)
        for values, each in zip(before, others, strict=True)
    )
    return {"messages": messages, "unchanged": unchanged}


def save_by_torch_alone(rank: int, folder: str) -> bool:
    """Save and load a cell with torch's own functions; return whether its state is restored."""
    training = _training("layers", "fused AdamW")
    _train(training, rank, range(NUM_BEFORE))
    saved = _state(training)
    checkpoint.save({"cell": training.cell}, checkpoint_id=folder)
    other = _training("layers", "fused AdamW")
    checkpoint.load({"cell": other.cell}, checkpoint_id=folder)
    loaded = _state(other)
    of_cell = [name for name in saved if name.startswith(("average", "scale", "cur_iter"))]
    of_cell += ["applied_updates", "skipped_updates", "num_calls"]
    return all(torch.equal(saved[name], loaded[name]) for name in of_cell)
