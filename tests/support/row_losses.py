"""Trainings with the loss by source and by row, and the same losses computed by hand in float64."""

import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.small_networks import IGNORED
from support.trainer_runs import Counting, Run, new_trainer, padded, tiny_llama, train

__all__ = [
    "BATCH",
    "Recording",
    "by_hand",
    "die_at",
    "losses_of_rows",
    "names_of",
    "order_of",
    "still",
    "train_on_rank",
    "trained",
]

SEED = 42
BATCH = 6
"""Rows of an update on one rank."""

_NAMES = ["web", "books", "web", "web", "code", "web", "books"]


def names_of(num_rows: int) -> list[str]:
    """Return the source of each row: uneven, and the last source has a single row."""
    return [_NAMES[index % 7] for index in range(num_rows - 1)] + ["rare"]


def order_of(epoch: int, num_rows: int) -> list[int]:
    """Return the order of the rows in an epoch, as torch's sampler shuffles them."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    return torch.randperm(num_rows, generator=generator).tolist()


class Recording(TrainerCallback):
    """Copy the weights that each update begins with."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.weights.append({name: w.detach().clone() for name, w in model.named_parameters()})


class _Dies(TrainerCallback):
    """End the process at once after an update."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == self._step:
            os._exit(9)


def still() -> nn.Module:
    """Return a Llama without dropout, so that its losses can be computed again."""
    model: Any = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    return model


def trained(folder: Path, *, resume: Path | None = None, **settings: Any) -> Run:
    """Train for six updates on 20 rows.

    Args:
        folder: Run folder.
        resume: Checkpoint to resume from.
        settings: ``model``, ``data``, ``callbacks``, ``data_collator``, ``loss_by``,
            ``row_losses``, ``skip_rows``, and keywords of ``TrainingArguments``.
    """
    names = {"data_collator", "loss_by", "row_losses", "skip_rows"}
    extras = {"data_collator": padded} | {n: settings.pop(n) for n in names & settings.keys()}
    defaults: dict[str, Any] = {
        "model": still() if "model" not in settings else None,
        "data": Counting(20),
        "per_device_train_batch_size": BATCH // 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
    }
    return train(new_trainer(MFTrainer, folder, extras=extras, **defaults | settings), resume)


def losses_of_rows(
    weights: dict[str, Tensor], rows: list[dict[str, Tensor]]
) -> list[tuple[float, int]]:
    """Return sum of the losses and number of targets of each row, in float64, one row at a time."""
    model = still().double()
    model.load_state_dict({name: w.double() for name, w in weights.items()}, strict=False)
    found = []
    for row in rows:
        log_probs = model(input_ids=row["input_ids"][None]).logits[0].log_softmax(-1)
        pairs = [(t, y) for t, y in enumerate(row["labels"][1:].tolist()) if y != IGNORED]
        found.append((-sum(log_probs[pair].item() for pair in pairs), len(pairs)))
    return found


def by_hand(
    weights: list[dict[str, Tensor]], names: list[str], *, batch: int = BATCH, data: Any = None
) -> list[tuple[dict[str, float], dict[str, int]]]:
    """Return the sums of losses and the numbers of targets by source, for each update.

    Args:
        weights: Weights at the beginning of each update.
        names: Source of each row.
        batch: Rows of an update on all ranks.
        data: Training data; by default 20 rows of `Counting`.
    """
    rows = Counting(20) if data is None else data
    updates = []
    for step, of_step in enumerate(weights):
        epoch, update = divmod(step, math.ceil(len(names) / batch))
        indices = order_of(epoch, len(names))[update * batch : (update + 1) * batch]
        losses = losses_of_rows(of_step, [rows[index] for index in indices])
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for index, (loss, count) in zip(indices, losses, strict=True):
            sums[names[index]] += loss
            counts[names[index]] += count
        updates.append((dict(sums), dict(counts)))
    return updates


def train_on_rank(
    rank: int, folder: str, settings: dict[str, Any], resume: str | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """Train on several ranks; return the log, and the weights at the beginning of each update.

    Args:
        rank: This rank.
        folder: Run folder.
        settings: Settings of `trained`.
        resume: Checkpoint to resume from.
    """
    del rank
    new_accelerator()
    recording = Recording()
    run = trained(
        Path(folder),
        resume=None if resume is None else Path(resume),
        callbacks=[recording],
        ddp_find_unused_parameters=False,
        **settings,
    )
    return run.log, recording.weights


def die_at(folder: str, step: int, settings: dict[str, Any]) -> None:
    """Train, and end the process at once after an update; call it in a process of its own."""
    trained(Path(folder), callbacks=[_Dies(step)], **settings)
