"""Callbacks with files of their own are asked for them, and told what is resumed."""

from pathlib import Path

from torch import nn
from transformers import TrainerCallback

from mfwrap.callbacks import EMACallback
from mfwrap.trainer.events import KeepsFiles, announce_checkpoint, save_callbacks


class Keeping(TrainerCallback):
    """Keep what it is called with."""

    def __init__(self) -> None:
        self.calls = []

    def save_into(self, folder, args, model) -> None:
        """Keep it."""
        self.calls.append((folder, args, model))

    def resume_from(self, folder) -> None:
        """Keep it."""
        self.calls.append(folder)


def test_callbacks_with_files():
    """Each is called in its turn, with what there is; one without files is passed over."""
    first, last, network = Keeping(), Keeping(), nn.Linear(1, 1)
    callbacks = [first, TrainerCallback(), last]

    announce_checkpoint(callbacks, Path("before"))
    save_callbacks(callbacks, Path("run"), "arguments", network)

    expected = [Path("before"), (Path("run"), "arguments", network)]
    assert first.calls == last.calls == expected


def test_who_keeps_files():
    """An average is kept in files; a callback with one half of the two methods is none."""

    class Half(TrainerCallback):
        def save_into(self, *_) -> None:
            raise AssertionError

    assert isinstance(EMACallback(), KeepsFiles)
    assert not isinstance(Half(), KeepsFiles)
    save_callbacks([Half()], Path("run"), None, nn.Linear(1, 1))
