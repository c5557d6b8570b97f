"""Trainings that stop and resume on another number of ranks, and record the rows they train on."""

import contextlib
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks.shared.progress import RunSettings, global_batch_size
from mfwrap.runner import run_recipe
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from mfwrap.trainer.data.global_batch import TrainerBatch
from mfwrap.trainer.data.skip import DataStart
from support.attached_runs import new_accelerator
from support.recipe_texts import parsed
from support.resumed_training import StopAfter

__all__ = [
    "NUM_ROWS",
    "NUM_STEPS",
    "loop_until",
    "recipe_until",
    "resume_only",
    "train_until",
    "trainer_of",
    "warnings_of_resume",
]

NUM_ROWS, NUM_STEPS = 60, 20


class Numbered(Dataset[dict[str, Tensor]]):
    """Rows of a regression with their numbers."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < NUM_ROWS:
            raise IndexError(index)
        inputs = torch.arange(4.0).add(index).sin()
        return {
            "row": torch.tensor(index),
            # The length of a row, for samplers that group rows by length.
            "input_ids": torch.ones(1 + index % 5),
            "inputs": inputs,
            "labels": inputs.sum().cos(),
        }


class NumberedStream(IterableDataset[dict[str, Tensor]]):
    """The rows of `Numbered` in their order, as a data set without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Numbered()
        return (rows[index % len(rows)] for index in range(4 * len(rows)))


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as one batch, without the column that only has their length."""
    names = ("row", "inputs", "labels")
    return {name: torch.stack([row[name] for row in rows]) for name in names}


class Regression(nn.Module):
    """A small regression that records the rows it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.rows: list[int] = []

    def forward(self, inputs: Tensor, labels: Tensor, row: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        if self.training:
            self.rows += row.tolist()
        return {"loss": (self.layers(inputs).squeeze(-1) - labels).square().mean()}


class _RowsOfUpdates(TrainerCallback):
    def __init__(self, model: Regression) -> None:
        self._model = model
        self.of_update: dict[int, list[int]] = {}
        self.global_batches: set[int] = set()

    def on_step_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.global_batches.add(global_batch_size(RunSettings(), state, args))
        self.of_update[state.global_step], self._model.rows = self._model.rows, []


def _newest(folder: str) -> Path | None:
    found = sorted(Path(folder).glob("*-*[0-9]"), key=lambda path: int(path.name.partition("-")[2]))
    return found[-1] if found else None


def train_until(
    rank: int, folder: str, stop: int, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train with `MFTrainer` until a step; resume from the newest checkpoint, if there is one.

    Args:
        rank: This rank.
        folder: Run folder.
        stop: Step to stop after.
        settings: Keywords of ``TrainingArguments``; also ``data``, the name of a data set, and
            ``data_skip_steps``, ``skip_rows`` and ``rampup_batch_size``.

    Returns:
        This rank's rows of each update, the losses in the log, the weights at the end, and the
        global batches that a monitor would show.
    """
    del rank
    # The processes of a pool are daemons, which may not start worker processes.
    multiprocessing.current_process()._config["daemon"] = False
    trainer = trainer_of(folder, settings)
    model: Any = trainer.model
    rows = _RowsOfUpdates(model)
    for callback in (rows, StopAfter(stop)):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=_newest(folder) is not None)
    return {
        "rows": rows.of_update,
        "global_batches": sorted(rows.global_batches),
        "losses": _logged(trainer.state),
        "weights": {name: each.detach().clone() for name, each in model.state_dict().items()},
    }


def trainer_of(folder: str, settings: Mapping[str, Any] | None = None) -> MFTrainer:
    """Return a trainer of a `Regression`.

    Args:
        folder: Run folder.
        settings: As in `train_until`.
    """
    new_accelerator()
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 6,
        "num_train_epochs": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    } | dict(settings or {})
    data = {"rows": Numbered, "stream": NumberedStream}[arguments.pop("data", "rows")]()
    names = ("data_skip_steps", "skip_rows", "rampup_batch_size")
    extras = {name: arguments.pop(name, None) for name in names}
    trainer = MFTrainer(
        Regression(),
        TrainingArguments(folder, **arguments),
        train_dataset=data,
        data_collator=collated,
        step=StepConfig(local_norm=True),
        ema=lambda model: ExponentialMovingAverage(model, 0.9),
        **extras,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def resume_only(rank: int, folder: str, settings: Mapping[str, Any] | None = None) -> None:
    """Read the global batch of a checkpoint, begin an epoch, and train on nothing.

    Args:
        rank: This rank.
        folder: Folder of the checkpoint.
        settings: As in `train_until`.
    """
    del rank
    trainer = trainer_of(folder, settings)
    batch = TrainerBatch(trainer, StepConfig())
    with batch.resuming(Path(folder)):
        batch.check_epoch(NUM_STEPS, has_length=False)
        batch.begin_epoch(trainer.get_train_dataloader(), DataStart(0, 0, 0))


def warnings_of_resume(
    rank: int, folder: str, settings: Mapping[str, Any] | None = None
) -> list[str]:
    """Return what this rank warns of in `resume_only`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume_only(rank, folder, settings)
    return [str(each.message) for each in caught]


def loop_until(rank: int, folder: str, stop: int, length: str, steps: int = 6) -> dict[str, Any]:
    """Train with an attached accelerate loop, as `train_until` does with a Trainer.

    Args:
        rank: This rank.
        folder: Run folder.
        stop: Update to stop after.
        length: How the loop computes the length of its schedule: ``"batches"`` as accelerate's
            examples do, ``"processes"`` or ``"mixed"`` as those of transformers do, or ``"other"``.
        steps: Accumulation steps in the loop's settings.

    Returns:
        The same as `train_until`, and the learning rates.
    """
    del rank
    accelerator = new_accelerator(
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    attached = attach(accelerator, StepConfig(), lambda m: ExponentialMovingAverage(m, 0.9))
    model = inner = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    loader = DataLoader(Numbered(), batch_size=1, shuffle=True, collate_fn=collated)
    schedule = _loop_schedule(optimizer, len(loader), accelerator, length)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    done = 0
    checkpoint = _newest(folder)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        done = int(checkpoint.name.removeprefix("step-"))
    per_epoch = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    rows, losses, rates = {}, {}, {}
    for epoch in range(done // per_epoch, 4):
        loader.set_epoch(epoch)
        skipped = (done - epoch * per_epoch) * accelerator.gradient_accumulation_steps
        rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        rest.set_epoch(epoch)  # before 1.13, accelerate would shuffle as in the first epoch
        total_loss = 0.0
        for batch in rest:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                total_loss += loss.item() / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                rates[done] = attached.last_output.learning_rate.item()
                losses[done] = accelerator.reduce(torch.tensor(total_loss), "mean").item()
                rows[done], inner.rows, total_loss = inner.rows, [], 0.0
                if done == stop:
                    accelerator.save_state(f"{folder}/step-{done}")
                    break
        if done == stop:
            break
    return {
        "rows": rows,
        "losses": losses,
        "rates": rates,
        "weights": {name: each.detach().clone() for name, each in inner.state_dict().items()},
    }


def _loop_schedule(
    optimizer: torch.optim.Optimizer, num_batches: int, accelerator: Accelerator, length: str
) -> Any:
    """Return the schedule of a loop before it is prepared; see `loop_until`."""
    of_data = num_batches * 4 // accelerator.gradient_accumulation_steps
    if length == "other":
        return LambdaLR(optimizer, lambda step: 1 / (1 + step * accelerator.num_processes**2))
    if length == "mixed":
        # Examples of transformers that train for epochs multiply only the warm-up.
        warm_up = 3 * accelerator.num_processes
        return get_linear_schedule_with_warmup(optimizer, warm_up, of_data)
    total = of_data if length == "batches" else NUM_STEPS * accelerator.num_processes
    return get_linear_schedule_with_warmup(optimizer, total // 5, total)


def recipe_until(rank: int, folder: str, stop: int) -> dict[str, Any]:
    """Train as ``mfwrap train`` does until a SIGTERM to rank 0; see `train_until`.

    Args:
        rank: This rank.
        folder: Run folder.
        stop: Step in which rank 0 gets the signal. The run ends after this step or the next one.

    Returns:
        The same as `train_until`. A row is its features as text; there are no weights.
    """
    new_accelerator()
    recipe = parsed(
        data={"max_train_samples": NUM_ROWS, "max_eval_samples": 2},
        training={
            "output_dir": folder,
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 6,
            "save_strategy": "steps",
            "save_steps": 1000,
            "dataloader_pin_memory": False,
            "report_to": "none",
        },
        callbacks=[{"type": "LocalNormMonitor", "step_interval": 1}],
        runner_wrapper={"local_norm": True, "use_clip_grad": True},
        ema={"decay": 0.9},
    )
    rows: dict[int, list[str]] = {}
    training_step = MFTrainerMixin.training_step

    def recorded(trainer: Any, model: nn.Module, inputs: dict[str, Any], *rest: Any) -> Tensor:
        step = trainer.state.global_step + 1
        rows.setdefault(step, []).extend(str(row) for row in inputs["features"].tolist())
        if rank == 0 and step == stop < NUM_STEPS and len(rows[step]) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(trainer, model, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(MFTrainerMixin, "training_step", recorded)
        run_recipe(recipe, resume=_newest(folder) is not None)
    newest: Any = _newest(folder)
    state = TrainerState.load_from_json(str(newest / "trainer_state.json"))
    return {"rows": rows, "losses": _logged(state), "weights": {}}


def _logged(state: TrainerState) -> dict[int, float]:
    """Return the logged losses by step."""
    return {each["step"]: each["loss"] for each in state.log_history if "loss" in each}
