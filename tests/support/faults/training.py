"""Train networks with planted faults in three ways, on one rank or several, under the monitor."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.faults.kinds import KINDS, plant
from support.faults.networks import (
    ARCHITECTURES,
    BATCH_SIZE,
    Rows,
    collated,
    new_network,
)
from support.faults.planting import Fault, Planted

__all__ = ["NUM_MICRO_BATCHES", "WAYS", "Case", "train"]

NUM_MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A training of one architecture in one way, with at most one fault."""

    architecture: str
    """Key of `ARCHITECTURES`."""

    way: str
    """Key of `WAYS`."""

    fault: Fault | None = None
    num_steps: int = 32
    seed: int = 0
    """Seed of weights and data."""

    width: int = 16
    """Hidden size."""

    rate: float = 1e-2
    """Learning rate after the warm-up."""

    warmup: int = 5
    """Steps of the warm-up; 1 for none."""

    batch_size: int = BATCH_SIZE
    dtype: str = "float32"
    """Type of the weights. Only the cell trains others than float32."""


class _Training:
    """Network, optimizer, schedule and data of a case, and its fault."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.architecture = ARCHITECTURES[case.architecture]
        self.network = new_network(self.architecture, width=case.width, seed=case.seed)
        self.dtype = getattr(torch, case.dtype)
        self.network.to(self.dtype)
        weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        # torch's fused AdamW computes in float32 on a CPU, and so hides what float16 rounds.
        fused = self.dtype != torch.float16
        self.optimizer: Optimizer = AdamW(weights, lr=case.rate, fused=fused)
        self.schedule = LambdaLR(self.optimizer, self._rate_factor)
        self.rank, self.num_ranks = 0, 1
        if distributed.is_initialized():
            self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        per_step = NUM_MICRO_BATCHES * self.num_ranks
        self.rows = Rows(
            self.architecture, case.num_steps * per_step * case.batch_size, seed=case.seed
        )
        self._stack = contextlib.ExitStack()

    def _has_fault(self, step: int) -> bool:
        fault = self.case.fault
        if fault is None:
            return False
        return fault.step <= step < fault.step + KINDS[fault.kind].num_steps

    def _has_fault_in(self, step: int, rank: int, micro_batch: int) -> bool:
        fault = self.case.fault
        if fault is None or not self._has_fault(step):
            return False
        kind = KINDS[fault.kind]
        return (rank == fault.rank or not kind.is_local) and (
            micro_batch == fault.micro_batch or not kind.in_micro_batch
        )

    def _rate_factor(self, num_updates: int) -> float:
        step = num_updates + 1
        factor = min(1.0, step / self.case.warmup)
        if self._has_fault(step):
            factor *= KINDS[self.case.fault.kind].rate
        return factor

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return rows as a micro-batch, with its fault.

        A loader may fetch the batch long before its step, so the place of the batch in the training
        follows from its rows.
        """
        batch = collated(rows)
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].to(self.dtype)
        number, rank = divmod(int(batch["indices"][0]) // self.case.batch_size, self.num_ranks)
        step, micro_batch = divmod(number, NUM_MICRO_BATCHES)
        if self._has_fault_in(step + 1, rank, micro_batch):
            spoil = KINDS[self.case.fault.kind].data
            if spoil is not None:
                spoil(batch, self.case.fault)
        return batch

    def loss_factor(self, step: int, micro_batch: int) -> float:
        """Return by what a loop multiplies the loss of a micro-batch outside of the network."""
        if self._has_fault_in(step, self.rank, micro_batch):
            return KINDS[self.case.fault.kind].outside
        return 1.0

    def micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return this rank's micro-batches of a step, in the order in which MFTrainer has them."""
        size = self.case.batch_size
        firsts = [
            (((step - 1) * NUM_MICRO_BATCHES + number) * self.num_ranks + self.rank) * size
            for number in range(NUM_MICRO_BATCHES)
        ]
        return [self.collate([self.rows[first + row] for row in range(size)]) for first in firsts]

    def begin_step(self, step: int) -> None:
        """Plant the fault of a step in network or optimizer, or remove that of the step before."""
        fault = self.case.fault
        if fault is not None and step == fault.step:
            planted = Planted(self.architecture, self.network, self.optimizer)
            self._stack.enter_context(plant(planted, fault, self.rank))
        elif not self._has_fault(step):
            self.close()

    def close(self) -> None:
        """Remove the fault, unless it has changed a weight."""
        self._stack.close()


class _Events:
    """Send the events of a loop to callbacks, and drive the training of a case."""

    def __init__(self, training: _Training, callbacks: Sequence[TrainerCallback]) -> None:
        self._training = training
        self._state = TrainerState(
            max_steps=training.case.num_steps, is_world_process_zero=training.rank == 0
        )
        self._callbacks = callbacks

    def run(self, step: Callable[[int, list[dict[str, Tensor]]], dict[str, Any]]) -> None:
        """Train to the end.

        Args:
            step: Trains on the number of a step and its micro-batches, and returns what
                ``on_step_end`` gets.
        """
        self._send("on_train_begin")
        for number in range(1, self._training.case.num_steps + 1):
            self._training.begin_step(number)
            self._send("on_step_begin")
            outputs = step(number, self._training.micro_batches(number))
            self._state.global_step = number
            self._send("on_step_end", **outputs)
        self._send("on_train_end")

    def _send(self, event: str, **keywords: Any) -> None:
        training = self._training
        for callback in self._callbacks:
            getattr(callback, event)(
                None,
                self._state,
                TrainerControl(),
                model=training.network,
                optimizer=training.optimizer,
                lr_scheduler=training.schedule,
                **keywords,
            )


def _scale() -> DynamicLossScaleUpdateCell:
    return DynamicLossScaleUpdateCell(2.0**10, 2, 1000)


def _train_cell(training: _Training, folder: Path, callbacks: Sequence[TrainerCallback]) -> None:
    del folder
    network: nn.Module = training.network
    if training.num_ranks > 1:
        network = DistributedDataParallel(network, find_unused_parameters=False)
    cell = MFTrainOneStepCell(
        network,
        training.optimizer,
        True,  # noqa: FBT003  (MindFormers' signature)
        1.0,
        _scale(),
        True,  # noqa: FBT003  (MindFormers' signature)
        lr_scheduler=training.schedule,
        max_consecutive_skips=None,
    )

    def step(_: int, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
        output = cell.step(batches)
        return {"step_output": output, "step_report": cell.last_report}

    _Events(training, callbacks).run(step)


def _train_attached(
    training: _Training, folder: Path, callbacks: Sequence[TrainerCallback]
) -> None:
    del folder
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICRO_BATCHES)
    config = StepConfig(local_norm=True, max_consecutive_skips=None)
    attached = attach(accelerator, config, scale_sense=_scale())
    model, optimizer, schedule = accelerator.prepare(
        training.network, training.optimizer, training.schedule
    )
    # accelerate steps a schedule once for each rank; the rate of a step must not depend on them.
    schedule.split_batches = True

    def step(number: int, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
        for micro_batch, batch in enumerate(batches):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss * training.loss_factor(number, micro_batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return {"step_output": attached.last_output, "step_report": attached.last_report}

    _Events(training, callbacks).run(step)


class _InOrder(MFTrainer):
    """Trainer that takes the rows in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


class _BeginStep(TrainerCallback):
    def __init__(self, training: _Training) -> None:
        self._training = training

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Plant the fault of the step."""
        del args, control
        self._training.begin_step(state.global_step + 1)


def _train_trainer(training: _Training, folder: Path, callbacks: Sequence[TrainerCallback]) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=training.case.batch_size,
        gradient_accumulation_steps=NUM_MICRO_BATCHES,
        max_steps=training.case.num_steps,
        logging_steps=training.case.num_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        **({"ddp_backend": "gloo"} if training.num_ranks > 1 else {}),
    )
    trainer = _InOrder(
        model=training.network,
        args=arguments,
        train_dataset=training.rows,
        data_collator=training.collate,
        optimizers=(training.optimizer, training.schedule),
        callbacks=[_BeginStep(training), *callbacks],
        step=StepConfig(local_norm=True, max_consecutive_skips=None),
        scale_sense=_scale(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


WAYS = {"cell": _train_cell, "attach": _train_attached, "trainer": _train_trainer}
"""Ways to train by name: a loop over `MFTrainOneStepCell`, an accelerate loop with `attach`, and
`MFTrainer`."""


def train(case: Case, folder: Path, callbacks: Sequence[TrainerCallback] = ()) -> nn.Module:
    """Train a case under a monitor that replays, and return the network.

    On several ranks, call it on each of them.

    Args:
        case: Case to train.
        folder: Run folder, to which the monitor writes.
        callbacks: Further callbacks.
    """
    AcceleratorState._reset_state(reset_partial_state=not distributed.is_initialized())
    GradientState._reset_state()
    training = _Training(case)
    monitor = TrainingStateMonitor(
        folder=folder,
        replay=True,
        local_loss_format="jsonl",
        max_attention_logit_format="jsonl" if training.architecture.query else None,
        expert_load_format="jsonl" if training.architecture.router else None,
    )
    try:
        WAYS[case.way](training, folder, [monitor, *callbacks])
    finally:
        training.close()
    return training.network
