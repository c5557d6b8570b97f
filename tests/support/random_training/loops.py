"""Run a random training in an attached accelerate loop and with MFTrainer."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from mfwrap.trainer import MFTrainer
from support.accelerate_loops import new_accelerator
from support.random_training.cases import (
    Case,
    RandomNetwork,
    new_network,
    new_optimizer,
    rate_factor,
)
from support.random_training.checks import Observed, average_of, observed, scale_of
from support.trainer_runs import new_trainer

__all__ = ["train_attached", "train_with_trainer"]


def train_attached(case: Case, *, loop_clips: bool) -> list[Observed]:
    """Train a case in the loop of accelerate's documentation, with the step attached.

    Args:
        case: Training without a per-token loss, because a loop normalizes its losses itself.
        loop_clips: Whether the loop clips the gradients, instead of leaving it to the settings.
    """
    accelerator = new_accelerator(gradient_accumulation_steps=case.accumulation)
    network = new_network(case)
    average = average_of(case, network)
    attached = attach(accelerator, _settings(case), average, scale_sense=scale_of(case))
    inner = new_optimizer(case, network)
    model, optimizer, schedule = accelerator.prepare(network, inner, LambdaLR(inner, rate_factor))
    updates = []
    for update in range(case.num_updates):
        for batch in case.micro_batches(update, 0):
            with accelerator.accumulate(model):
                accelerator.backward(model(*batch))
                if loop_clips and accelerator.sync_gradients and case.max_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        updates.append(observed(attached.last_report, network, average))
        assert accelerator.optimizer_step_was_skipped == updates[-1].skipped
    return updates


def train_with_trainer(case: Case, folder: Path) -> list[Observed]:
    """Train a case with MFTrainer; each row of its data set is one micro-batch.

    Args:
        case: Training whose norm is reported, as the Trainer always reports it.
        folder: Folder for checkpoints; nothing is written to it.
    """
    network = new_network(case, _NamedLoss)
    average = average_of(case, network)
    optimizer = new_optimizer(case, network)
    observer = _Observer(network, average)
    every_update = (case.micro_batches(update, 0) for update in range(case.num_updates))
    batches = [batch._asdict() for batch in itertools.chain(*every_update)]
    limit = case.max_norm or math.inf
    trainer = new_trainer(
        _InOrder,
        folder,
        model=network,
        data=batches,
        callbacks=[observer],
        extras={
            # The Trainer's own argument is the limit.
            "step": dataclasses.replace(_settings(case), max_grad_norm=1.0),
            "ema": average,
            "scale_sense": scale_of(case),
            "optimizers": (optimizer, LambdaLR(optimizer, rate_factor)),
            "data_collator": _only_row,
        },
        per_device_train_batch_size=1,
        gradient_accumulation_steps=case.accumulation,
        max_grad_norm=0.0 if math.isinf(limit) else limit,
        max_steps=case.num_updates,
        remove_unused_columns=False,
    )
    trainer.train()
    return observer.updates


def _settings(case: Case) -> StepConfig:
    return StepConfig(
        use_clip_grad=case.max_norm is not None,
        max_grad_norm=case.max_norm or 1.0,
        local_norm=True,
        use_skip_data_by_global_norm=case.threshold is not None,
        global_norm_spike_threshold=case.threshold or 1.0,
        local_norm_groups=case.groups,
    )


class _InOrder(MFTrainer):
    """A trainer that takes the rows of its data set in their order."""

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class _NamedLoss(RandomNetwork):
    """A random network that names its loss, as the Trainer needs it."""

    def forward(self, **batch: Any) -> dict[str, Any]:
        return {"loss": super().forward(**batch)}


class _Observer(TrainerCallback):
    """Record each update."""

    def __init__(self, network: nn.Module, average: Any) -> None:
        self.updates: list[Observed] = []
        self._network, self._average = network, average

    def on_step_end(self, *_: object, step_report: Any, **__: object) -> None:
        self.updates.append(observed(step_report, self._network, self._average))


def _only_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    [row] = rows
    return row
