"""Show a training in a notebook as transformers' progress bar and table, with mfwrap's numbers."""

import collections
import html
from collections.abc import Mapping, Sequence
from typing import Any, final

from IPython.display import HTML, display
from transformers import TrainerState
from transformers.utils.notebook import (
    NotebookProgressCallback,
    NotebookTrainingTracker,
    html_progress_bar,
    text_to_html_table,
)

from mfwrap.outputs import StepReport
from mfwrap.trainer.step_numbers import StepNumbers

_MAX_LINES = 10
"""Number of lines about skipped updates and anomalies that stay below the table."""

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

    The bar has loss, norm and learning rate of the last step whose values have arrived, and, where
    they apply, the loss scale and the number of skipped updates. The table has the norm, the
    learning rate, the loss scale and the number of skipped updates in addition to transformers'
    columns. Below it are the last ten lines about skipped updates and anomalies.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (transformers)
        self._numbers: StepNumbers | None = None
        self._tracker: _Tracker | None = None
        self._last: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **known: Any) -> None:
        """Show the bar and the table."""
        super().on_train_begin(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)
        has_evaluations = args.eval_strategy != "no"
        columns = [self.first_column, "Training Loss", *["Validation Loss"] * has_evaluations]
        self._tracker = self.training_tracker = _Tracker(state.max_steps, columns)
        self._last = {}
        self._numbers = StepNumbers(self._tracker.show, self._tracker.say)

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        step_report: StepReport | None = None,
        **known: Any,
    ) -> None:
        """Show the previous step, and start to copy the values of this one."""
        if self._numbers is not None and step_report is not None:
            self._numbers.copy(state.global_step, step_report)
        super().on_step_end(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)

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

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **known: Any) -> None:
        """Show the last step."""
        if self._numbers is not None:
            self._numbers.flush()
        super().on_train_end(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)
        self.end_with_error()

    def end_with_error(self) -> None:
        """Leave the log to others."""
        if self._numbers is not None:
            self._numbers.close()
            self._numbers = None

    def _write(self, row: dict[str, Any]) -> None:
        """Add the last numbers to the row of the table that transformers has written."""
        if self.training_tracker is not None and self._tracker is not None:
            self._tracker.write_line(row | self._last)  # type: ignore[no-untyped-call]  # (transformers)


@final
class _Tracker(NotebookTrainingTracker):
    """Transformers' bar and table, with numbers in the bar and lines below the table."""

    def __init__(self, num_steps: int, column_names: list[str]) -> None:
        super().__init__(num_steps, column_names)  # type: ignore[no-untyped-call]  # (transformers)
        self.texts: Sequence[str] = ()
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)

    def update(self, value: int, force_update: bool = False, comment: str | None = None) -> None:  # noqa: FBT001, FBT002  (transformers' signature)
        """Show a step, with its numbers in the comment."""
        said = comment if comment is None else ", ".join((comment, *self.texts))
        super().update(value, force_update=force_update, comment=said)

    def show(self, texts: Sequence[str]) -> None:
        """Show the numbers of a step from the next update of the bar on."""
        self.texts = texts

    def say(self, line: str) -> None:
        """Show a line below the table."""
        self._lines.append(line)

    def display(self) -> None:
        """Show the bar, the table and the lines."""
        parts = [html_progress_bar(self.value, self.total, self.prefix, self.label, self.width)]
        parts.append(text_to_html_table(self.inner_table))
        if self.child_bar is not None:
            parts.append(self.child_bar.html_code)
        parts += [f"<div>{html.escape(line)}</div>" for line in self._lines]
        self.html_code = "".join(parts)
        shown = HTML(self.html_code)  # type: ignore[no-untyped-call]  # (IPython)
        if self.output is None:
            self.output = display(shown, display_id=True)  # type: ignore[no-untyped-call]  # (IPython)
        else:
            self.output.update(shown)
