"""Programs that two ranks run to train, resume and stop with MFTrainer."""

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback

from mfwrap import termination
from mfwrap.trainer import MFTrainer
from support.resumed_training import RunSettings, end_of, files, new_trainer, spoil_random_states

__all__ = [
    "ENDINGS",
    "NUM_RANKS",
    "NUM_STEPS",
    "RESUMED",
    "SETTINGS",
    "Ending",
    "run_rank",
    "told_twice",
]

NUM_RANKS = 2
NUM_STEPS = 9
"""Number of updates of a run: three epochs of three updates."""

RESUMED = (2, 3, 4)
"""Steps after which a run is resumed. Step 3 ends an epoch, and every fourth step is logged."""

SETTINGS = RunSettings(logging_steps=4)


@dataclass(frozen=True)
class Ending:
    """The time at which a training receives a SIGTERM, and the steps at which it may stop.

    Args:
        event: Event at which the signal comes.
        steps: For each rank, the number of updates before the signal; ``None`` for no signal.
        stopped: Steps after which all ranks may stop: the step in which a rank first receives the
            signal, or the next step if another rank has already begun the next step.
    """

    event: str
    steps: tuple[int | None, int | None]
    stopped: tuple[int, ...]


ENDINGS = {
    "first rank": Ending("on_substep_end", (3, None), (4, 5)),
    "last rank": Ending("on_substep_end", (None, 3), (4, 5)),
    "both ranks": Ending("on_substep_end", (3, 3), (4, 5)),
    "one after the other": Ending("on_substep_end", (4, 3), (4, 5)),
    "before the first step": Ending("on_train_begin", (None, 0), (1, 2)),
    "last step": Ending("on_substep_end", (None, 8), (9,)),
    "at the end": Ending("on_train_end", (None, 9), (9,)),
}


class Signalled(TrainerCallback):
    """Send this process one SIGTERM, and make the random states of the ranks differ.

    Args:
        rank: Number of this rank.
        ending: Time of the signal; ``None`` for no signal.
    """

    def __init__(self, rank: int, ending: Ending | None) -> None:
        self._rank = rank
        self._step = None if ending is None else ending.steps[rank]
        if ending is not None:
            setattr(self, ending.event, self._send)

    def _send(self, _args, state, control, **_: Any) -> Any:
        if state.global_step == self._step:
            self._step = None
            os.kill(os.getpid(), signal.SIGTERM)
        return control

    def on_step_begin(self, _args, _state, _control, **_: Any) -> None:
        """Draw one set of random numbers on rank 0 and two sets on rank 1."""
        for _ in range(1 + self._rank):
            torch.rand(())
            random.random()  # noqa: S311  (test data, not cryptography)


@contextmanager
def as_rank(rank: int, port: int) -> Iterator[None]:
    """Act as a rank that ``torchrun`` has started."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    _place(local_rank=rank, on_node=NUM_RANKS)
    distributed.init_process_group("gloo")
    yield
    distributed.destroy_process_group()


def _place(*, local_rank: int, on_node: int) -> None:
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(on_node)}


def _trainer(folder: Path, rank: int, ending: Ending | None = None, **keywords: Any) -> Any:
    return new_trainer(
        folder,
        SETTINGS,
        callbacks=[Signalled(rank, ending)],
        ddp_backend="gloo",
        num_train_epochs=3,
        **keywords,
    )


def _resumed(checkpoint: Path, folder: Path, rank: int, **keywords: Any) -> Any:
    trainer = _trainer(folder, rank, seed=1, **keywords)
    spoil_random_states()
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def run_rank(rank: int, folder: str, port: int) -> None:
    """Run all trainings as one of the ranks, and write the results to the folder."""
    root = Path(folder)
    with as_rank(rank, port):
        alone = _trainer(root / "alone", rank)
        alone.train()
        results = {
            "alone": end_of(alone),
            "resumed": {step: _resume(root, step, rank) for step in RESUMED},
            "told": {name: _tell(root / name, rank, ENDINGS[name]) for name in ENDINGS},
            "refused": _refuse(root, rank),
            "nodes": _on_two_nodes(root, rank),
        }
    torch.save(results, root / f"rank{rank}.pt")


def _resume(root: Path, step: int, rank: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = _resumed(root / "alone" / f"checkpoint-{step}", root / f"from {step}", rank)
    return end_of(trainer)


def _tell(folder: Path, rank: int, ending: Ending) -> dict[str, Any]:
    trainer = _trainer(folder, rank, ending)
    before = signal.getsignal(signal.SIGTERM)
    status = None
    try:
        trainer.train()
    except SystemExit as end:
        status = end.code
    handler_is_back = signal.getsignal(signal.SIGTERM) is before
    step = trainer.state.global_step
    checkpoint = folder / f"checkpoint-{step}"
    again = _resumed(checkpoint, folder / "resumed", rank) if checkpoint.exists() else None
    return {
        "status": status,
        "handler is back": handler_is_back,
        "step": step,
        "end": None if again is None else end_of(again),
    }


def _refuse(root: Path, rank: int) -> list[str]:
    """Resume a checkpoint with an average in a trainer without one; return the error message."""
    keywords: Any = {"trainer_settings": {"ema": None}}
    try:
        _resumed(root / "alone" / "checkpoint-2", root / "refused", rank, **keywords)
    except ValueError as error:
        return [str(error)]
    return []


def _on_two_nodes(root: Path, rank: int) -> dict[str, Sequence[str]]:
    """Train as if this rank were alone on its node, with and without ``save_on_each_node``.

    Returns:
        The files on the node's disk, by the value of ``save_on_each_node``.
    """
    _place(local_rank=0, on_node=1)
    found = {}
    for each_node in (False, True):
        name = f"node {rank}, {each_node}"
        left_over = root / name / "_checkpoint-1.partial" / "checkpoint-1"
        left_over.mkdir(parents=True)
        (left_over / "half").write_text("of an earlier run")
        trainer: MFTrainer = _trainer(root / name, rank, save_on_each_node=each_node)
        trainer.args.max_steps = 2
        trainer.train()
        found[str(each_node)] = files(root / name)
    return found


class SignalledTwice(TrainerCallback):
    """Send this process SIGTERM within a step, and repeat it."""

    def on_substep_end(self, _args, _state, _control, **_: Any) -> None:
        """Send the signal until it ends the process, when it no longer counts as a copy."""
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(0.01)


def told_twice(rank: int, folder: str, port: int) -> None:
    """Train, and send the last rank a signal that is repeated."""
    termination._SECONDS_OF_COPIES = 0.0
    with as_rank(rank, port):
        trainer = _trainer(Path(folder), rank)
        if rank == NUM_RANKS - 1:
            trainer.add_callback(SignalledTwice())
        trainer.train()


def _say(line: str) -> None:
    """Write a line in one piece: `print` may write its end later, after another rank's line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Telling(TrainerCallback):
    """Print each step and each checkpoint."""

    def on_step_end(self, args, state, _control, **_: Any) -> None:
        """Print the step on rank 0."""
        if args.process_index == 0:
            _say(f"step {state.global_step}")

    def on_save(self, _args, state, _control, **_: Any) -> None:
        """Print the checkpoint on all ranks."""
        _say(f"saved checkpoint-{state.global_step}")


def _train_under_torchrun(folder: Path) -> None:
    trainer = _trainer(folder, int(os.environ["RANK"]), max_steps=10**6, save_strategy="no")
    trainer.add_callback(Telling())
    trainer.train()


if __name__ == "__main__":
    _train_under_torchrun(Path(sys.argv[1]))
