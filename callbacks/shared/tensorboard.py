"""TensorBoard's writer of curves, from whichever package has it."""

from typing import Any

__all__ = ["summary_writer_class"]


def summary_writer_class() -> Any:
    """Return torch's writer of events files.

    Raises:
        ImportError: If TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (slow, and optional)
    except ImportError as error:
        msg = '`tensorboard_dir` needs TensorBoard; pip install "mfwrap[tensorboard]"'
        raise ImportError(msg) from error
    return SummaryWriter
