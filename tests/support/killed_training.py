"""Train in a separate process, which prints its events so that a test can signal it at any of them.

Run as a script, this module trains in a folder. It resumes from the folder's last checkpoint, if
there is one.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.callbacks import MetricsRecorder
from mfwrap.trainer import MonitorCallback
from support.paths import TESTS
from support.resumed_training import RunSettings, end_of, new_trainer, spoil_random_states

__all__ = ["PLACES", "Moment", "new_recorder", "start_process", "train_in", "write_task"]

PLACES = {"data load": 4, "forward": 4, "micro-batch": 3, "optimizer": 1, "save": 1}
"""Places of an update where a process can wait, and how often an update comes to each of them."""


@dataclass(frozen=True)
class Moment:
    """A moment of a training, at which a process waits for a line on stdin.

    Args:
        place: Name in `PLACES`.
        num_updates: Number of finished updates.
        visit: How often this update has come to the place before.
    """

    place: str
    num_updates: int
    visit: int = 0


def start_process(
    folder: Path,
    settings: RunSettings,
    *,
    waits: bool = False,
    moment: Moment | None = None,
    stderr: Any = None,
) -> "subprocess.Popen[str]":
    """Start training in `folder` in a process that prints its events line by line.

    Args:
        folder: Folder for checkpoints, and for ``end.pt`` at the end.
        settings: Settings of the run.
        waits: Whether the process waits for a line on stdin at each ``on_substep_end``.
        moment: Moment at which the process prints ``moment`` and waits for a line on stdin. The
            run then records ``metrics.jsonl``.
        stderr: Where the process writes standard error.
    """
    write_task(folder, settings, waits=waits, moment=moment)
    return subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # as torchrun does, so that a signal can reach all its processes
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def write_task(
    folder: Path, settings: RunSettings, *, waits: bool = False, moment: Moment | None = None
) -> None:
    """Write what `train_in` does; see `start_process` for the arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    task = {"settings": asdict(settings), "waits": waits}
    task["moment"] = None if moment is None else asdict(moment)
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")


def new_recorder(folder: Path) -> MetricsRecorder:
    """Return the callback that records ``metrics.jsonl`` in a folder."""
    return MetricsRecorder(folder)


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


class WaitingAt(MonitorCallback):
    """Print ``moment`` once at a moment, and wait for a line on stdin.

    Args:
        moment: The moment.
    """

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._visits = 0
        self._state: Any = None

    def follow(self, trainer: Any) -> None:
        """Hook the data collator and the network of a trainer."""
        collate = trainer.data_collator

        def visited(rows: Any) -> Any:
            self._visit("data load")
            return collate(rows)

        trainer.data_collator = visited
        trainer.model.register_forward_pre_hook(lambda *_: self._visit("forward"))

    def on_train_begin(self, _args, state, _control, optimizer=None, **_: Any) -> None:
        """Hook the optimizer."""
        self._state = state
        optimizer.optimizer.register_step_pre_hook(lambda *_: self._visit("optimizer"))

    def on_substep_end(self, _args, _state, _control, **_: Any) -> None:
        """Come to the end of a micro-batch."""
        self._visit("micro-batch")

    def save_into(self, folder: Path, args: Any, model: Any) -> None:
        """Come to a save, whose checkpoint is not in place yet."""
        del folder, args, model
        self._visit("save")

    def _visit(self, place: str) -> None:
        if (place, self._state.global_step) != (self._moment.place, self._moment.num_updates):
            return
        if self._visits == self._moment.visit:
            print("moment", flush=True)  # noqa: T201  (the parent process reads it)
            sys.stdin.readline()
        self._visits += 1


def train_in(folder: Path) -> None:
    """Train as the task in a folder says."""
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    settings = RunSettings(**task["settings"])
    checkpoint = get_last_checkpoint(str(folder))
    callbacks: list[Any] = [Telling(waits=task["waits"])]
    waiting = None if task["moment"] is None else WaitingAt(Moment(**task["moment"]))
    if waiting is not None:
        callbacks += [new_recorder(folder), waiting]
    trainer = new_trainer(
        folder, settings, seed=0 if checkpoint is None else 1, callbacks=callbacks
    )
    if waiting is not None:
        waiting.follow(trainer)
    if checkpoint is not None:
        spoil_random_states()
    trainer.train(resume_from_checkpoint=checkpoint)
    torch.save(end_of(trainer), folder / "end.pt")


if __name__ == "__main__":
    train_in(Path(sys.argv[1]))
