"""Find the run folder of a callback."""

import os
from pathlib import Path

from transformers import TrainingArguments


def run_folder(
    folder: str | os.PathLike[str] | None, args: TrainingArguments | None
) -> Path | None:
    """Return the run folder; ``None`` if it is unknown.

    Args:
        folder: The callback's own argument; ``None`` for ``args.output_dir``.
        args: The trainer's arguments; ``None`` in a loop without a Trainer.
    """
    if folder is None and args is not None:
        folder = args.output_dir
    return None if folder is None else Path(folder)


def required_run_folder(
    folder: str | os.PathLike[str] | None, args: TrainingArguments | None, callback: str
) -> Path:
    """Return the run folder of a callback that cannot work without one.

    Args:
        folder: See `run_folder`.
        args: See `run_folder`.
        callback: Class of the callback, for the error.

    Raises:
        ValueError: If the loop has no ``args.output_dir`` and `folder` is missing.
    """
    found = run_folder(folder, args)
    if found is None:
        msg = f"{callback} needs `folder` in a loop without `args.output_dir`"
        raise ValueError(msg)
    return found
