"""Trainings on two ranks whose model is sampled."""

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap.callbacks import SampleMonitor
from mfwrap.tensors.shards import is_distributed
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.trainer_runs import Counting, padded, tiny_llama

__all__ = ["fail_on_rank_0", "sample_on_ranks"]


def _trainer(folder: str, model: Any, *callbacks: Any) -> MFTrainer:
    new_accelerator()
    return MFTrainer(
        model,
        TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Counting(64),
        eval_dataset=Counting(6),
        data_collator=padded,
        callbacks=list(callbacks),
    )


def sample_on_ranks(rank: int, layout: str, folder: str, samples: bool) -> dict[str, Tensor]:  # noqa: FBT001  (ranks take no keywords)
    """Train, or only begin to, with or without samples; return the weights.

    Args:
        rank: Rank of this process.
        layout: ``"ddp"``, or ``"fsdp"`` for a model in shards before its first step.
        folder: Run folder.
        samples: Whether to sample.
    """
    monitor = SampleMonitor(num_rows=1, step_interval=2, max_new_tokens=4)
    if layout == "ddp":
        trainer = _trainer(folder, tiny_llama(), *[monitor] * samples)
        trainer.train()
        _reset()
        return {name: each.detach().clone() for name, each in trainer.model.state_dict().items()}
    model = tiny_llama()
    # Weights that differ from the initial ones.
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    arguments = TrainingArguments(folder, report_to="none", use_cpu=True)
    monitor.take_evaluation_loader(
        lambda: torch.utils.data.DataLoader(Counting(6), collate_fn=padded)
    )
    state = TrainerState(is_world_process_zero=rank == 0)
    monitor.on_train_begin(arguments, state, TrainerControl(), model=model)
    monitor.on_train_end()
    assert all(is_distributed(each) for each in model.parameters())
    _reset()
    return weights


def fail_on_rank_0(rank: int, folder: str) -> str:
    """Train a model that cannot generate on rank 0; return the message of the error."""
    model = tiny_llama()
    if rank == 0:

        def fail(**_: Any) -> None:
            msg = "cannot speak"
            raise RuntimeError(msg)

        model.generate = fail  # type: ignore[method-assign]  # (planted)
    monitor = SampleMonitor(num_rows=1, step_interval=2, folder=Path(folder))
    try:
        _trainer(folder, model, monitor).train()
    except RuntimeError as error:
        return str(error)
    finally:
        _reset()
    return "no error"


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
