"""End a training that a signal has stopped: save its last step, and say how to continue."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Never, final

from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.compatibility.transformers import output_folder_of, save_checkpoint
from mfwrap.termination import EXIT_STOPPED
from mfwrap.trainer.events import MonitorCallback
from mfwrap.trainer.view import TrainerView


@final
@dataclass
class Continuation:
    """How to continue a training that is stopped."""

    command: str
    is_said: bool = False
    """Whether the line about a stopped training has named the command, on any rank."""


_enclosing: list[Continuation] = []
"""Continuations of the enclosing blocks of `continued_by`, the innermost last."""


@contextlib.contextmanager
def continued_by(command: str) -> Iterator[Continuation]:
    """Within the block, the line about a stopped training names a command that continues it.

    Args:
        command: Command of a shell.
    """
    _enclosing.append(Continuation(command))
    try:
        yield _enclosing[-1]
    finally:
        _enclosing.pop()


def program_words() -> list[str]:
    """Return the words of a shell that start `mfwrap` again, on as many processes as now.

    Under torchrun on several machines, each of which needs a command of its own, it is `mfwrap`.
    """
    if os.environ.get("GROUP_WORLD_SIZE") != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["mfwrap"]
    num_ranks = os.environ["LOCAL_WORLD_SIZE"]
    return ["torchrun", "--standalone", "--nproc-per-node", num_ranks, "-m", "mfwrap"]


def had_ended(saved: Mapping[str, Any], callbacks: Sequence[TrainerCallback]) -> bool:
    """Return whether a callback had ended the training, for example by early stopping.

    Args:
        saved: States of callbacks in the checkpoint, by the name of their class.
        callbacks: The present callbacks. Their patience counts, not that of the checkpoint.
    """
    for name, states in saved.items():
        same_class = [one for one in callbacks if type(one).__name__ == name]
        listed = states if isinstance(states, list) else [states]
        for callback, state in zip(same_class, listed, strict=False):
            if _ends_after(callback, state.get("attributes", {})):
                return True
    return False


def _ends_after(callback: TrainerCallback, attributes: Mapping[str, Any]) -> bool:
    if isinstance(callback, EarlyStoppingCallback):
        waited: int = attributes.get("early_stopping_patience_counter", 0)
        return waited >= callback.early_stopping_patience
    return isinstance(callback, MonitorCallback) and callback.ends_after(attributes)


def save_last_step(trainer: TrainerView, trial: Any, saved_step: int | None) -> None:
    """Save a stopped training unless its last step is saved, or the best weights are loaded.

    Args:
        trainer: Trainer after its training.
        trial: Trial of a hyperparameter search; ``None`` without one.
        saved_step: Step of the last checkpoint of this training; ``None`` without any.
    """
    # The model of `load_best_model_at_end` no longer has the weights of the last step.
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
        return
    if saved_step != trainer.state.global_step:
        save_checkpoint(trainer, trial)


def stop(trainer: TrainerView, trial: Any, *, is_interrupted: bool) -> Never:
    """Say on the main process how to continue a stopped training, and end it.

    Args:
        trainer: Trainer, whose last step is saved.
        trial: Trial of a hyperparameter search; ``None`` without one.
        is_interrupted: Whether Ctrl-C has stopped the training, and no other signal.

    Raises:
        KeyboardInterrupt: If Ctrl-C has stopped the training.
        SystemExit: With status 75, if SIGTERM or SIGUSR1 has.
    """
    again = 'trainer.train(resume_from_checkpoint="auto")'
    if _enclosing:
        again, _enclosing[-1].is_said = _enclosing[-1].command, True
    if trainer.is_world_process_zero():
        # The run folder exists unless the training has never saved.
        folder = Path(output_folder_of(trainer, trial))
        newest = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        who = "Ctrl-C" if is_interrupted else "a signal"
        saved = "without a checkpoint" if newest is None else f"checkpoint {newest}"
        step = trainer.state.global_step
        line = f"mfwrap: stopped by {who} after step {step}, {saved}; continue with: {again}"
        sys.stderr.write(f"{line}{_starting_anew(trainer)}\n")
        sys.stderr.flush()
    if is_interrupted:
        _hide_traceback()
        # Not a subclass, for which Python would not exit with the status of a Ctrl-C.
        raise KeyboardInterrupt(_AFTER_THE_STEP)
    raise SystemExit(EXIT_STOPPED)


def _starting_anew(trainer: TrainerView) -> str:
    """Name the callbacks whose state a resumed training would not restore."""
    if trainer.args.restore_callback_states_from_checkpoint:
        return ""
    names = [
        type(one).__name__
        for one in trainer.callback_handler.callbacks
        if isinstance(one, ExportableState) and not isinstance(one, MonitorCallback)
    ]
    if not names:
        return ""
    start = "start" if len(names) > 1 else "starts"
    return (
        f" ({', '.join(names)} {start} anew, unless you set "
        "restore_callback_states_from_checkpoint=True)"
    )


_AFTER_THE_STEP = "the training has stopped after its step"


def _hide_traceback() -> None:
    """Print no traceback of the Ctrl-C if it ends the process: it would follow the line above.

    With several ranks, each of them would print a traceback.
    """
    before = sys.excepthook

    def print_others(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, KeyboardInterrupt) or error.args != (_AFTER_THE_STEP,):
            before(kind, error, traceback)

    sys.excepthook = print_others
