"""What each of two ranks does in the tests of attached loops under DistributedDataParallel."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import distributed

from support.attached_runs import FACTORS, AttachedRun, RunSettings

__all__ = ["NUM_RANKS", "SETTINGS", "STOP", "run_rank"]

NUM_RANKS = 2
STOP = 6
"""Updates before a checkpoint; the last of them is skipped."""

SETTINGS = {
    "fused": RunSettings(accumulation=2),
    "not fused": RunSettings(optimizer="SGD"),
    "bf16": RunSettings(precision="bf16", optimizer="fused SGD"),
}


def run_rank(rank: int, folder: str) -> None:
    """Do everything as one of the ranks, and leave the results in the folder."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "localhost"}
    _place(local_rank=rank, on_node=NUM_RANKS)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    results = {
        "trained": {name: _train(settings, rank) for name, settings in SETTINGS.items()},
        "saved": _save_and_load(rank, Path(folder) / "saved"),
    }
    _place(local_rank=0, on_node=1)
    results["each node"] = _save_and_load(rank, Path(folder) / f"node{rank}", each_node=True)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()


def _place(*, local_rank: int, on_node: int) -> None:
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(on_node)}


def _factors(rank: int) -> tuple[float, ...]:
    """Return factors of losses that are NaN on the last rank only."""
    return FACTORS if rank == NUM_RANKS - 1 else (1.0,) * len(FACTORS)


def _run(settings: RunSettings, **accelerator_settings: Any) -> AttachedRun:
    # Otherwise accelerate's schedules make one step a rank.
    split = DataLoaderConfiguration(split_batches=True)
    return AttachedRun(settings, dataloader_config=split, **accelerator_settings)


def _train(settings: RunSettings, rank: int) -> dict[str, Any]:
    run = _run(settings)
    losses, norms, skipped = [], [], []
    for update in range(len(FACTORS)):
        losses += run.train(update, update + 1, _factors(rank))
        norms.append(run.step.last_output.global_norm)
        skipped.append(run.accelerator.optimizer_step_was_skipped)
    return {"losses": losses, "norms": norms, "skipped": skipped, "state": run.state()}


def _save_and_load(rank: int, folder: Path, *, each_node: bool = False) -> dict[str, Any]:
    project = ProjectConfiguration(project_dir=str(folder), save_on_each_node=each_node)
    run = _run(SETTINGS["fused"], project_config=project)
    run.train(0, STOP, _factors(rank))
    run.accelerator.save_state(folder)
    run.accelerator.save_state(folder.with_name(f"{folder.name} by {rank}"))
    run.accelerator.wait_for_everyone()
    saved = run.state()
    run.train(STOP, len(FACTORS), _factors(rank))
    end = run.state()
    run.accelerator.load_state(folder)
    loaded = run.state()
    run.train(STOP, len(FACTORS), _factors(rank))
    return {"saved": saved, "end": end, "loaded": loaded, "end again": run.state()}
