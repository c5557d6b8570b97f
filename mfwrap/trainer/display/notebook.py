"""Show a training in a notebook as transformers' progress bar and table, with mfwrap's numbers."""

from collections.abc import Mapping
from typing import Any, final

from transformers import TrainerState
from transformers.utils.notebook import NotebookProgressCallback

_COLUMNS = {
    "Grad Norm": "grad_norm",
    "Learning Rate": "learning_rate",
    "Loss Scale": "loss_scale",
    "Skipped": "skipped_updates",
}
"""Key of the training log for each column that the table has in addition."""


@final
class NotebookStepCallback(NotebookProgressCallback):
    """Show transformers' progress bar and table of a notebook, with the numbers of the step.

    The table has the norm, the learning rate, the loss scale, if it is not 1, and the number of
    skipped updates in addition to transformers' columns.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (transformers)
        self._last: dict[str, Any] = {}

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **known: Any,
    ) -> None:
        """Add a row to the table; with evaluations, keep the numbers for the next of them."""
        logs = logs or {}
        if "loss" in logs:
            self._last = {name: logs[key] for name, key in _COLUMNS.items() if key in logs}
            if self._last.get("Loss Scale") == 1:
                del self._last["Loss Scale"]
            if "Learning Rate" in self._last:  # the table would show six decimals
                self._last["Learning Rate"] = f"{self._last['Learning Rate']:.4g}"
        super().on_log(args, state, control, logs=logs, **known)  # type: ignore[no-untyped-call]  # (transformers)
        if "loss" in logs and args.eval_strategy == "no":
            self._write({"Step": state.global_step})

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        metrics: dict[str, float] | None = None,
        **known: Any,
    ) -> None:
        """Add a row with the metrics to the table."""
        super().on_evaluate(args, state, control, metrics=metrics, **known)  # type: ignore[no-untyped-call]  # (transformers)
        step = int(state.epoch or 0) if self.first_column == "Epoch" else state.global_step
        self._write({self.first_column: step})

    def _write(self, row: dict[str, Any]) -> None:
        """Add the last numbers to the row of the table that transformers has written."""
        if self.training_tracker is not None:
            self.training_tracker.write_line(row | self._last)
