"""Files of callbacks in a checkpoint, beside the JSON that a Trainer keeps of their states."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

__all__ = ["KeepsFiles", "announce_checkpoint", "save_callbacks"]


@runtime_checkable
class KeepsFiles(Protocol):
    """A callback with files of its own in each checkpoint of an `MFTrainer`.

    A Trainer's event ``on_save`` comes when the checkpoint is in place and its files are listed;
    what is written then is lost if the process ends before, and nobody notices.
    """

    def save_into(self, folder: Path, args: Any, model: nn.Module) -> None:
        """Write them, while the checkpoint is not yet in place.

        Called on every rank; ``args.should_save`` says which one writes.
        """

    def resume_from(self, folder: Path) -> None:
        """Hear which checkpoint a training is resumed from, just before ``on_train_begin``."""


def save_callbacks(callbacks: Iterable[object], folder: Path, args: Any, model: nn.Module) -> None:
    """Let callbacks write their files into a checkpoint."""
    for callback in callbacks:
        if isinstance(callback, KeepsFiles):
            callback.save_into(folder, args, model)


def announce_checkpoint(callbacks: Iterable[object], folder: Path) -> None:
    """Tell callbacks with files which checkpoint is resumed."""
    for callback in callbacks:
        if isinstance(callback, KeepsFiles):
            callback.resume_from(folder)
