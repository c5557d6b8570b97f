"""Pass the records of steps on to experiment trackers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from accelerate import Accelerator

from mfwrap.arguments import described
from mfwrap.callbacks.shared.run_log import run_logger

Tracker: TypeAlias = Any
"""An ``Accelerator`` (all of its trackers), a tracker of accelerate, a run of wandb or trackio, the
module ``mlflow``, a TensorBoard ``SummaryWriter``, or a function of a dict of numbers and the
step."""

_Log: TypeAlias = Callable[[dict[str, float], int], None]


@final
class Trackers:
    """Log the numbers of a step to several trackers, under names with a prefix.

    wandb has one row for each step and ignores rows of earlier steps. If the loop has already
    logged a later step there, the numbers go into the row of that step; if that row has the numbers
    of another update, into the next row. In each case they have ``<prefix>step``, which wandb draws
    them over.

    Args:
        trackers: Where to log.
        prefix: Beginning of all names, so that they differ from those of the loop.

    Raises:
        TypeError: If a tracker is none of the kinds that `Tracker` lists.
    """

    def __init__(self, trackers: Sequence[Tracker], prefix: str) -> None:
        self._prefix = prefix
        self._trackers = list(trackers)
        self._has_warned = False
        # The newest row with numbers of an update, by wandb run.
        self._rows: dict[Any, int] = {}
        for tracker in trackers:
            if not isinstance(tracker, Accelerator):
                self._log_of(tracker)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers.

        Args:
            values: Numbers by name.
            step: Number of the step that they belong to.
        """
        named = {f"{self._prefix}{name}": value for name, value in values.items()}
        for tracker in self._trackers:
            inner = tracker.trackers if isinstance(tracker, Accelerator) else [tracker]
            for each in inner:
                self._log_of(each)(named, step)

    def _log_of(self, tracker: Any) -> _Log:
        """Return the function that logs to one tracker."""
        # Before accelerate 1.14, its tracker of trackio drops the step, but the run does not.
        has_run = getattr(tracker, "name", "") in {"wandb", "trackio"}
        run = getattr(tracker, "tracker", None) if has_run else None
        for found in (run, tracker):
            if hasattr(found, "define_metric"):
                return lambda values, step: self._log_to_wandb(found, values, step)
        if hasattr(tracker, "add_scalar"):
            return lambda values, step: _log_to_tensorboard(tracker, values, step)
        if hasattr(tracker, "log_metrics"):
            return lambda values, step: tracker.log_metrics(values, step=step)
        if hasattr(tracker, "log"):
            logger = tracker if run is None else run
            return lambda values, step: logger.log(values, step=step)
        if callable(tracker):
            log: _Log = tracker
            return log
        msg = (
            "`trackers` must hold an Accelerator, a tracker of accelerate, a run of wandb or "
            "trackio, the module mlflow, a SummaryWriter, or a function of numbers and step; got "
            f"{described(tracker)}"
        )
        raise TypeError(msg)

    def _log_to_wandb(self, run: Any, values: dict[str, float], step: int) -> None:
        axis = f"{self._prefix}step"
        if run not in self._rows:
            self._rows[run] = -1
            run.define_metric(axis)
            run.define_metric(f"{self._prefix}*", step_metric=axis)
        # wandb merges what is logged to its newest row, so a second record would overwrite a first.
        row = max(step, run.step, self._rows[run] + 1)
        self._rows[run] = row
        if row > step and not self._has_warned:
            self._has_warned = True
            run_logger(__package__).warning(
                "the newest row of wandb is %d, so the numbers of update %d are in row %d, and "
                "those of later updates may be in later rows, too; each row has its update as "
                "%s; to have the loop's own numbers in the same rows, log them after `end_step` "
                "at step=monitor.global_step",
                run.step,
                step,
                row,
                axis,
            )
        run.log({**values, axis: step}, step=row)


def _log_to_tensorboard(writer: Any, values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, global_step=step)
