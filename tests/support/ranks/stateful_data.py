"""Trainings on iterable data that keep their place, in one process and on two ranks."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info
from transformers import TrainingArguments, default_data_collator

from mfwrap.trainer import MFTrainer

__all__ = [
    "NUM_STEPS",
    "SAVED",
    "Stream",
    "new_trainer",
    "outcome",
    "train_and_resume",
]

NUM_ROWS = 48
"""Rows of a pass: 6 updates of 2 micro-batches of 4 rows on one rank."""

NUM_STEPS = 9
SAVED = (2, 6, 8)
"""Steps to resume from: in the first pass of one rank, at its end, and in the second pass."""


class Line(nn.Module):
    """A line through the origin, which notes the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.seen: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss; a dropout draws random numbers between two batches."""
        self.seen += x.flatten().tolist()
        x = nn.functional.dropout(x / NUM_ROWS, 0.5, training=True)
        return {"loss": (self.layer(x) - labels).square().mean()}


class Stream(IterableDataset):
    """Rows whose order differs between passes, and which keep their place by themselves."""

    def __init__(self) -> None:
        self._next = 0
        self._is_placed = False
        self._epoch = 0
        self.num_read = 0
        """Number of rows that this process has read."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of a pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the rows of this worker from the place on."""
        worker = get_worker_info()
        shuffled = random.Random(self._epoch)  # noqa: S311  (not for cryptography)
        order = shuffled.sample(range(NUM_ROWS), NUM_ROWS)
        if worker is not None:
            order = order[worker.id :: worker.num_workers]
        self._next, self._is_placed = (self._next if self._is_placed else 0), False
        while self._next < len(order):
            self._next += 1
            self.num_read += 1
            x = torch.tensor([float(order[self._next - 1])])
            yield {"x": x, "labels": torch.zeros(1)}

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the place for the next iteration."""
        self._next, self._is_placed = state_dict["next"], True


class Masking:
    """A collator that draws from torch's generator, as that of masked language models does."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a batch whose rows are moved a little."""
        batch = default_data_collator(rows)
        return batch | {"x": batch["x"] + torch.rand(batch["x"].shape)}


def of_datasets() -> Any:
    """Return a sharded stream of datasets."""
    parts = {"parts": list(range(4))}
    return datasets.IterableDataset.from_generator(_rows, gen_kwargs=parts)


def _rows(parts: list[int]) -> Iterator[dict[str, list[float]]]:
    # Not within a function: workers that are started anew get it by its name.
    for part in parts:
        for number in range(part, NUM_ROWS, 4):
            yield {"x": [float(number)], "labels": [0.0]}


def new_trainer(
    folder: Path,
    *,
    kind: str = "own",
    data: Any = None,
    workers: int = 0,
    saves: bool = True,
    max_steps: int = NUM_STEPS,
    use_stateful_dataloader: bool = True,
    **settings: Any,
) -> MFTrainer:
    """Return a trainer that saves after every second update, or never."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=max_steps,
        save_strategy="steps" if saves else "no",
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        dataloader_num_workers=workers,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        **settings,
    )
    return MFTrainer(
        Line(),
        arguments,
        train_dataset=data or (Stream() if kind == "own" else of_datasets()),
        # Workers draw other random numbers after a resume.
        data_collator=default_data_collator if workers else Masking(),
        use_stateful_dataloader=use_stateful_dataloader,
    )


def outcome(trainer: MFTrainer, after: int = 0) -> dict[str, Any]:
    """Return rows and losses after a step, and the weight at the end."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "seen": trainer.model.seen[8 * after :],
        "losses": [entry["loss"] for entry in logged],
        "epochs": [entry["epoch"] for entry in logged],
        "weight": trainer.model.layer.weight.item(),
    }


def train_and_resume(rank: int, folder: Path, settings: dict[str, Any]) -> None:
    """Train, resume from a checkpoint in the second pass, and write both outcomes to a file."""
    whole = new_trainer(folder / "run", max_steps=6, **settings)
    whole.train()
    resumed = new_trainer(folder / "resumed", saves=False, max_steps=6, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-4"))
    found = [outcome(resumed), outcome(whole, after=4)]
    (folder / f"outcome_{rank}.json").write_text(json.dumps(found))
