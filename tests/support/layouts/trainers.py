"""Program that each rank runs to train with a Trainer a model that transformers has distributed."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from transformers import Trainer, TrainingArguments

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.fsdp.accelerated import reset_accelerate_after
from support.fsdp.training import whole
from support.layouts.layouts import layout_of

__all__ = ["train_as_mftrainer", "train_as_trainer"]

_NUM_ROWS = 4
"""Number of rows of a micro-batch of all ranks together."""


def _arguments(folder: Path, rows: int) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        adam_epsilon=1e-4,
        max_grad_norm=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        optim="adamw_torch_fused",
    )


def _data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 60, (24, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def _outcome(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    model: Any = trainer.model
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "log": torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in entries]),
        "weights": {name: whole(p) for name, p in model.named_parameters()},
    }


def train_as_trainer(folder: Path, name: str) -> dict[str, Any]:
    """Train the whole network of a layout with the stock Trainer in one process."""
    network: nn.Module = layout_of(name).whole_network()
    return _outcome(Trainer(network, _arguments(folder, _NUM_ROWS), train_dataset=_data()))


@reset_accelerate_after()
def train_as_mftrainer(rank: int, folder: str, name: str, data_ranks: int) -> dict[str, Any]:
    """Train a layout with `MFTrainer` and a loss scale.

    Args:
        rank: Rank of this process.
        folder: Run folder.
        name: Name of the layout.
        data_ranks: Number of ranks that get different rows.
    """
    del rank
    new_accelerator()
    # accelerate takes a ParallelismConfig on GPUs only, but the same code runs on a CPU.
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        trainer = MFTrainer(
            layout_of(name).network(),
            _arguments(Path(folder), _NUM_ROWS // data_ranks),
            train_dataset=_data(),
            step=StepConfig(),
            scale_sense=2.0**10,
            ema=lambda model: ExponentialMovingAverage(model, 0.75),
        )
        return _outcome(trainer)
