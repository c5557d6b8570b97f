"""Programs that each rank runs to train with MFTrainer."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from transformers import TrainerCallback, TrainingArguments

from mfwrap import StepConfig
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.trainer_runs import new_trainer

__all__ = ["come_back_on_own_disk", "save_on_own_disk", "train_with_trainer"]


class _Recording(MFTrainer):
    """Record each micro-batch, and the weights that its forward used."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *rest: Any) -> Tensor:
        weights = [weight.detach().clone() for weight in model.parameters()]
        self.met.append((weights, inputs["inputs"].clone(), inputs["labels"].clone()))
        return super().training_step(model, inputs, *rest)


class _Reporting(TrainerCallback):
    def __init__(self) -> None:
        self.outputs = []

    def on_step_end(self, *_: object, step_output: Any, **__: object) -> None:
        self.outputs.append(step_output)


class _LossInMapping(Classifier):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(inputs, labels)}


def train_with_trainer(rank: int, folder: str) -> dict[str, Any]:
    """Train with two micro-batches per update; return the measured and expected local norms."""
    new_accelerator()
    inputs, labels = map(torch.cat, zip(*labelled_batches(6, size=4), strict=True))
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    torch.manual_seed(0)
    report = _Reporting()
    trainer = _Recording(
        _LossInMapping(),
        TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
        callbacks=[report],
        step=StepConfig(local_norm=True),
        scale_sense=2.0**10,
        communication_hook=(None, fp16_compress_hook),
    )
    trainer.met = []
    trainer.train()
    expected = [
        _own_norms(weights, [(inputs, labels) for _, inputs, labels in trainer.met[first:][:2]])
        for first, (weights, _, _) in list(enumerate(trainer.met))[::2]
    ]
    return {
        "local_norms": torch.stack([output.local_norm for output in report.outputs]),
        "expected": torch.stack(expected),
    }


def _own_norms(weights: list[Tensor], micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    network = Classifier().double()
    for parameter, weight in zip(network.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    losses = [network(inputs.double(), labels) for inputs, labels in micro_batches]
    torch.stack(losses).mean().backward()
    return torch.stack([parameter.grad.norm() for parameter in network.parameters()])


def save_on_own_disk(
    rank: int,
    folder: str,
    each_node: bool,  # noqa: FBT001  (a pool of ranks passes positional arguments)
    is_later: bool = False,  # noqa: FBT001, FBT002  (as above)
) -> list[str]:
    """Train and save one step as if this rank were alone on its node.

    A killed run has left a file in the folder in which checkpoints are written.

    Args:
        rank: Number of this rank.
        folder: Folder that holds the disks of all nodes.
        each_node: The value of ``save_on_each_node``.
        is_later: The value of ``async_save``.

    Returns:
        The files of the checkpoint on this rank's disk.
    """
    disk = Path(folder) / str(rank)
    left_over = disk / "_checkpoint-1.partial" / "checkpoint-1"
    left_over.mkdir(parents=True)
    (left_over / "left_over").write_text("of a killed run", encoding="utf-8")
    with _alone_on_its_node():
        _saving_trainer(
            disk,
            max_steps=1,
            save_on_each_node=each_node,
            extras={"async_save": is_later},
        ).train()
    return sorted(path.name for path in (disk / "checkpoint-1").iterdir())


def come_back_on_own_disk(rank: int, folder: str) -> list[str]:
    """Train and come back after rank 1 was killed before it had its last checkpoint in place.

    Returns:
        The checkpoints on this rank's disk, and the first step after coming back.
    """
    disk = Path(folder) / str(rank)
    with _alone_on_its_node():
        _saving_trainer(disk, max_steps=3, save_on_each_node=True).train()
        if rank == 1:
            shutil.rmtree(disk / "checkpoint-3")
        trainer = _saving_trainer(disk, max_steps=4, save_on_each_node=True, logging_steps=1)
        first = _First()
        trainer.add_callback(first)
        trainer.train(resume_from_checkpoint="auto")
    return [*sorted(path.name for path in disk.glob("*checkpoint-*")), str(first.step)]


class _First(TrainerCallback):
    """Note the first step of a training."""

    step = 0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Note the step."""
        self.step = self.step or state.global_step


@contextlib.contextmanager
def _alone_on_its_node() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOCAL_RANK", "0")
        environment.setenv("LOCAL_WORLD_SIZE", "1")
        yield


def _saving_trainer(disk: Path, **arguments: Any) -> Any:
    return new_trainer(
        MFTrainer,
        disk,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=1,
        ddp_backend="gloo",
        **arguments,
    )
