"""Train, stop and resume with a Trainer, and collect the whole state at the end of a run."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
from mfwrap.callbacks import EMACallback, MFLossMonitor
from mfwrap.trainer import MFTrainer
from support.spoilt.gpt2 import Rows, padded, tiny_gpt2
from support.training_state import training_state

__all__ = [
    "NUM_STEPS",
    "PLAIN",
    "STEPS_AN_EPOCH",
    "RunSettings",
    "StopAfter",
    "end_of",
    "files",
    "logged",
    "new_trainer",
    "resume",
    "spoil_random_states",
    "trained",
]

NUM_STEPS, STEPS_AN_EPOCH = 12, 6


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run, as values that JSON can hold."""

    optim: str = "adamw_torch_fused"
    spoilt_rows: tuple[int, ...] = (3, 17, 30)
    """Rows with a NaN loss, whose updates are skipped."""

    spike_policy: Literal["record", "skip", "clip"] = "record"
    dynamic_scale: bool = True
    max_grad_norm: float = 0.5
    ema: bool = True
    sampling: str = "random"
    workers: int = 0
    dropout: float = 0.1
    save_steps: int = 1
    logging_steps: int = 1
    evaluates: bool = False
    """Whether to evaluate every other step, with callbacks that have a state."""


PLAIN = RunSettings(spoilt_rows=(), max_grad_norm=0.0, dynamic_scale=False, ema=False)
"""Settings without skips, clipping, scaling and average: bit-identical to a stock Trainer."""


class StopAfter(TrainerCallback):
    """Save and stop after a step, like a job with a time limit.

    Args:
        step: Number of updates before the stop.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _args, state, control, **_: Any) -> None:
        """Request a checkpoint and the end of the training."""
        if state.global_step == self._step:
            control.should_save = control.should_training_stop = True


def new_trainer(
    folder: Path,
    settings: RunSettings | None = None,
    *,
    kind: type[Trainer] = MFTrainer,
    seed: int = 0,
    callbacks: Sequence[TrainerCallback] = (),
    trainer_settings: Mapping[str, Any] | None = None,
    model: Any = None,
    **arguments: Any,
) -> Any:
    """Return a silent trainer on CPU that shares no state with earlier ones.

    Args:
        folder: Folder for checkpoints.
        settings: Settings of the run.
        kind: Class of the trainer.
        seed: Seed of the initial weights.
        callbacks: Callbacks of the user.
        trainer_settings: Further keywords of the trainer.
        model: Model to train; by default a new tiny GPT-2 with the dropout of `settings`.
        arguments: Keywords of ``TrainingArguments``, which override `settings`.
    """
    settings = RunSettings() if settings is None else settings
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if settings.evaluates:
        callbacks = [*callbacks, EarlyStoppingCallback(NUM_STEPS), EMACallback(), MFLossMonitor()]
    keywords = _step_keywords(settings) if issubclass(kind, MFTrainer) else {}
    trainer = kind(
        tiny_gpt2(settings.dropout, seed) if model is None else model,
        TrainingArguments(str(folder), **(_arguments(settings) | arguments)),
        train_dataset=Rows(settings.spoilt_rows),
        eval_dataset=Rows(),
        data_collator=padded,
        callbacks=list(callbacks),
        **(keywords | dict(trainer_settings or {})),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(settings: RunSettings) -> dict[str, Any]:
    """Return the ``TrainingArguments`` of `settings`."""
    evaluations = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "save_steps": 2,
        "restore_callback_states_from_checkpoint": True,
    }
    arguments = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
        "optim": settings.optim,
        "max_grad_norm": settings.max_grad_norm,
        "train_sampling_strategy": settings.sampling,
        "dataloader_num_workers": settings.workers,
        "save_steps": settings.save_steps,
        "logging_steps": settings.logging_steps,
    }
    return arguments | (evaluations if settings.evaluates else {})


def _step_keywords(settings: RunSettings) -> dict[str, Any]:
    """Return the keywords of an `MFTrainer` that a stock Trainer does not have."""
    average = (lambda m: ExponentialMovingAverage(m, 0.9, warmup=True)) if settings.ema else None
    return {
        "ema": average,
        "scale_sense": DynamicLossScaleUpdateCell(2.0**10, 2, 2)
        if settings.dynamic_scale
        else None,
        "step": StepConfig(
            local_norm=True, local_norm_groups="layer", spike_policy=settings.spike_policy
        ),
    }


def trained(folder: Path, settings: RunSettings | None = None, **keywords: Any) -> Any:
    """Return a trainer that has trained to the end, for the same arguments as `new_trainer`."""
    trainer = new_trainer(folder, settings, **keywords)
    trainer.train()
    return trainer


def resume(
    checkpoint: Path, folder: Path, settings: RunSettings | None = None, **keywords: Any
) -> Any:
    """Return a trainer that has resumed a checkpoint and trained to the end.

    The trainer starts with other weights and random states than the saved run, so the result is
    right only if all weights and random states are restored from the checkpoint.
    """
    trainer = new_trainer(folder, settings, seed=1, **keywords)
    spoil_random_states()
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def spoil_random_states() -> None:
    """Put every random generator into a state that no run has had."""
    torch.rand(12345)
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002  (collators use the global generator)


_TIMES = ("runtime", "per_second")


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the log without times, and without the final entry of each call of ``train``."""
    history = [entry for entry in trainer.state.log_history if "train_loss" not in entry]
    return [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
        for entry in history
    ]


class _Rest:
    """Collect the state of a trainer, except its weights, optimizer and schedule."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        numpy_state = np.random.get_state()  # noqa: NPY002  (a checkpoint holds its state)
        rest = {
            # Compare the log as text: a NaN then equals a NaN, and numbers must agree exactly.
            "log": json.dumps(logged(self._trainer), sort_keys=True),
            "progress": [state.global_step, state.epoch, state.total_flos],
            "training losses": [
                entry["train_loss"] for entry in state.log_history if "train_loss" in entry
            ],
            "best": [state.best_metric, state.best_global_step],
            "python generator": random.getstate(),
            "numpy generator": [numpy_state[1].tobytes(), *numpy_state[2:]],
            "torch generator": torch.random.get_rng_state(),
            "callbacks": json.dumps(
                [each.state() for each in self._trainer.callback_handler.callbacks if _saves(each)],
                sort_keys=True,
            ),
        }
        if isinstance(self._trainer, MFTrainer):
            rest["step"] = self._trainer.attached.attachment.step.state_dict()
            rest["step log"] = self._trainer._MFTrainerMixin__losses.step_log.state_dict()
        return rest


def _saves(callback: TrainerCallback) -> bool:
    return callable(getattr(callback, "state", None))


def end_of(trainer: Any) -> dict[str, Any]:
    """Return copies of the whole state at the end of a run, as one flat mapping."""
    return training_state(
        trainer.model, trainer.optimizer.optimizer, trainer.lr_scheduler, _Rest(trainer)
    )


def files(folder: Path) -> list[str]:
    """Return the names of all files below a folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
