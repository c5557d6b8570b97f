"""Train networks with planted faults in six ways, on one rank or several, under the monitor."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, AdamW, Muon, NAdam, Optimizer, RMSprop
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
from mfwrap.callbacks import LoopMonitor, TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.faults.architecture import BATCH_SIZE, NUM_CLASSES, Rows, collated
from support.faults.changes import changed
from support.faults.faults import Fault, How, What
from support.faults.networks import ARCHITECTURES, group_of, new_network, weight_groups
from support.faults.planting import Planting, plant_in_batch
from support.faults.series import Series

__all__ = ["NUM_MICRO_BATCHES", "OPTIMIZERS", "WAYS", "Case", "Training", "train"]

NUM_MICRO_BATCHES = 2

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], float], Optimizer]] = {
    # torch's fused AdamW computes in float32 on a CPU, and so hides what float16 rounds.
    "adamw": lambda groups, rate: AdamW(
        groups,
        rate,
        fused=all(weight.dtype != torch.float16 for group in groups for weight in group["params"]),
    ),
    "sgd": lambda groups, rate: SGD(groups, 5 * rate, momentum=0.9, weight_decay=1e-4),
    "adagrad": lambda groups, rate: Adagrad(groups, 2 * rate),
    "nadam": NAdam,
    "rmsprop": lambda groups, rate: RMSprop(groups, rate / 3),
    "muon": Muon,
}
"""Optimizers by name, from groups and the rate of AdamW. Muon needs matrices alone."""


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

    optimizer: str = "adamw"
    """Key of `OPTIMIZERS`."""

    width: int = 16
    """Hidden size."""

    rate: float = 1e-2
    """Learning rate after the warm-up, see `OPTIMIZERS`."""

    warmup: int = 5
    """Steps of the warm-up; 1 for none."""

    batch_size: int = BATCH_SIZE
    has_groups: bool = False
    """Whether the optimizer has a group for each layer and one for the other weights."""

    dtype: str = "float32"
    """Type of the weights. Only the cell trains others than float32."""


class Training:
    """Network, optimizer, schedule and data of a case, and its fault."""

    def __init__(self, case: Case, series: Series | None) -> None:
        self.case, self.series = case, series
        self.architecture = ARCHITECTURES[case.architecture]
        self.network = new_network(self.architecture, width=case.width, seed=case.seed)
        self.dtype = getattr(torch, case.dtype)
        self.network.to(self.dtype)
        self._fault = case.fault
        self._kept_loss: float | Tensor = 0.0
        if self._fault is not None and self._fault.kind.how is How.FLOAT16:
            self._to_float16(self._fault)
        self.rank, self.num_ranks = 0, 1
        if distributed.is_initialized():
            self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        groups = [{"params": weights}]
        if case.has_groups:
            named = weight_groups(self.network, self.architecture)
            groups = [{"params": list(group.values())} for group in named]
        self.optimizer = OPTIMIZERS[case.optimizer](groups, case.rate)
        numbers = range(len(self.optimizer.param_groups))
        self.schedule = LambdaLR(
            self.optimizer, [functools.partial(self._rate_factor, number) for number in numbers]
        )
        per_step = NUM_MICRO_BATCHES * self.num_ranks
        self.rows = Rows(
            self.architecture, case.num_steps * per_step * case.batch_size, seed=case.seed
        )
        own = self._fault if self._is_on(self.rank) else None
        self._planting = Planting(
            self.architecture,
            self.network,
            self.optimizer,
            own,
            seed=case.seed,
            width=case.width,
        )

    def _to_float16(self, fault: Fault) -> None:
        if fault.layer is None:
            self.dtype = torch.float16
            self.network.to(torch.float16)
        else:
            layer = self.network.get_submodule(self.architecture.layers[fault.layer])
            for name in ("up", "down"):
                layer.get_submodule(name).to(torch.float16)

    def _is_on(self, rank: int) -> bool:
        return self._fault is not None and self._fault.rank in {None, rank}

    def _fault_in(self, step: int, rank: int, micro_batch: int) -> Fault | None:
        """Return the fault if it is in a micro-batch."""
        fault = self._fault
        if fault is None or not fault.is_at(step) or not self._is_on(rank):
            return None
        return fault if fault.micro_batch in {None, micro_batch} else None

    def _rate_factor(self, group: int, num_updates: int) -> float:
        step = num_updates + 1
        factor = min(1.0, step / self.case.warmup)
        fault = self._fault
        if fault is None or fault.kind.what not in {What.RATE, What.GROUP_RATE}:
            return factor
        if fault.kind.what is What.GROUP_RATE:
            # The last group may have the number -1.
            number = group_of(self.architecture, fault) % len(self.optimizer.param_groups)
            if number != group:
                return factor
        if not (fault.is_at(step) and self._is_on(self.rank)):
            return factor
        how, size = fault.kind.how, fault.size_at(step)
        return factor * {How.RAISED: size, How.ZERO: 0.0, How.NEGATED: -1.0}[how]

    def collate(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return rows as a micro-batch, with its fault.

        A loader may fetch the batch long before its step, so the place of the batch in the training
        follows from its rows.
        """
        batch = self._collated(rows)
        first = int(batch["indices"][0])
        number, rank = divmod(first // self.case.batch_size, self.num_ranks)
        step, micro_batch = divmod(number, NUM_MICRO_BATCHES)
        fault = self._fault_in(step + 1, rank, micro_batch)
        if fault is not None:

            def older() -> dict[str, Tensor]:
                steps = min(fault.lag, step)
                before = first - steps * NUM_MICRO_BATCHES * self.num_ranks * self.case.batch_size
                return self._collated([self.rows[before + row] for row in range(len(rows))])

            if fault.kind.what is What.BATCH:
                numbers = self._other_rows(fault, first, len(rows), step)
                return self._collated([self.rows[number] for number in numbers])
            plant_in_batch(batch, fault, self.architecture, step + 1, older)
        return batch

    def _other_rows(self, fault: Fault, first: int, number: int, step: int) -> list[int]:
        """Return the numbers of the rows that a loader with a fault takes for a micro-batch."""
        if fault.kind.how is How.REPEATED:
            per_step = NUM_MICRO_BATCHES * self.num_ranks * self.case.batch_size
            start = first - (step + 1 - fault.step) * per_step
            return list(range(start, start + number))
        label = (step // fault.lag) % NUM_CLASSES
        chosen = [row for row, each in enumerate(self._labels) if each == label]
        return [chosen[(first + row) % len(chosen)] for row in range(number)]

    @functools.cached_property
    def _labels(self) -> list[int]:
        """Classes of all rows."""
        return [int(self.rows[row]["labels"]) for row in range(len(self.rows))]

    def _collated(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = collated(rows)
        return {
            name: entry.to(self.dtype) if entry.is_floating_point() else entry
            for name, entry in batch.items()
        }

    def outer_loss(self, loss: Tensor, step: int, micro_batch: int) -> Tensor:
        """Return what a loop makes of the loss of a micro-batch outside of the network."""
        fault = self._fault_in(step, self.rank, micro_batch)
        if fault is None or fault.kind.what is not What.OUTER_LOSS:
            return loss
        if fault.kind.how is How.KEPT:
            loss = loss + self._kept_loss
            self._kept_loss = loss.detach()
            return loss
        return changed(loss, fault, fault.size)

    def max_norm(self, step: int) -> float:
        """Return the norm to which a loop clips the gradients."""
        fault = self._fault
        if fault is None or fault.kind.what is not What.CLIPPING:
            return 1.0
        if not (fault.is_at(step) and self._is_on(self.rank)):
            return 1.0
        return 1.0 / fault.size

    def micro_batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return this rank's micro-batches of a step, in the order in which MFTrainer has them."""
        size = self.case.batch_size
        firsts = [
            (((step - 1) * NUM_MICRO_BATCHES + number) * self.num_ranks + self.rank) * size
            for number in range(NUM_MICRO_BATCHES)
        ]
        return [self.collate([self.rows[first + row] for row in range(size)]) for first in firsts]

    def begin_step(self, step: int) -> None:
        """Do what the fault does before a step."""
        self._planting.begin_step(step)

    def end_step(self) -> None:
        """Do what the fault does between an update and the end of its step."""
        self._planting.end_step()

    def close(self) -> None:
        """Remove the fault, unless it has changed what is kept in memory."""
        self._planting.close()

    def monitor_settings(self) -> dict[str, Any]:
        """Return the settings of `TrainingStateMonitor`."""
        return {
            "replay": True,
            "local_loss_format": "jsonl",
            "max_attention_logit_format": "jsonl" if self.architecture.query else None,
            "expert_load_format": "jsonl" if self.architecture.router else None,
        }

    def callbacks(self) -> list[TrainerCallback]:
        """Return the callbacks besides the monitor."""
        return [] if self.series is None else [self.series]


_Step = Callable[[int, list[dict[str, Tensor]]], None]
"""Trains on the number of a step and its micro-batches."""


class _Events:
    """Send the events of a loop to callbacks."""

    def __init__(self, training: Training, folder: Path) -> None:
        monitor = TrainingStateMonitor(folder=folder, **training.monitor_settings())
        self._callbacks = [monitor, *training.callbacks()]
        self._training = training
        self._state = TrainerState(
            max_steps=training.case.num_steps, is_world_process_zero=training.rank == 0
        )

    def run(self, step: _Step, outputs: Callable[[], dict[str, Any]]) -> None:
        """Train to the end.

        Args:
            step: Trains a step.
            outputs: Returns what ``on_step_end`` gets.
        """
        self._send("on_train_begin")
        for number in range(1, self._training.case.num_steps + 1):
            self._training.begin_step(number)
            self._send("on_step_begin")
            step(number, self._training.micro_batches(number))
            self._training.end_step()
            self._state.global_step = number
            self._send("on_step_end", **outputs())
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


def _loop(training: Training, step: _Step, monitor: LoopMonitor) -> None:
    """Train to the end in a loop with `LoopMonitor`, which counts the steps."""
    with monitor:
        for number in range(1, training.case.num_steps + 1):
            training.begin_step(number)
            step(number, training.micro_batches(number))


def _scale() -> DynamicLossScaleUpdateCell:
    return DynamicLossScaleUpdateCell(2.0**10, 2, 1000)


def _wrapped(training: Training) -> nn.Module:
    if training.num_ranks > 1:
        return DistributedDataParallel(training.network, find_unused_parameters=False)
    return training.network


def _cell(training: Training) -> MFTrainOneStepCell:
    return MFTrainOneStepCell(
        _wrapped(training),
        training.optimizer,
        True,  # noqa: FBT003  (MindFormers' signature)
        1.0,
        _scale(),
        True,  # noqa: FBT003  (MindFormers' signature)
        lr_scheduler=training.schedule,
        max_consecutive_skips=None,
    )


def _train_cell(training: Training, folder: Path) -> None:
    cell = _cell(training)
    outputs: dict[str, Any] = {}

    def step(_: int, batches: list[dict[str, Tensor]]) -> None:
        outputs["step_output"] = cell.step(batches)
        outputs["step_report"] = cell.last_report

    _Events(training, folder).run(step, lambda: outputs)


def _train_loop_cell(training: Training, folder: Path) -> None:
    cell = _cell(training)
    monitor = LoopMonitor(
        cell, folder, callbacks=training.callbacks(), **training.monitor_settings()
    )

    def step(_: int, batches: list[dict[str, Tensor]]) -> None:
        cell.step(batches)
        training.end_step()
        monitor.end_step()

    _loop(training, step, monitor)


class _Attached:
    """An accelerate loop with `attach`."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICRO_BATCHES)
        config = StepConfig(local_norm=True, max_consecutive_skips=None)
        self.attached = attach(self.accelerator, config, scale_sense=_scale())
        self._model, self._optimizer, self._schedule = self.accelerator.prepare(
            training.network, training.optimizer, training.schedule
        )
        # accelerate steps a schedule once for each rank; the rate of a step must not depend on
        # them.
        self._schedule.split_batches = True

    def step(self, number: int, batches: list[dict[str, Tensor]]) -> None:
        """Train a step."""
        for micro_batch, batch in enumerate(batches):
            with self.accelerator.accumulate(self._model):
                loss = self._model(**batch).loss
                loss = self._training.outer_loss(loss, number, micro_batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    limit = self._training.max_norm(number)
                    self.accelerator.clip_grad_norm_(self._model.parameters(), limit)
                self._optimizer.step()
                self._schedule.step()
                self._optimizer.zero_grad()

    def outputs(self) -> dict[str, Any]:
        """Return the results of the last step."""
        return {
            "step_output": self.attached.last_output,
            "step_report": self.attached.last_report,
        }


def _train_attached(training: Training, folder: Path) -> None:
    attached = _Attached(training)
    _Events(training, folder).run(attached.step, attached.outputs)


def _train_loop_attached(training: Training, folder: Path) -> None:
    attached = _Attached(training)
    monitor = LoopMonitor(
        attached.attached, folder, callbacks=training.callbacks(), **training.monitor_settings()
    )

    def step(number: int, batches: list[dict[str, Tensor]]) -> None:
        attached.step(number, batches)
        training.end_step()
        monitor.end_step()

    _loop(training, step, monitor)


def _train_plain(training: Training, folder: Path) -> None:
    model = _wrapped(training)
    monitor = LoopMonitor(
        training.optimizer,
        folder,
        model=model,
        callbacks=training.callbacks(),
        **training.monitor_settings(),
    )
    weights = [weight for weight in training.network.parameters() if weight.requires_grad]

    def step(number: int, batches: list[dict[str, Tensor]]) -> None:
        losses = []
        for micro_batch, batch in enumerate(batches):
            is_last = micro_batch == NUM_MICRO_BATCHES - 1
            sync = (
                contextlib.nullcontext()
                if is_last or model is training.network
                else model.no_sync()
            )
            with sync:
                loss = training.outer_loss(model(**batch).loss, number, micro_batch)
                (loss / NUM_MICRO_BATCHES).backward()
            losses.append(loss.detach())
        if training.series is not None:
            training.series.see_gradients(weights)
        norm = clip_grad_norm_(weights, training.max_norm(number))
        training.optimizer.step()
        training.schedule.step()
        training.optimizer.zero_grad()
        training.end_step()
        monitor.end_step(torch.stack(losses).mean(), grad_norm=norm)

    _loop(training, step, monitor)


class _InOrder(MFTrainer):
    """Trainer that takes the rows in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


class _PlantAtEvents(TrainerCallback):
    def __init__(self, training: Training) -> None:
        self._training = training

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Do what the fault does before a step."""
        del args, control
        self._training.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Do what the fault does at the end of a step; the monitor comes after this callback."""
        del args, state, control
        self._training.end_step()


def _train_trainer(training: Training, folder: Path) -> None:
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
    monitor = TrainingStateMonitor(folder=folder, **training.monitor_settings())
    trainer = _InOrder(
        model=training.network,
        args=arguments,
        train_dataset=training.rows,
        data_collator=training.collate,
        optimizers=(training.optimizer, training.schedule),
        callbacks=[_PlantAtEvents(training), monitor, *training.callbacks()],
        step=StepConfig(local_norm=True, max_consecutive_skips=None),
        scale_sense=_scale(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


WAYS: dict[str, Callable[[Training, Path], None]] = {
    "cell": _train_cell,
    "attach": _train_attached,
    "trainer": _train_trainer,
    "loop of a cell": _train_loop_cell,
    "loop of attach": _train_loop_attached,
    "plain loop": _train_plain,
}
"""Ways to train by name: a loop over `MFTrainOneStepCell`, an accelerate loop with `attach`,
`MFTrainer`, and loops with `LoopMonitor` over a cell, over `attach` and in plain torch."""


def train(case: Case, folder: Path, series: Series | None = None) -> nn.Module:
    """Train a case under a monitor that replays, and return the network.

    On several ranks, call it on each of them.

    Args:
        case: Case to train.
        folder: Run folder, to which the monitor writes.
        series: Collects the numbers of the run.
    """
    AcceleratorState._reset_state(reset_partial_state=not distributed.is_initialized())
    GradientState._reset_state()
    training = Training(case, series)
    try:
        WAYS[case.way](training, folder)
    finally:
        training.close()
    return training.network
