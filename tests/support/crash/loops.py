"""Programs that a `ForkServer` runs. Each trains into ``run``, from its newest checkpoint if any.

Each loop but the recipe writes ``end/<rank>.pt`` at its end: the whole state of the rank.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.callbacks import CheckpointMonitor, LocalNormMonitor, TrainingStateMonitor
from mfwrap.callbacks.metrics_recorder import MetricsRecorder
from mfwrap.cli import main
from support.resumed_training import RunSettings, end_of, new_trainer, spoil_random_states

__all__ = [
    "RUN",
    "command_line",
    "monitors",
    "newest_checkpoint",
    "recipe",
    "recipe_in_background",
    "trainer",
    "trainer_in_background",
    "write_end",
]

RUN, _END = Path("run"), Path("end")


def command_line(*arguments: str) -> None:
    """Run mfwrap's command line."""
    sys.argv[0] = "mfwrap"
    main(arguments)


def recipe() -> None:
    """Run ``mfwrap train crash.yaml``, or resume it."""
    resumes = newest_checkpoint() is not None
    command_line("train", "crash.yaml", *(["--resume"] if resumes else []))


def recipe_in_background() -> None:
    """Do what `recipe` does, and save in the background."""
    resumes = newest_checkpoint() is not None
    setting = ("--set", "async_save=true")
    command_line("train", "crash.yaml", *setting, *(["--resume"] if resumes else []))


def trainer() -> None:
    """Train with `MFTrainer` and monitors."""
    _train(in_background=False)


def trainer_in_background() -> None:
    """Do what `trainer` does, and save in the background."""
    _train(in_background=True)


def _train(*, in_background: bool) -> None:
    checkpoint = newest_checkpoint()
    run = new_trainer(
        RUN,
        RunSettings(logging_steps=5),
        seed=0 if checkpoint is None else 1,
        callbacks=[
            *monitors(),
            CheckpointMonitor(
                save_checkpoint_steps=2, keep_checkpoint_max=1, async_save=in_background
            ),
        ],
        save_strategy="no",
    )
    if checkpoint is not None:
        spoil_random_states()
    run.train(resume_from_checkpoint="auto")
    # A run that is resumed after its last step loads no random states. The Trainer saves the log of
    # rank 0, so after a resume the other ranks have that log, too.
    left_out = ("generator",) if run.args.process_index == 0 else ("generator", "/log")
    write_end({name: value for name, value in end_of(run).items() if not name.endswith(left_out)})


def monitors() -> list[Any]:
    """Return new monitors that write records."""
    return [
        MetricsRecorder(RUN),
        LocalNormMonitor(folder=RUN),
        TrainingStateMonitor(
            local_norm_format="jsonl",
            weight_state_format="jsonl",
            folder=RUN,
            origin_epochs=1,
            dataset_size=1,
        ),
    ]


def newest_checkpoint() -> str | None:
    """Return the checkpoint of the highest step; ``None`` if there is none."""
    return get_last_checkpoint(str(RUN)) if RUN.is_dir() else None


def write_end(state: dict[str, object]) -> None:
    """Write the state of this rank at the end of its training."""
    _END.mkdir(exist_ok=True)
    torch.save(state, _END / f"{os.environ.get('RANK', '0')}.pt")
