"""Where the numbers of a step go: the log, TensorBoard, a file of JSON lines, trackers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.run_size import RunPosition
from mfwrap.callbacks.shared.tensorboard import (
    summary_writer_class,
)
from mfwrap.callbacks.training_state.metrics import Metric
from mfwrap.records.json_lines import JsonLines

__all__ = ["MetricWriters"]


@final
class MetricWriters:
    """Write the numbers of a step in the formats that each asks for.

    Args:
        logs: Write to the log; otherwise what is for the log is left out.
        tensorboard: Folder of the events file; ``None`` for none.
        json_lines: File of JSON lines; ``None`` for none.
        log_to: Takes what is for trackers, with the step; ``None`` keeps it in `tracked`.
        max_grad_norm: What stands in the first JSON line besides; ``None`` for nothing.

    Raises:
        ImportError: If `tensorboard` is given and TensorBoard is not installed.
    """

    def __init__(
        self,
        *,
        logs: bool,
        tensorboard: Path | None = None,
        json_lines: Path | None = None,
        log_to: Callable[[dict[str, float], int], None] | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._logs = logs
        self._log_to = log_to
        self._once = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
        self.tracked: dict[str, float] = {}
        """What was for trackers last, by its tag."""
        self._events_folder = tensorboard
        self._make_events = None if tensorboard is None else summary_writer_class()
        self._events: Any = None
        self._lines = None if json_lines is None else JsonLines(json_lines)

    def write(
        self,
        position: RunPosition,
        metrics: Sequence[Metric],
        values: Sequence[float],
        step_numbers: Mapping[str, float],
    ) -> None:
        """Write the numbers of one step, each where it belongs.

        Args:
            position: Of the step.
            metrics: What is shown.
            values: As many.
            step_numbers: Loss, norm and so on, by their names: they stand in each record, and
                go to `log_to`.
        """
        by_format: dict[str, dict[str, float]] = {}
        for metric, value in zip(metrics, values, strict=True):
            for one in metric.formats:
                by_format.setdefault(one, {})[metric.tag] = value
        if self._logs:
            self._log(position, by_format.get("log", {}))
        self._write_events(position, by_format.get("tensorboard", {}))
        if self._lines is not None and "jsonl" in by_format:
            place = {"step": position.step, "epoch": position.epoch}
            once, self._once = self._once, {}
            self._lines.append({**place, **once, **step_numbers, **by_format["jsonl"]})
        if "trackers" in by_format:
            self._track(position.step, by_format["trackers"], step_numbers)

    def write_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Write what an evaluation has found to the file of JSON lines."""
        if self._lines is not None and results:
            self._lines.append({"step": step, **results})

    def _track(
        self, step: int, scalars: Mapping[str, float], step_numbers: Mapping[str, float]
    ) -> None:
        if self._log_to is None:
            self.tracked |= scalars
        else:
            self._log_to({**step_numbers, **scalars}, step)

    def _log(self, position: RunPosition, scalars: Mapping[str, float]) -> None:
        length = position.length
        for tag, value in scalars.items():
            run_logger(__package__).info(
                "Epoch:[%3d/%3d], step:[%5d/%5d] %s: %s",
                position.epoch,
                length.num_epochs,
                position.step_of_epoch,
                length.steps_per_epoch,
                tag,
                np.float32(value),
            )

    def _write_events(self, position: RunPosition, scalars: Mapping[str, float]) -> None:
        if not scalars or self._make_events is None:
            return
        if self._events is None:
            self._events = self._make_events(str(self._events_folder))
        for tag, value in scalars.items():
            self._events.add_scalar(tag, value, global_step=position.step)

    def close(self) -> None:
        """Write what is pending; a later step goes to a new events file."""
        if self._events is not None:
            self._events.close()
            self._events = None
