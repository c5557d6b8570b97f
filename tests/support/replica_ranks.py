"""Program that each rank runs to test `ReplicaCheck` and `CheckpointMonitor`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn
from transformers import TrainerControl, TrainerState

from mfwrap.callbacks import CheckpointMonitor, ReplicaCheck

__all__ = ["NUM_RANKS", "run_rank"]

NUM_RANKS = 3
CASES: dict[str, dict[str, Any]] = {
    "same": {},
    "weight": {"on_rank": 2, "where": "weight"},
    "gradient": {"on_rank": 1, "where": "gradient"},
    "stop": {"on_rank": 0, "where": "weight", "stop": True},
}


def run_rank(rank: int, folder: str) -> None:
    """Run every case as one rank and save the results in the folder."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            results[name] = _check(rank, Path(folder) / name, **case)
        except RuntimeError as error:
            results[name] = str(error)
    results["saves"] = _saves(rank, Path(folder) / "saves")
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()


def _check(
    rank: int, folder: Path, *, where: str = "", stop: bool = False, on_rank: int = -1
) -> list[int]:
    """Run six steps, flip one bit on rank `on_rank` in step 4, and return the completed steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    state, control = TrainerState(), TrainerControl()
    callback = ReplicaCheck(2, gradients=True, stop=stop, folder=folder)
    callback.on_train_begin(None, state, control)
    steps = []
    for step in range(1, 7):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        weight = model[1].weight
        if step == 4 and rank == on_rank:
            flipped = weight.data if where == "weight" else weight.grad
            flipped.view(torch.int32)[1, 2] ^= 1
        callback.on_pre_optimizer_step(None, state, control, model=model)
        if step == 6 and where == "weight":
            weight.data.fill_(1.0)
        state.global_step = step
        callback.on_step_end(None, state, control, model=model)
        steps.append(step)
    callback.on_train_end(None, state, control)
    return steps


def _saves(rank: int, folder: Path) -> list[int]:
    """Return the steps at which a `CheckpointMonitor` with a time interval saves.

    The clocks of the ranks run at different speeds.
    """
    now = [0.0]
    monitor = CheckpointMonitor(save_checkpoint_seconds=10, clock=lambda: now[0])
    state, control = TrainerState(max_steps=20), TrainerControl()
    arguments: Any = SimpleNamespace(
        save_total_limit=None, output_dir=str(folder), device=torch.device("cpu")
    )
    monitor.on_train_begin(arguments, state)
    saved = []
    for step in range(1, 13):
        now[0] += 4.0 if rank == 0 else 7.0 * rank
        state.global_step, control.should_save = step, False
        monitor.on_step_end(arguments, state, control)
        if control.should_save:
            saved.append(step)
    return saved
