"""Programs that each rank runs to save checkpoints in the background."""

import contextlib
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.checkpoints.verification import verify
from mfwrap.trainer import MFTrainer, deferred_files
from support.trainer_runs import new_trainer

__all__ = ["fail_to_save", "save_later"]


class _Notes(TrainerCallback):
    """Note which checkpoint is saved in which step, and start a collective as a callback may."""

    def __init__(self, holds_until: int | None, opened: threading.Event) -> None:
        self.told: list[tuple[int, int]] = []
        self._step, self._until, self._opened = 0, holds_until, opened

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Let the writer go on."""
        self._step = state.global_step
        if self._step == self._until:
            self._opened.set()

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Note the checkpoint, which is there."""
        verify(Path(args.output_dir, f"checkpoint-{state.global_step}"))
        self.told.append((state.global_step, self._step))


def save_later(rank: int, folder: str) -> dict[str, Any]:
    """Train twice, and save at once and in the background; return checksums and what is told."""
    found: dict[str, Any] = {}
    for name, is_later in (("at_once", False), ("later", True)):
        notes = _Notes(3, threading.Event())
        with _holding(notes, is_later=is_later):
            _trainer(Path(folder, name), notes, is_later=is_later).train()
        found[name] = _checksums(Path(folder, name))
        found[f"{name} told"] = notes.told
    return found


def fail_to_save(rank: int, folder: str) -> tuple[str, list[str], bool]:
    """Save to a disk that is full; return the error of this rank and the checkpoints.

    Also returns whether the ranks can still train together.
    """
    notes = _Notes(3, threading.Event())
    error = OSError(28, "No space left on device")
    raises = pytest.raises(OSError, match="No space left")
    with _holding(notes, is_later=True, error=error), raises as caught:
        _trainer(Path(folder, "run"), notes, is_later=True).train()
    left = sorted(path.name for path in Path(folder, "run").glob("checkpoint-*"))
    _trainer(Path(folder, "again"), _Notes(None, threading.Event()), is_later=True).train()
    return str(caught.value), left, Path(folder, "again", "checkpoint-8").is_dir()


@contextlib.contextmanager
def _holding(notes: _Notes, *, is_later: bool, error: OSError | None = None) -> Any:
    """Hold the writer of the first checkpoint until the end of a step."""
    real = deferred_files.save_object

    def save(value: Any, path: Path) -> Any:
        if path.parent.name == "checkpoint-2":
            notes._opened.wait(60)
            if error is not None:
                raise error
        return real(value, path)

    with pytest.MonkeyPatch.context() as patch:
        if is_later:
            patch.setattr(deferred_files, "save_object", save)
        yield


def _trainer(folder: Path, notes: _Notes, *, is_later: bool) -> Any:
    return new_trainer(
        MFTrainer,
        folder,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=2,
        max_steps=8,
        save_total_limit=2,
        ddp_backend="gloo",
        callbacks=[notes],
        extras={"async_save": is_later},
    )


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each file of the checkpoints whose content names no folder."""
    left_out = {"training_args.bin", "optimizer.pt", MANIFEST}
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("checkpoint-*/*"))
        if path.is_file() and path.name not in left_out
    }
