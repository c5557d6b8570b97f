"""Write the metrics of a step to the log, TensorBoard, a JSON Lines file and trackers."""

from collections.abc import Callable, Mapping, Sequence
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
    """Write each metric of a step in its formats.

    Args:
        logs: Write metrics with the format ``"log"`` to the log; ``False`` ignores this format.
        tensorboard: Folder of the events file; ``None`` writes no curves.
        json_lines: JSON Lines file of this training; ``None`` writes no records.
        log_to: Called with the metrics for trackers and the step; ``None`` keeps them in `tracked`.
        max_grad_norm: Limit of the global norm. It is added to the next record if the file does not
            have it yet; ``None`` adds nothing.

    Raises:
        ImportError: If `tensorboard` is given and TensorBoard is not installed.
    """

    def __init__(
        self,
        *,
        logs: bool,
        tensorboard: Path | None = None,
        json_lines: JsonLines | None = None,
        log_to: Callable[[dict[str, float], int], None] | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._logs = logs
        self._log_to = log_to
        # A resumed training continues a file that has the limit already.
        known = None if json_lines is None else last_value(json_lines.path, "max_grad_norm")
        self._once = {} if max_grad_norm in {None, known} else {"max_grad_norm": max_grad_norm}
        self.tracked: dict[str, float] = {}
        """Newest values of the metrics for trackers, by tag."""
        self._events = None if tensorboard is None else EventsFile(tensorboard)
        self._lines = json_lines

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
            once, self._once = self._once, {}
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


def metric_writers(
    settings: TrainingStateSettings,
    args: TrainingArguments | None,
    folder: Path | None,
    *,
    is_main: bool,
    first_step: int,
) -> MetricWriters:
    """Return the writers that the settings request on this rank.

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
    rank, curves, lines = this_rank(), None, None
    if settings.tensorboard_dir is not None:
        curves = Path(settings.tensorboard_dir, f"rank_{rank}" if rank else "")
    if folder is not None and "jsonl" in settings.formats:
        lines = open_records(rank_file(folder, "training_state", rank), first_step)
    return MetricWriters(
        logs=is_main,
        tensorboard=curves,
        json_lines=lines,
        log_to=settings.log_to if is_main else None,
        max_grad_norm=None if args is None else args.max_grad_norm or None,
    )
