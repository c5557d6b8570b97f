"""Train in a separate process, which prints its events so that a test can signal it at any of them.

Run as a script, this module trains in a folder. It resumes from the folder's last checkpoint, if
there is one.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from support.paths import TESTS
from support.resumed_training import RunSettings, end_of, new_trainer, spoil_random_states

__all__ = ["start_process"]


def start_process(
    folder: Path, settings: RunSettings, *, waits: bool = False
) -> "subprocess.Popen[str]":
    """Start training in `folder` in a process that prints its events line by line.

    Args:
        folder: Folder for checkpoints, and for ``end.pt`` at the end.
        settings: Settings of the run.
        waits: Whether the process waits for a line on stdin at each ``on_substep_end``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task = {"settings": asdict(settings), "waits": waits}
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # as torchrun does, so that a signal can reach all its processes
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(what: str, step: int) -> None:
    print(f"{what} {step}", flush=True)  # noqa: T201  (the parent process reads it)


class Telling(TrainerCallback):
    """Print each event of a step.

    Args:
        waits: Whether to wait for a line on stdin at each ``on_substep_end``.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits

    def on_substep_end(self, _args, state, _control, **_: Any) -> None:
        """Print that a micro-batch is done."""
        _tell("micro-batch", state.global_step)
        if self._waits:
            sys.stdin.readline()

    def on_step_end(self, _args, state, _control, **_: Any) -> None:
        """Print that the step is done."""
        _tell("step", state.global_step)

    def on_save(self, _args, state, _control, **_: Any) -> None:
        """Print that the checkpoint is written."""
        _tell("saved", state.global_step)


def _train_in(folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    settings = RunSettings(**task["settings"])
    checkpoint = get_last_checkpoint(str(folder))
    trainer = new_trainer(
        folder,
        settings,
        seed=0 if checkpoint is None else 1,
        callbacks=[Telling(waits=task["waits"])],
    )
    if checkpoint is not None:
        spoil_random_states()
    trainer.train(resume_from_checkpoint=checkpoint)
    torch.save(end_of(trainer), folder / "end.pt")


if __name__ == "__main__":
    _train_in(Path(sys.argv[1]))
