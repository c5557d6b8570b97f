"""Log what a model says to the trackers of a Trainer."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from transformers import TrainingArguments

from mfwrap.callbacks.shared.tensorboard import EventsFile

_NAME = "samples"
_COLUMNS = ["step", "prompt", "reference", "weights", "text"]


@final
class SampleTrackers:
    """Log to those trackers in ``args.report_to`` that have tables or texts.

    wandb and trackio get a table for each step, TensorBoard a text for each prompt, in a folder
    ``samples`` beside the Trainer's own events. Other trackers get nothing.

    Args:
        args: Arguments of the Trainer.
    """

    def __init__(self, args: TrainingArguments) -> None:
        names = getattr(args, "report_to", None) or []
        self._tables = [name for name in ("wandb", "trackio") if name in names]
        self._events: EventsFile | None = None
        if "tensorboard" in names:
            of_trainer = os.environ.get("TENSORBOARD_LOGGING_DIR")
            root = Path(args.output_dir or "", "runs") if of_trainer is None else Path(of_trainer)
            self._events = EventsFile(root.expanduser() / _NAME)

    def log(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """Log the results of a step.

        Args:
            step: Number of the step.
            rows: Prompt, reference, ``"raw"`` or ``"averaged"``, and text of each result.
        """
        for name in self._tables:
            library = _started(name)
            if library is not None:
                table = library.Table(columns=_COLUMNS, data=[[step, *row] for row in rows])
                library.log({_NAME: table, "train/global_step": step})
        if self._events is not None:
            for number, (prompt, _, weights, text) in enumerate(rows):
                tag = f"{_NAME}/{number} ({weights})"
                self._events.add_text(tag, f"{_block(prompt)}\n\n---\n\n{_block(text)}", step)

    def close(self) -> None:
        """Write everything to disk."""
        if self._events is not None:
            self._events.close()


def _started(name: str) -> Any:
    """Return the module of a tracker whose run the Trainer has started; else ``None``."""
    if name == "wandb":
        import wandb  # noqa: PLC0415  (optional)

        return None if wandb.run is None else wandb
    import trackio  # noqa: PLC0415  (optional)

    return None if trackio.context_vars.current_run.get() is None else trackio


def _block(text: str) -> str:
    """Return a text as a block of Markdown that is shown as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "
