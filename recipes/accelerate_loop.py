"""Train with the loop of accelerate's documentation, and with mfwrap's step attached to it.

    python -m mfwrap.recipes.accelerate_loop --output_dir runs/accelerate_loop
    torchrun --nproc_per_node 2 -m mfwrap.recipes.accelerate_loop
    python -m mfwrap.recipes.accelerate_loop --resume_from_checkpoint runs/accelerate_loop/step_100
    python -m mfwrap.recipes.accelerate_loop --resume_from_checkpoint auto

With ``auto``, the same command starts the run, or resumes it from its newest intact checkpoint, as
``torchrun --max-restarts`` needs it. The call of `attach` is the only line of the training that a
plain accelerate loop does not have. Model and text are the same as in `mfwrap.recipes.causal_lm`.
Each epoch ends with an evaluation of raw and of averaged weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import (
    HfArgumentParser,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    get_linear_schedule_with_warmup,
)

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import AttachedStep, attach
from mfwrap.callbacks import MFLossMonitor
from mfwrap.checkpoints import newest_checkpoint
from mfwrap.checkpoints.whole import whole_folder
from mfwrap.collectives import leave_shared_store
from mfwrap.recipes.causal_lm import build_model, evaluate, text_loaders


@dataclass
class Options:
    """Settings of the run."""

    output_dir: Path = field(default=Path("runs/accelerate_loop"), metadata={"help": "run folder"})
    num_train_epochs: int = field(default=2, metadata={"help": "number of passes over the text"})
    micro_batch_size: int = field(default=8, metadata={"help": "texts per micro-batch"})
    gradient_accumulation_steps: int = field(
        default=2, metadata={"help": "micro-batches per update"}
    )
    sequence_length: int = field(default=256, metadata={"help": "longest text, in bytes"})
    max_samples: int | None = field(default=None, metadata={"help": "number of texts, default all"})
    learning_rate: float = field(default=3e-3, metadata={"help": "highest learning rate"})
    warmup_steps: int = field(default=30, metadata={"help": "updates of linear warm-up"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "limit of the global norm"})
    ema_decay: float = field(default=0.95, metadata={"help": "decay of the averaged weights"})
    mixed_precision: str = field(default="no", metadata={"help": "no, bf16 or fp16"})
    per_print_times: int = field(default=10, metadata={"help": "updates between two log lines"})
    checkpointing_steps: int = field(default=100, metadata={"help": "updates between checkpoints"})
    resume_from_checkpoint: Path | None = field(
        default=None,
        metadata={"help": "folder of the checkpoint to resume from; auto: the newest, if any"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the weights and of the data order"})


class Training:
    """Hold the prepared objects of a training, and the number of finished updates.

    Args:
        arguments: Settings of the run.
    """

    def __init__(self, arguments: Options) -> None:
        self.arguments = arguments
        leave_shared_store()
        self.accelerator = Accelerator(
            # Without `cpu=True`, accelerate would not connect several processes on a machine that
            # has no accelerator: each would train alone.
            cpu=not torch.accelerator.is_available(),
            mixed_precision=arguments.mixed_precision,
            gradient_accumulation_steps=arguments.gradient_accumulation_steps,
            # With this sampler, the order of the data depends only on the number of the epoch. So a
            # run can resume in the middle of an epoch.
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        self.attached: AttachedStep = attach(  # the only additional line
            self.accelerator, StepConfig(local_norm=True, local_norm_groups="layer"), self._average
        )
        set_seed(arguments.seed)
        model = build_model(arguments.sequence_length)
        optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate, fused=True)
        loaders = text_loaders(
            arguments.micro_batch_size,
            arguments.sequence_length,
            arguments.seed,
            arguments.max_samples,
        )
        self.training, self.held_out = self.accelerator.prepare(*loaders)
        num_processes = self.accelerator.num_processes
        # At each update accelerate steps the schedule once per process, so multiply both lengths of
        # the schedule by the number of processes.
        schedule = get_linear_schedule_with_warmup(
            optimizer,
            arguments.warmup_steps * num_processes,
            arguments.num_train_epochs * self.updates_per_epoch * num_processes,
        )
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )
        self.num_updates = 0

    def _average(self, model: torch.nn.Module) -> ExponentialMovingAverage:
        return ExponentialMovingAverage(model, self.arguments.ema_decay, warmup=True)

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates of an epoch. It does not depend on the number of processes."""
        steps: int = self.accelerator.gradient_accumulation_steps
        return math.ceil(len(self.training) / steps)

    def resume(self, folder: Path) -> None:
        """Load a checkpoint, and read the number of updates from the name of its folder."""
        self.accelerator.load_state(str(folder))
        self.num_updates = int(folder.name.removeprefix("step_"))

    def batches(self, epoch: int) -> DataLoader[Any]:
        """Return the batches of an epoch that have not been trained on yet."""
        self.training.set_epoch(epoch)
        done = self.num_updates - epoch * self.updates_per_epoch
        skipped = done * self.accelerator.gradient_accumulation_steps
        rest = self.training
        if skipped > 0:
            rest = self.accelerator.skip_first_batches(self.training, skipped)
            rest.set_epoch(epoch)  # before 1.13, accelerate would shuffle as in the first epoch
        loader: DataLoader[Any] = rest
        return loader


class Monitors:
    """Call callbacks in a loop without a Trainer, with the arguments that a Trainer would pass.

    Args:
        callbacks: Callbacks, in the order in which they are called.
        accelerator: Used to find out whether this is the main process.
        global_step: Updates so far, if the run is resumed.
    """

    def __init__(
        self, callbacks: Sequence[TrainerCallback], accelerator: Accelerator, global_step: int = 0
    ) -> None:
        self._callbacks = callbacks
        self.state = TrainerState(
            is_world_process_zero=accelerator.is_main_process, global_step=global_step
        )

    def notify(self, event: str, **values: Any) -> None:
        """Call a method of each callback, such as ``on_step_end``."""
        for callback in self._callbacks:
            getattr(callback, event)(None, self.state, TrainerControl(), **values)


def train_epoch(run: Training, epoch: int, monitors: Monitors) -> None:
    """Train to the end of an epoch: the loop of accelerate's documentation."""
    accelerator, model, optimizer, schedule = (
        run.accelerator,
        run.model,
        run.optimizer,
        run.schedule,
    )
    model.train()
    for batch in run.batches(epoch):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), run.arguments.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.num_updates += 1
            monitors.state.global_step = run.num_updates
            monitors.notify(
                "on_step_end",
                step_output=run.attached.last_output,
                step_report=run.attached.last_report,
            )
            if run.num_updates % run.arguments.checkpointing_steps == 0:
                monitors.notify("on_pre_save")
                accelerator.save_state(str(run.arguments.output_dir / f"step_{run.num_updates}"))
                monitors.notify("on_save")


def loss_monitor(run: Training) -> MFLossMonitor:
    """Return a monitor that logs the run as MindFormers does."""
    arguments = run.arguments
    return MFLossMonitor(
        per_print_times=arguments.per_print_times,
        origin_epochs=arguments.num_train_epochs,
        dataset_size=run.updates_per_epoch,
        global_batch_size=arguments.micro_batch_size
        * run.accelerator.gradient_accumulation_steps
        * run.accelerator.num_processes,
    )


def evaluate_both(run: Training) -> tuple[float, float]:
    """Return the loss of raw and of averaged weights on held-out text."""
    raw = evaluate(run.model, run.held_out, run.accelerator)
    ema = run.attached.ema
    if ema is None:
        msg = "`attach` made no average of the weights; check its `ema` argument"
        raise RuntimeError(msg)
    with ema.swap():
        return raw, evaluate(run.model, run.held_out, run.accelerator)


def main() -> None:
    """Train, evaluate after each epoch, and save the model."""
    # mypy rejects any dataclass here: HfArgumentParser declares its argument as a `NewType`.
    parser = HfArgumentParser(Options)  # type: ignore[arg-type]  # (see above)
    (arguments,) = parser.parse_args_into_dataclasses()
    run = Training(arguments)
    checkpoint = arguments.resume_from_checkpoint
    if checkpoint == Path("auto"):
        checkpoint = newest_checkpoint(arguments.output_dir, "step_")
    if checkpoint is not None:
        run.resume(checkpoint)
    monitors = Monitors([loss_monitor(run)], run.accelerator, run.num_updates)
    monitors.notify("on_train_begin")
    for epoch in range(run.num_updates // run.updates_per_epoch, arguments.num_train_epochs):
        monitors.notify("on_epoch_begin")
        train_epoch(run, epoch, monitors)
        monitors.notify("on_epoch_end")
        raw, averaged = evaluate_both(run)
        monitors.notify("on_evaluate")
        run.accelerator.print(
            f"epoch {epoch + 1}: loss on held-out text {raw:.3f} with raw weights, "
            f"{averaged:.3f} with averaged weights"
        )
    monitors.notify("on_train_end")
    if run.accelerator.is_main_process:
        with whole_folder(arguments.output_dir / "model") as written:
            run.accelerator.unwrap_model(run.model).save_pretrained(written)
    accelerator = run.accelerator
    # Release the network before the process group ends: otherwise the processes may hang at exit.
    del run, monitors
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
