"""accelerate's own training loop, as its documentation has it, with the step behind it.

    python -m mfwrap.recipes.accelerate_loop --output_dir runs/accelerate_loop
    torchrun --nproc_per_node 2 -m mfwrap.recipes.accelerate_loop
    python -m mfwrap.recipes.accelerate_loop --resume_from_checkpoint runs/accelerate_loop/step_100

One line makes the difference, the one with `attach`. Model and text are those of
`mfwrap.recipes.causal_lm`. Each epoch ends with an evaluation of raw and averaged weights.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import (
    HfArgumentParser,
    TrainerControl,
    TrainerState,
    get_linear_schedule_with_warmup,
)

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import AttachedStep, attach
from mfwrap.callbacks import MFLossMonitor
from mfwrap.recipes.causal_lm import build_model, evaluate, text_loaders


@dataclass
class LoopArguments:
    """Settings of the run."""

    output_dir: Path = field(default=Path("runs/accelerate_loop"), metadata={"help": "run folder"})
    num_train_epochs: int = field(default=2, metadata={"help": "passes over the text"})
    micro_batch_size: int = field(default=8, metadata={"help": "texts in a micro-batch"})
    gradient_accumulation_steps: int = field(default=2, metadata={"help": "micro-batches"})
    sequence_length: int = field(default=256, metadata={"help": "longest text, in bytes"})
    max_samples: int | None = field(default=None, metadata={"help": "texts to take, all if none"})
    learning_rate: float = field(default=3e-3, metadata={"help": "highest learning rate"})
    warmup_steps: int = field(default=30, metadata={"help": "updates up to that rate"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "limit of the global norm"})
    ema_decay: float = field(default=0.95, metadata={"help": "decay of the averaged weights"})
    mixed_precision: str = field(default="no", metadata={"help": "no, bf16 or fp16"})
    per_print_times: int = field(default=10, metadata={"help": "updates between two records"})
    checkpointing_steps: int = field(default=100, metadata={"help": "updates between two saves"})
    resume_from_checkpoint: Path | None = field(default=None, metadata={"help": "folder to resume"})
    seed: int = field(default=0, metadata={"help": "seed of weights and order"})


class Training:
    """What the loop trains, prepared, and where it is.

    Args:
        arguments: Settings of the run.
    """

    def __init__(self, arguments: LoopArguments) -> None:
        self.arguments = arguments
        self.accelerator = Accelerator(
            # Several processes on CPU are one training only if accelerate is told.
            cpu=not torch.accelerator.is_available(),
            mixed_precision=arguments.mixed_precision,
            gradient_accumulation_steps=arguments.gradient_accumulation_steps,
            # The order of an epoch depends on its number alone, so that a run can be resumed in it.
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        self.attached: AttachedStep = attach(  # the one line
            self.accelerator, StepConfig(local_norm=True, local_norm_groups="layer"), self._average
        )
        set_seed(arguments.seed)
        model = build_model(arguments.sequence_length)
        optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate, fused=True)
        training, held_out = text_loaders(
            arguments.micro_batch_size,
            arguments.sequence_length,
            arguments.seed,
            arguments.max_samples,
        )
        num_processes = self.accelerator.num_processes
        self.updates_per_epoch = math.ceil(
            len(training) / num_processes / arguments.gradient_accumulation_steps
        )
        # accelerate steps a schedule once for each process.
        schedule = get_linear_schedule_with_warmup(
            optimizer,
            arguments.warmup_steps * num_processes,
            arguments.num_train_epochs * self.updates_per_epoch * num_processes,
        )
        self.model, self.optimizer, self.schedule, self.training, self.held_out = (
            self.accelerator.prepare(model, optimizer, schedule, training, held_out)
        )
        self.num_updates = 0

    def _average(self, model: torch.nn.Module) -> ExponentialMovingAverage:
        return ExponentialMovingAverage(model, self.arguments.ema_decay, warmup=True)

    def resume(self, folder: Path) -> None:
        """Load a checkpoint; its folder's name says how many updates it is from."""
        self.accelerator.load_state(str(folder))
        self.num_updates = int(folder.name.removeprefix("step_"))

    def batches(self, epoch: int) -> DataLoader[Any]:
        """Return what is left of an epoch."""
        self.training.set_epoch(epoch)
        done = self.num_updates - epoch * self.updates_per_epoch
        skipped = done * self.arguments.gradient_accumulation_steps
        rest: DataLoader[Any] = self.training
        if skipped > 0:
            rest = self.accelerator.skip_first_batches(self.training, skipped)
        return rest


def train_epoch(run: Training, epoch: int, monitor: "Monitor") -> None:
    """Do what is left of an epoch: the loop of accelerate's documentation."""
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
            monitor.step_end(run)
            if run.num_updates % run.arguments.checkpointing_steps == 0:
                accelerator.save_state(str(run.arguments.output_dir / f"step_{run.num_updates}"))
                monitor.notify("on_save")


class Monitor:
    """MindFormers' record of the run, told of what happens in the loop.

    Args:
        run: Of which it tells.
    """

    def __init__(self, run: Training) -> None:
        arguments = run.arguments
        self._callback = MFLossMonitor(
            per_print_times=arguments.per_print_times,
            origin_epochs=arguments.num_train_epochs,
            dataset_size=run.updates_per_epoch,
            global_batch_size=arguments.micro_batch_size
            * arguments.gradient_accumulation_steps
            * run.accelerator.num_processes,
        )
        self._state = TrainerState(
            is_world_process_zero=run.accelerator.is_main_process, global_step=run.num_updates
        )
        self._control = TrainerControl()

    def notify(self, event: str, **values: Any) -> None:
        """Tell the callback of an event, by the Trainer's name for it."""
        getattr(self._callback, event)(None, self._state, self._control, **values)

    def step_end(self, run: Training) -> None:
        """Tell the callback of an update."""
        self._state.global_step = run.num_updates
        attached = run.attached
        self.notify(
            "on_step_end", step_output=attached.last_output, step_report=attached.last_report
        )


def main() -> None:
    """Train, evaluate after each epoch, save the model."""
    # The parser's own name for the type of a dataclass is one that no dataclass has.
    parser = HfArgumentParser(LoopArguments)  # type: ignore[arg-type]
    (arguments,) = parser.parse_args_into_dataclasses()
    run = Training(arguments)
    if arguments.resume_from_checkpoint is not None:
        run.resume(arguments.resume_from_checkpoint)
    monitor = Monitor(run)
    monitor.notify("on_train_begin")
    for epoch in range(run.num_updates // run.updates_per_epoch, arguments.num_train_epochs):
        monitor.notify("on_epoch_begin")
        train_epoch(run, epoch, monitor)
        monitor.notify("on_epoch_end")
        raw, averaged = evaluate_both(run)
        monitor.notify("on_evaluate")
        run.accelerator.print(
            f"epoch {epoch + 1}: loss on held-out text {raw:.3f} with raw weights, "
            f"{averaged:.3f} with averaged weights"
        )
    monitor.notify("on_train_end")
    if run.accelerator.is_main_process:
        run.accelerator.unwrap_model(run.model).save_pretrained(arguments.output_dir / "model")
    accelerator = run.accelerator
    del run, monitor
    # Now, because a network that outlives its group of processes can keep them from ending.
    accelerator.free_memory()
    accelerator.end_training()


def evaluate_both(run: Training) -> tuple[float, float]:
    """Return the loss of raw and of averaged weights on held-out text."""
    raw = evaluate(run.model, run.held_out, run.accelerator)
    ema = run.attached.ema
    if ema is None:
        msg = "no average was made"
        raise RuntimeError(msg)
    with ema.swap():
        return raw, evaluate(run.model, run.held_out, run.accelerator)


if __name__ == "__main__":
    main()
