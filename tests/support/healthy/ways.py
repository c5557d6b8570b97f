"""Run a healthy training in one of five ways, under the monitor or without it."""

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import LoopMonitor, TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.healthy.training import Batch, Part, Training

__all__ = ["WAYS", "Settings", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to run a training."""

    way: str
    """Key of `WAYS`, or ``"trainer"``."""

    num_steps: int
    max_norm: float | None = None
    """Limit of the global norm; ``None`` for no clipping."""

    resumes: bool = False
    """Whether the run is saved in its middle, and continued by new objects."""


class _Loop(Protocol):
    """What updates one part, and sends the events of the loop to its monitor."""

    def update(self, batches: list[Batch]) -> Tensor:
        """Do one update, and return its loss."""
        ...

    def close(self) -> None:
        """Write what is pending."""
        ...


def _formats(watches: tuple[str, ...]) -> dict[str, Any]:
    """Return what the monitor writes: all that its judges of steps see."""
    names = ("local_norm_format", "local_loss_format", "update_ratio_format", *watches)
    return dict.fromkeys(names, "jsonl")


def _cell(part: Part, settings: Settings) -> MFTrainOneStepCell:
    return MFTrainOneStepCell(
        part.network,
        part.optimizer,
        settings.max_norm is not None,
        settings.max_norm or 1.0,
        part.loss_scale,
        True,  # noqa: FBT003  (MindFormers' signature)
        lr_scheduler=part.schedule,
        ema=part.average,
        max_consecutive_skips=None,
    )


class _CellWithEvents:
    """A loop over the cell that sends the events to a `TrainingStateMonitor` itself."""

    def __init__(
        self, part: Part, settings: Settings, folder: Path | None, watches: tuple[str, ...]
    ) -> None:
        self._part = part
        self._cell = _cell(part, settings)
        self._state = TrainerState(max_steps=settings.num_steps, is_world_process_zero=True)
        self._monitor = None
        if folder is not None:
            self._monitor = TrainingStateMonitor(folder=folder, replay=True, **_formats(watches))
        self._send("on_train_begin")

    def update(self, batches: list[Batch]) -> Tensor:
        """Do one update between the events of its begin and its end."""
        self._send("on_step_begin")
        output = self._cell.step(batches)
        self._state.global_step += 1
        self._send("on_step_end", step_output=output, step_report=self._cell.last_report)
        return output.loss

    def close(self) -> None:
        """End the training."""
        self._send("on_train_end")

    def _send(self, event: str, **keywords: Any) -> None:
        if self._monitor is not None:
            getattr(self._monitor, event)(
                None,
                self._state,
                TrainerControl(),
                model=self._part.network,
                optimizer=self._part.optimizer,
                lr_scheduler=self._part.schedule,
                **keywords,
            )


class _CellWithLoopMonitor:
    """A loop over the cell with `LoopMonitor`."""

    def __init__(
        self, part: Part, settings: Settings, folder: Path | None, watches: tuple[str, ...]
    ) -> None:
        self._cell = _cell(part, settings)
        self._monitor = None
        if folder is not None:
            self._monitor = LoopMonitor(self._cell, folder, replay=True, **_formats(watches))

    def update(self, batches: list[Batch]) -> Tensor:
        """Do one update."""
        output = self._cell.step(batches)
        if self._monitor is not None:
            self._monitor.end_step()
        return output.loss

    def close(self) -> None:
        """Write what is pending."""
        self._cell.flush()
        if self._monitor is not None:
            self._monitor.close()


class _Attached:
    """A loop of accelerate with an attached step and `LoopMonitor`."""

    def __init__(
        self, part: Part, settings: Settings, folder: Path | None, watches: tuple[str, ...]
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        self._max_norm = settings.max_norm
        config = StepConfig(local_norm=True, max_consecutive_skips=None)
        attached = attach(self.accelerator, config)
        parts = [part.network, part.optimizer]
        if part.schedule is not None:
            parts.append(part.schedule)
        self._network, self._optimizer, *self._schedules = self.accelerator.prepare(*parts)
        self._monitor = None
        if folder is not None:
            self._monitor = LoopMonitor(attached, folder, replay=True, **_formats(watches))

    def update(self, batches: list[Batch]) -> Tensor:
        """Do one update with one micro-batch."""
        (batch,) = batches
        with self.accelerator.accumulate(self._network):
            loss = self._network(**batch)
            self.accelerator.backward(loss)
            if self._max_norm is not None:
                self.accelerator.clip_grad_norm_(self._network.parameters(), self._max_norm)
            self._optimizer.step()
            for schedule in self._schedules:
                schedule.step()
            self._optimizer.zero_grad()
        if self._monitor is not None:
            self._monitor.end_step()
        return loss

    def close(self) -> None:
        """Write what is pending."""
        self.accelerator.end_training()
        if self._monitor is not None:
            self._monitor.close()


class _Plain:
    """A loop of plain torch, with `LoopMonitor` on the optimizer."""

    def __init__(
        self, part: Part, settings: Settings, folder: Path | None, watches: tuple[str, ...]
    ) -> None:
        self._part, self._max_norm = part, settings.max_norm
        self._monitor = None
        if folder is not None:
            formats = dict.fromkeys(("update_ratio_format", *watches), "jsonl")
            self._monitor = LoopMonitor(part.optimizer, folder, model=part.network, **formats)

    def update(self, batches: list[Batch]) -> Tensor:
        """Do one update, as most loops do."""
        part = self._part
        losses = []
        for batch in batches:
            loss = part.network(**batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        weights = list(part.network.parameters())
        limit = float("inf") if self._max_norm is None else self._max_norm
        norm = nn.utils.clip_grad_norm_(weights, limit)
        part.optimizer.step()
        if part.schedule is not None:
            part.schedule.step()
        part.optimizer.zero_grad()
        total = torch.stack(losses).sum()
        if self._monitor is not None:
            self._monitor.end_step(total, grad_norm=norm)
        return total

    def close(self) -> None:
        """Write what is pending."""
        if self._monitor is not None:
            self._monitor.close()


WAYS: dict[str, Callable[..., _Loop]] = {
    "events": _CellWithEvents,
    "loop": _CellWithLoopMonitor,
    "attach": _Attached,
    "plain": _Plain,
}
"""Loops by name; ``"trainer"`` is not among them, because MFTrainer has its own."""


class _ForTrainer(nn.Module):
    """Return a loss as a Trainer expects it."""

    accepts_loss_kwargs = False

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.network = part.network

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Return the loss of a micro-batch."""
        return {"loss": self.network(**batch)}


class _Batches(torch.utils.data.Dataset):
    """Each row is the micro-batch of a step."""

    def __init__(self, part: Part, num_steps: int) -> None:
        self._part, self._num_steps = part, num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, number: int) -> Batch:
        (batch,) = self._part.batches(number + 1)
        return batch


class _InOrder(MFTrainer):
    """Trainer that takes the rows in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


class _After(TrainerCallback):
    """Keep the loss of each step, and do what the loop does after it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.losses: list[Tensor] = []

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Keep the loss of the step."""
        self.losses.append(others["step_output"].loss.clone())
        self._training.after(state.global_step)


def _run_trainer(training: Training, settings: Settings, folder: Path | None) -> list[Tensor]:
    (part,) = training.parts
    after = _After(training)
    callbacks: list[TrainerCallback] = [after]
    if folder is not None:
        callbacks.append(TrainingStateMonitor(replay=True, **_formats(training.watches)))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = _InOrder(
            model=_ForTrainer(part),
            args=TrainingArguments(
                output_dir=str(folder),
                per_device_train_batch_size=1,
                max_steps=settings.num_steps,
                max_grad_norm=settings.max_norm or 0.0,
                lr_scheduler_type="constant",
                logging_steps=50,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                log_level="error",
                use_cpu=True,
                dataloader_pin_memory=False,
                remove_unused_columns=False,
            ),
            train_dataset=_Batches(part, settings.num_steps),
            data_collator=lambda rows: rows[0],
            optimizers=(part.optimizer, part.schedule),
            callbacks=callbacks,
            step=StepConfig(local_norm=True, max_consecutive_skips=None),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return after.losses


def _new_loops(training: Training, settings: Settings, folder: Path | None) -> list[_Loop]:
    several = len(training.parts) > 1
    return [
        WAYS[settings.way](
            part,
            settings,
            folder / f"part{number}" if folder is not None and several else folder,
            training.watches,
        )
        for number, part in enumerate(training.parts)
    ]


def _resumed(
    make: Callable[[], Training], settings: Settings, loop: _Attached, folder: Path | None
) -> tuple[Training, list[_Loop]]:
    """Save a loop, and continue it with new objects, as a new process does."""
    with tempfile.TemporaryDirectory() as saved:
        loop.accelerator.save_state(saved)
        loop.close()
        training = make()
        loops = _new_loops(training, settings, folder)
        loops[0].accelerator.load_state(saved)
    return training, loops


def run(
    make: Callable[[int, int], Training],
    settings: Settings,
    seed: int,
    *,
    folder: Path | None = None,
) -> tuple[Training, list[float]]:
    """Run a training.

    Args:
        make: Makes the training from a seed and its number of steps.
        settings: How to run it.
        seed: Seed of weights, data and dropout.
        folder: Run folder of the monitor; ``None`` trains without the monitor.

    Returns:
        The training, and the loss of each update of each part.
    """

    def new() -> Training:
        torch.manual_seed(seed)
        return make(seed, settings.num_steps)

    training = new()
    if settings.way == "trainer":
        return training, [loss.item() for loss in _run_trainer(training, settings, folder)]
    loops = _new_loops(training, settings, folder)
    losses: list[Tensor] = []
    for step in range(1, settings.num_steps + 1):
        for part, loop in zip(training.parts, loops, strict=True):
            losses.append(loop.update(part.batches(step)).detach())
        training.after(step)
        if settings.resumes and step == settings.num_steps // 2:
            training, loops = _resumed(new, settings, loops[0], folder)
    for loop in loops:
        loop.close()
    return training, [loss.item() for loss in losses]
