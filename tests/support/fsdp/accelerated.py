"""Programs that each rank runs with a network that accelerate or the Trainer has sharded."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import AttachedStep, attach
from mfwrap.callbacks import EMACallback
from mfwrap.compatibility import accelerate as compatibility
from mfwrap.runner.averages import average_of
from mfwrap.trainer import MFTrainerMixin
from support.attached_runs import new_accelerator
from support.fsdp.accumulation import MessageBytes
from support.fsdp.training import whole
from support.small_llama import small_llama

__all__ = [
    "Loop",
    "evaluate_averages",
    "load_attached",
    "load_ignored_shards",
    "reduce_with_trainer",
    "resume_attached",
    "save_attached",
    "train_attached",
    "train_with_trainer",
]

NUM_STEPS = 3
NUM_ROWS = 4
"""Number of rows of a micro-batch, over all ranks together."""
MAX_NORM = 0.5
DECAY = 0.9
LAYERS = "LlamaDecoderLayer"


@contextlib.contextmanager
def reset_accelerate_after() -> Iterator[None]:
    """Reset accelerate's shared state and environment variables when the program ends."""
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            os.environ.pop(name, None)


def enable_sharding(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make an accelerator shard networks on a CPU, where accelerate ignores its FSDP plugin."""
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def rows_of(step: int, micro_batch: int, rank: int, num_ranks: int) -> Tensor:
    """Return a rank's share of a micro-batch, of shape ``(rows, 8)``."""
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    tokens = torch.randint(0, 256, (NUM_ROWS, 8), generator=generator)
    return tokens.chunk(num_ranks)[rank]


class Loop:
    """An attached accelerate loop; with several ranks, its network is sharded.

    Args:
        accumulation: Number of micro-batches per update.
        state_dict_type: How accelerate saves a sharded network.
        sync_each_batch: Whether the gradients of each micro-batch are reduced.
        is_sharded: Whether the network is sharded; ``None`` shards it on several ranks.
    """

    def __init__(
        self,
        accumulation: int,
        state_dict_type: str = "SHARDED_STATE_DICT",
        *,
        sync_each_batch: bool = False,
        is_sharded: bool | None = None,
    ) -> None:
        accumulates = GradientAccumulationPlugin(accumulation, sync_each_batch=sync_each_batch)
        self.accelerator = new_accelerator(gradient_accumulation_plugin=accumulates)
        self.accumulation = accumulation
        if self.accelerator.num_processes > 1 if is_sharded is None else is_sharded:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=[LAYERS],
                cpu_ram_efficient_loading=False,
                state_dict_type=state_dict_type,
            )
            enable_sharding(self.accelerator, plugin)
        torch.manual_seed(0)
        model = small_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        self.attached: AttachedStep = attach(
            self.accelerator,
            StepConfig(local_norm=not sync_each_batch),
            lambda prepared: ExponentialMovingAverage(prepared, DECAY),
            scale_sense=2.0**10,
        )
        self.model: nn.Module
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, first_step: int = 0) -> list[dict[str, Tensor]]:
        """Train `NUM_STEPS` steps; return the loss and the norms of each step."""
        accelerator, reports = self.accelerator, []
        for step in range(first_step, first_step + NUM_STEPS):
            for index in range(self.accumulation):
                rows = rows_of(step, index, accelerator.process_index, accelerator.num_processes)
                with accelerator.accumulate(self.model):
                    accelerator.backward(self.model(input_ids=rows, labels=rows).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            output = self.attached.last_output
            reports.append(
                {
                    name: getattr(output, name)
                    for name in ("loss", "global_norm", "local_norm")
                    if hasattr(output, name)
                }
            )
        return reports

    def state(self) -> dict[str, Tensor]:
        """Return the full (unsharded) weights, averages and optimizer moments."""
        averages = self.attached.ema.state_dict()["averages"]
        moments = self.optimizer.optimizer.state.values()
        return (
            {name: whole(weight) for name, weight in self.model.named_parameters()}
            | {f"average of {name}": whole(average) for name, average in averages.items()}
            | {f"moment {i}": whole(each["exp_avg"]) for i, each in enumerate(moments)}
        )


@reset_accelerate_after()
def train_attached(
    rank: int,
    accumulation: int,
    sync_each_batch: bool = False,  # noqa: FBT001, FBT002  (of `run`)
) -> dict[str, Any]:
    """Train an attached loop that clips; return its reports, its state and its reductions."""
    del rank
    loop = Loop(accumulation, sync_each_batch=sync_each_batch)
    with MessageBytes() as messages:
        reports = loop.train()
    return {"reports": reports, "state": loop.state(), "reductions": _reductions(messages)}


def _reductions(messages: MessageBytes) -> int:
    return messages.sent["number of _reduce_scatter_base_"]


@reset_accelerate_after()
def reduce_with_trainer(rank: int, folder: str) -> dict[str, Any]:
    """Train with the Trainer in both ways; return logged norms, weights and reductions of each."""
    del rank
    found: dict[str, Any] = {}
    for way, sync_each_batch in {"once": False, "each": True}.items():
        accumulation = {"sync_each_batch": sync_each_batch}
        trainer = new_trainer(
            f"{folder}/{way}",
            2,
            "FULL_STATE_DICT",
            [],
            StepConfig(),
            accelerator_config={"gradient_accumulation_kwargs": accumulation},
        )
        with MessageBytes() as messages:
            trainer.train()
        log = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
        reductions = _reductions(messages)
        found[way] = {"norms": log, "state": _weights(trainer), "reductions": reductions}
    return found


@reset_accelerate_after()
def resume_attached(rank: int, folder: str, state_dict_type: str) -> dict[str, Any]:
    """Save a checkpoint in the middle of a training, and finish it with and without resuming.

    Returns:
        ``"unbroken"``: final state of the loop that continued after saving. ``"resumed"``: final
        state of a new loop that loaded the checkpoint. ``"files"``: files of the checkpoint.
        ``"applied"``: number of updates that the resumed loop has applied in total.
    """
    del rank
    loop = Loop(2, state_dict_type)
    loop.train()
    loop.accelerator.save_state(folder)
    loop.train(NUM_STEPS)
    unbroken = loop.state()
    resumed = Loop(2, state_dict_type)
    resumed.accelerator.load_state(folder)
    resumed.train(NUM_STEPS)
    return {
        "unbroken": unbroken,
        "resumed": resumed.state(),
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "applied": int(resumed.attached.last_report.applied_updates),
    }


@reset_accelerate_after()
def save_attached(rank: int, folder: str, state_dict_type: str) -> dict[str, Tensor]:
    """Train an attached loop of a sharded network, and save it; return its state."""
    del rank
    loop = Loop(2, state_dict_type)
    loop.train()
    loop.accelerator.save_state(folder)
    return loop.state()


@reset_accelerate_after()
def load_attached(rank: int, folder: str, state_dict_type: str) -> dict[str, Any]:
    """Load a checkpoint of `save_attached`; return the state and the accumulation steps."""
    del rank
    loop = Loop(2, state_dict_type, is_sharded=True)
    loop.accelerator.load_state(folder)
    return {"state": loop.state(), "steps": loop.accelerator.gradient_accumulation_steps}


@reset_accelerate_after()
def load_ignored_shards(rank: int, folder: str) -> str:
    """Save and load a sharded loop as if accelerate were 1.12; return the error."""
    del rank
    loop = Loop(1)
    loop.train()
    loop.accelerator.save_state(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "is_installed", lambda *_: False)
        with pytest.raises(ValueError, match="cannot resume") as caught:
            loop.accelerator.load_state(folder)
    return str(caught.value)


class ShardingTrainer(Trainer):
    """A stock Trainer that shards its network on a CPU, as the Trainer does on GPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator and enable sharding if there are several ranks."""
        super().create_accelerator_and_postprocess()
        if self.accelerator.num_processes > 1:
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            enable_sharding(self.accelerator, plugin)
            self.is_fsdp_enabled = True


class ShardingMFTrainer(MFTrainerMixin, ShardingTrainer):
    """A sharding Trainer with mfwrap's step."""


def new_trainer(
    folder: str,
    num_ranks: int,
    state_dict_type: str,
    callbacks: list[TrainerCallback],
    step: StepConfig | None = None,
    **arguments: Any,
) -> ShardingMFTrainer:
    """Return a trainer of the small Llama; with several ranks, its network is sharded."""
    new_accelerator()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (64, 8), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(0)
    sharding: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": [LAYERS],
            "cpu_ram_efficient_loading": False,
            "state_dict_type": state_dict_type,
        },
    }
    return ShardingMFTrainer(
        small_llama(),
        TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=NUM_ROWS // num_ranks,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            max_grad_norm=MAX_NORM,
            logging_steps=1,
            save_steps=3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            optim="adamw_torch_fused",
            **arguments,
            **(sharding if num_ranks > 1 else {}),
        ),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=callbacks,
        step=StepConfig(local_norm=True) if step is None else step,
        ema=lambda prepared: ExponentialMovingAverage(prepared, DECAY),
    )


def _averages(trainer: ShardingMFTrainer) -> dict[str, Tensor]:
    averages = trainer.ema.state_dict()["averages"]
    return {name: whole(average) for name, average in averages.items()}


def _weights(trainer: ShardingMFTrainer) -> dict[str, Tensor]:
    return {name: whole(weight) for name, weight in trainer.model_wrapped.named_parameters()}


@reset_accelerate_after()
def train_with_trainer(
    rank: int,
    folder: str,
    resumed: str | None = None,
    num_ranks: int = 2,
    state_dict_type: str = "FULL_STATE_DICT",
) -> dict[str, Any]:
    """Train to the end, from the beginning or from the checkpoint `resumed`."""
    del rank
    trainer = new_trainer(folder, num_ranks, state_dict_type, [])
    trainer.train(resume_from_checkpoint=resumed)
    averages = {f"average of {name}": value for name, value in _averages(trainer).items()}
    return {
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "state": _weights(trainer) | averages,
    }


@reset_accelerate_after()
def evaluate_averages(rank: int, folder: str, num_ranks: int = 2) -> dict[str, Any]:
    """Train with `EMACallback`; return the evaluation losses, averages and final weights.

    ``"exported"`` and ``"best"`` are the averages in the last and in the best checkpoint, and
    ``"of best"`` those that a recipe loads from the best checkpoint.
    """
    del rank
    trainer = new_trainer(
        folder,
        num_ranks,
        "FULL_STATE_DICT",
        [EMACallback()],
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so the best checkpoint is not the last one
    )
    trainer.train()
    log = trainer.state.log_history
    best = Path(trainer.state.best_model_checkpoint)
    averages = _averages(trainer)
    average_of(trainer)
    return {
        "of best": _averages(trainer),
        "losses": torch.tensor([entry["eval_loss"] for entry in log if "eval_loss" in entry]),
        "exported": load_file(Path(folder, "checkpoint-6", "ema", "model.safetensors")),
        "averages": averages,
        "best": load_file(best / "ema" / "model.safetensors"),
        "end": _weights(trainer),
    }
