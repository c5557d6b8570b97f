"""Programs that each rank runs to train with Trainers of other libraries."""

from pathlib import Path

from mfwrap.trainer import MFTrainerMixin
from support.other_trainers import new_trainer
from support.trainer_runs import train

__all__ = ["count_tokens"]


def count_tokens(rank: int, folder: str) -> list[list[float]]:
    """Train with TRL's SFTTrainer, and again from the middle; return the counts of both logs."""
    del rank
    settings = {"save_strategy": "steps", "save_steps": 3}
    whole = train(new_trainer("SFT", Path(folder, "run"), MFTrainerMixin, **settings))
    again = new_trainer("SFT", Path(folder, "again"), MFTrainerMixin)
    resumed = train(again, Path(folder, "run", "checkpoint-3"))
    return [[e["num_tokens"] for e in run.log if "num_tokens" in e] for run in (whole, resumed)]
