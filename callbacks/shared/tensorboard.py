"""Write curves and texts for TensorBoard."""

import os
from pathlib import Path
from typing import Any, final

from mfwrap.checkpoints.written_files import note_written


@final
class EventsFile:
    """Write curves and texts to a TensorBoard events file, created with the first of them.

    Args:
        folder: Folder of the file.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = str(folder)
        self._writer_class = summary_writer_class()
        self._writer: Any = None

    def add(self, tag: str, value: float, step: int) -> None:
        """Add a point to the curve `tag`."""
        self._opened().add_scalar(tag, value, global_step=step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text of a step, in Markdown."""
        self._opened().add_text(tag, text, global_step=step)

    def _opened(self) -> Any:
        if self._writer is None:
            note_written(Path(self._folder))
            self._writer = self._writer_class(self._folder)
        return self._writer

    def close(self) -> None:
        """Write all points to disk. A later point opens a new file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def summary_writer_class() -> Any:
    """Return ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: If TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (slow, and optional)
    except ImportError as error:
        msg = '`tensorboard_dir` needs TensorBoard; pip install "mfwrap[tensorboard]"'
        raise ImportError(msg) from error
    return SummaryWriter
