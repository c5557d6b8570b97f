"""A training with `MFTrainer` on two ranks that is asked for checkpoints."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from mfwrap.records import checkpoint_requests
from mfwrap.trainer import MFTrainer
from support.ranks.trainers import ROWS, Line

__all__ = ["ASKED", "train_and_ask"]

ASKED = (3, 9)
"""Steps at whose end the checkpoints are asked for."""


class _Asks(TrainerCallback):
    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self.saved: list[int] = []

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Ask on rank 0."""
        if self._rank == 0 and state.global_step in ASKED:
            checkpoint_requests.request_checkpoint(self._folder)

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Note the step."""
        self.saved.append(state.global_step)


def train_and_ask(rank: int, folder: Path) -> None:
    """Train, and write the steps that this rank has saved to a file."""
    checkpoint_requests._SECONDS_BETWEEN_LOOKS = 0.0
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=16,
        save_steps=100,
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    asks = _Asks(rank, folder / "run")
    MFTrainer(Line(), arguments, train_dataset=ROWS, callbacks=[asks]).train()
    saved = [step for step in asks.saved if step < arguments.max_steps]
    (folder / f"saved_{rank}").write_text(" ".join(map(str, saved)))
