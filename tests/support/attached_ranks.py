"""Program that two ranks run to train attached loops with DistributedDataParallel."""

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
"""Number of updates before the checkpoint; the last of them is skipped."""

SETTINGS = {
    "fused": RunSettings(accumulation=2),
    "not fused": RunSettings(optimizer="SGD"),
    "bf16": RunSettings(precision="bf16", optimizer="fused SGD"),
}


def run_rank(rank: int, folder: str) -> None:
    """Run all trainings as one of the ranks, and save their results in `folder`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "localhost"}
    _set_local_rank(rank, ranks_on_node=NUM_RANKS)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    results = {
        "trained": {name: _train(settings, rank) for name, settings in SETTINGS.items()},
        "saved": _save_and_load(rank, Path(folder) / "saved"),
    }
    # Pretend that each rank runs on its own node, to test `save_on_each_node`.
    _set_local_rank(0, ranks_on_node=1)
    results["each node"] = _save_and_load(rank, Path(folder) / f"node{rank}", each_node=True)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()


def _set_local_rank(local_rank: int, *, ranks_on_node: int) -> None:
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks_on_node)}


def _factors(rank: int) -> tuple[float, ...]:
    """Return the loss factors: `FACTORS`, which contain NaNs, on the last rank; 1 elsewhere."""
    return FACTORS if rank == NUM_RANKS - 1 else (1.0,) * len(FACTORS)


def _run(settings: RunSettings, **accelerator_settings: Any) -> AttachedRun:
    # Without split batches, accelerate steps a schedule once per rank at each update.
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
