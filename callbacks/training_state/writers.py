"""Write the metrics of a step to the log, TensorBoard, a JSON Lines file and trackers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
from transformers import TrainingArguments

from mfwrap.callbacks.shared.progress import RunPosition
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.tensorboard import EventsFile
from mfwrap.callbacks.training_state.metrics import StateMetric
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.collectives import this_rank
from mfwrap.records.json_lines import JsonLines, last_value, rank_file
from mfwrap.records.run_files import open_records


@final
class MetricWriters:
    """Write each metric of a step in its formats, as far as the settings request it on this rank.

    Without ``log_to``, the metrics for trackers are kept in `tracked`. The first record of a file
    also has the limit of the global norm.

    Args:
        settings: Settings of the monitor.
        args: Arguments of the Trainer; ``None`` in a loop without a Trainer.
        folder: Run folder; ``None`` if unknown.
        is_main: Whether this is the main process. Only the main process writes to the log and to
            trackers.
        first_step: Steps of the records before this training; 0 for a training from the start.

    Raises:
        ImportError: If ``tensorboard_dir`` is given and TensorBoard is not installed.
    """

    def __init__(
        self,
        settings: TrainingStateSettings,
        args: TrainingArguments | None,
        folder: Path | None,
        *,
        is_main: bool,
        first_step: int,
    ) -> None:
        rank = this_rank()
        self._logs = is_main
        self._log_to = settings.log_to if is_main else None
        self.tracked: dict[str, float] = {}
        """Newest values of the metrics for trackers, by tag."""
        self._events: EventsFile | None = None
        if settings.tensorboard_dir is not None:
            curves = Path(settings.tensorboard_dir, f"rank_{rank}" if rank else "")
            self._events = EventsFile(curves)
        self._lines: JsonLines | None = None
        self._args = args
        self._limit: float | None = None
        if folder is not None and "jsonl" in settings.formats:
            self._lines = open_records(rank_file(folder, "training_state", rank), first_step)
            # A resumed training continues a file that has the limit already.
            self._limit = last_value(self._lines.path, "max_grad_norm")

    def write(
        self,
        position: RunPosition,
        metrics: Sequence[StateMetric],
        values: Sequence[float],
        step_numbers: Mapping[str, float],
    ) -> None:
        """Write the metrics of one step.

        Args:
            position: Position of the step in the run.
            metrics: Metrics to write.
            values: Value of each metric.
            step_numbers: Loss, norm and other numbers of the step, by name. They are added to the
                JSON Lines record and to the numbers for `log_to`.
        """
        by_format: dict[str, dict[str, float]] = {}
        for metric, value in zip(metrics, values, strict=True):
            for one in metric.formats:
                by_format.setdefault(one, {})[metric.tag] = value
        if self._logs:
            self._log(position, by_format.get("log", {}))
        if self._events is not None:
            for tag, value in by_format.get("tensorboard", {}).items():
                self._events.add(tag, value, position.step)
        if self._lines is not None and "jsonl" in by_format:
            place = {"step": position.step, "epoch": position.epoch}
            limit = None if self._args is None else self._args.max_grad_norm
            once = {"max_grad_norm": limit} if limit and limit != self._limit else {}
            self._limit = limit or self._limit
            self._lines.append({**place, **once, **step_numbers, **by_format["jsonl"]})
        if "trackers" in by_format:
            self._track(position.step, by_format["trackers"], step_numbers)

    def write_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Add a record of an evaluation to the JSON Lines file."""
        if self._lines is not None and results:
            self._lines.append({"step": step, **results})

    def close(self) -> None:
        """Write all curves to disk. A later step opens a new events file."""
        if self._events is not None:
            self._events.close()

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
