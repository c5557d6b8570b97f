"""Loops of a user, without a Trainer, that a `ForkServer` runs; see `support.crash.loops`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformers import TrainerControl, TrainerState

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    StepConfig,
)
from mfwrap.accelerate import attach
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.records import resume_records, save_records
from mfwrap.sharded_checkpoint import ShardedSaver, load_sharded, save_sharded
from mfwrap.tensors.shards import is_distributed
from support.crash.loops import RUN, monitors, newest_checkpoint, write_end
from support.small_networks import Classifier, labelled_batches
from support.training_state import training_state

__all__ = ["attached", "attached_in_background", "cell", "sharded", "sharded_in_background"]

_NUM_UPDATES, _SAVE_STEPS, _LOG_STEPS, _BAD_UPDATE = 9, 2, 3, 5


def attached() -> None:
    """Train with an accelerate loop that mfwrap's step is attached to."""
    _attached(in_background=False)


def attached_in_background() -> None:
    """Do what `attached` does, and save in the background."""
    _attached(in_background=True)


def _attached(*, in_background: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    step = attach(
        accelerator,
        StepConfig(local_norm=True),
        lambda network: ExponentialMovingAverage(network, decay=0.9),
        scale_sense=DynamicLossScaleUpdateCell(2.0**64, 2, 2),  # overflows in the first step
        async_save=in_background,
    )
    network, optimizer = accelerator.prepare(*_network())

    def update(number: int) -> Any:
        for inputs, labels in _micro_batches(number):
            with accelerator.accumulate(network):
                # Random numbers, which a checkpoint restores.
                noisy = inputs + 0.01 * torch.randn_like(inputs)
                accelerator.backward(network(noisy, labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return step.last_report

    judge = _train(
        update,
        lambda folder: accelerator.save_state(str(folder)),
        lambda folder: accelerator.load_state(str(folder)),
        step.wait_for_checkpoint if in_background else None,
    )
    write_end(
        {
            **training_state(network, optimizer.optimizer, step.attachment.step),
            "monitor": judge.state(),
        }
    )


def cell() -> None:
    """Train with a loop around a cell."""
    ranks = PartialState(cpu=True)
    network, optimizer = _network()
    if ranks.num_processes > 1:
        network = DistributedDataParallel(network)
    step = _step(network, optimizer)
    parts = {"network": network, "optimizer": optimizer, "cell": step}

    def update(number: int) -> Any:
        step.step(_micro_batches(number))
        return step.last_report

    def save(folder: Path) -> None:
        state = {name: part.state_dict() for name, part in parts.items()}
        if ranks.is_main_process:
            folder.mkdir()
            torch.save(state, folder / "state.pt")
        ranks.wait_for_everyone()
        save_records(folder)

    def load(folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        resume_records(folder)

    judge = _train(update, save, load)
    write_end({**training_state(network, optimizer, step), "monitor": judge.state()})


def sharded() -> None:
    """Train with a loop around a cell whose network is sharded over the ranks."""
    _sharded(in_background=False)


def sharded_in_background() -> None:
    """Do what `sharded` does, and save in the background."""
    _sharded(in_background=True)


def _sharded(*, in_background: bool) -> None:
    ranks = PartialState(cpu=True)
    network = _classifier()
    if ranks.num_processes > 1:
        fully_shard(network, mesh=init_device_mesh("cpu", (ranks.num_processes,)))
    optimizer = _optimizer(network)
    step = _step(network, optimizer)
    saver = ShardedSaver(step)

    def update(number: int) -> Any:
        step.step(_micro_batches(number))
        return step.last_report

    def save(folder: Path) -> None:
        if in_background:
            saver.save(folder / "state")
        else:
            save_sharded(folder / "state", step)
        save_records(folder)

    def load(folder: Path) -> None:
        load_sharded(folder / "state", step)
        resume_records(folder)

    judge = _train(update, save, load, saver.wait if in_background else None)
    saver.close()
    state = training_state(network, optimizer, step)
    whole = {
        name: value.full_tensor() if is_distributed(value) else value
        for name, value in state.items()
    }
    write_end({**whole, "monitor": judge.state()})


def _train(
    update: Callable[[int], Any],
    save: Callable[[Path], None],
    load: Callable[[Path], None],
    wait: Callable[[], None] | None = None,
) -> TrainingStateMonitor:
    """Make all updates, write checkpoints and records; return the monitor that has a state.

    Args:
        update: Makes an update.
        save: Begins to save.
        load: Loads a checkpoint.
        wait: Waits for the checkpoint; ``None`` if `save` returns when it is written.
    """
    ranks, state, control = PartialState(), TrainerState(max_steps=_NUM_UPDATES), TrainerControl()
    state.is_world_process_zero = ranks.is_main_process
    callbacks = monitors()
    (judge,) = (each for each in callbacks if isinstance(each, TrainingStateMonitor))

    def notify(event: str, **values: Any) -> None:
        for callback in callbacks:
            getattr(callback, event)(None, state, control, **values)

    checkpoint = newest_checkpoint()
    if checkpoint is not None:
        load(Path(checkpoint))
        saved = json.loads(Path(checkpoint, "loop.json").read_text(encoding="utf-8"))
        state.global_step, judge.saved_run = saved["step"], saved["monitor"]
    begun: list[tuple[int, str]] = []
    notify("on_train_begin")
    for number in range(state.global_step + 1, _NUM_UPDATES + 1):
        report = update(number)
        state.global_step = number
        notify("on_step_end", step_output=report.output, step_report=report)
        if number % _LOG_STEPS == 0:
            notify("on_log")
        if number % _SAVE_STEPS == 0:
            _complete(begun, wait)
            notify("on_pre_save")
            partial = RUN / f"{number}.partial"
            if ranks.is_main_process:
                shutil.rmtree(partial, ignore_errors=True)
            ranks.wait_for_everyone()
            save(partial)
            monitor = judge.state()["attributes"]["saved_run"] if ranks.is_main_process else None
            begun.append((number, json.dumps({"step": number, "monitor": monitor})))
            if wait is None:
                _complete(begun, None)
    _complete(begun, wait)
    notify("on_train_end")
    return judge


def _complete(begun: list[tuple[int, str]], wait: Callable[[], None] | None) -> None:
    """Give the checkpoints that were begun their last file and their names."""
    if wait is not None:
        wait()
    ranks = PartialState()
    for number, saved in begun:
        partial = RUN / f"{number}.partial"
        ranks.wait_for_everyone()
        if ranks.is_main_process:
            (partial / "loop.json").write_text(saved, encoding="utf-8")
            partial.rename(RUN / f"checkpoint-{number}")
        ranks.wait_for_everyone()
    begun.clear()


def _network() -> tuple[torch.nn.Module, AdamW]:
    network = _classifier()
    return network, _optimizer(network)


def _step(network: torch.nn.Module, optimizer: AdamW) -> MFTrainOneStepCell:
    return MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        scale_sense=DynamicLossScaleUpdateCell(2.0**64, 2, 2),
        local_norm=True,
        ema=ExponentialMovingAverage(network, decay=0.9),
    )


def _classifier() -> torch.nn.Module:
    # A checkpoint of accelerate holds the random states of Python and NumPy, too.
    set_seed(0)
    return Classifier()


def _optimizer(network: torch.nn.Module) -> AdamW:
    return AdamW(network.parameters(), lr=0.1, fused=True)


def _micro_batches(number: int) -> list[tuple[Tensor, Tensor]]:
    """Return the two micro-batches of this rank for an update; one update is skipped."""
    (first, labels), second = labelled_batches(
        2, size=4, seed=100 * number + PartialState().process_index
    )
    return [(first * (float("nan") if number == _BAD_UPDATE else 1), labels), second]
