"""Programs in which two ranks resume from damaged checkpoints."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks import LocalNormMonitor, TrainingStateMonitor
from mfwrap.sharded_checkpoint import load_sharded, save_sharded
from support.attached_runs import AttachedRun
from support.checkpoint_folders import Damage, copied
from support.resumed_training import RunSettings, StopAfter, new_trainer
from support.small_networks import TokenClassifier, labelled_batches

__all__ = ["DAMAGED", "resume_damaged"]

Resume = Callable[[Path], object]


def _trainer(rank: int, folder: Path) -> tuple[Path, Resume]:
    del rank
    keywords = {"save_strategy": "no", "use_cpu": True}
    monitors = [LocalNormMonitor(step_interval=1), TrainingStateMonitor()]
    written = new_trainer(
        folder / "run", RunSettings(), callbacks=[*monitors, StopAfter(2)], **keywords
    )
    written.train()
    trainer = new_trainer(folder / "resumed", RunSettings(), **keywords)
    return (
        folder / "run" / "checkpoint-2",
        lambda checkpoint: trainer.train(resume_from_checkpoint=str(checkpoint)),
    )


def _attached(rank: int, folder: Path) -> tuple[Path, Resume]:
    del rank
    run = AttachedRun()
    run.train(0, 2)
    run.accelerator.save_state(folder / "step_2")
    return folder / "step_2", run.accelerator.load_state


def _sharded(rank: int, folder: Path) -> tuple[Path, Resume]:
    network: nn.Module = TokenClassifier()
    fully_shard(network)
    cell = MFTrainOneStepCell(network, AdamW(network.parameters(), fused=True))
    cell(*labelled_batches(1, seed=rank)[0])
    save_sharded(folder / "step_2", cell)
    return folder / "step_2", lambda checkpoint: load_sharded(checkpoint, cell)


DAMAGED: dict[str, tuple[Callable[[int, Path], tuple[Path, Resume]], Iterable[str]]] = {
    "MFTrainer": (
        _trainer,
        ("rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "optimizer.pt"),
    ),
    "attach": (_attached, ("random_states_0.pkl", "random_states_1.pkl", "optimizer.bin")),
    "sharded": (_sharded, ("shard-00001*", "shard-00002*")),
}
"""By name: a function that writes a checkpoint and returns it with the function that resumes from
it, and files of the checkpoint: some are read by one rank only."""


def resume_damaged(rank: int, name: str, folder: str) -> list[tuple[str, str, str]]:
    """Flip a bit in each file of `DAMAGED` in turn, and resume from the checkpoint.

    Returns:
        For each file: its name, the damaged checkpoint, and the message of the error.
    """
    write, patterns = DAMAGED[name]
    intact, resume = write(rank, Path(folder))
    damaged = Path(folder) / "damaged" / intact.name
    said = []
    for pattern in patterns:
        [file] = intact.glob(pattern)
        if rank == 0:
            copied(intact, damaged.with_name(intact.name.replace("2", "1")))
            Damage(file.name, 8 * (file.stat().st_size // 2), 0).do(copied(intact, damaged))
        distributed.barrier()
        with pytest.raises(ValueError, match="cannot") as caught:
            resume(damaged)
        said.append((file.name, str(damaged), str(caught.value)))
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(damaged.parent)
    return said
