"""Compute the length of a run, the position of a step in the run, and the time of steps."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from accelerate.state import AcceleratorState, is_initialized
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from mfwrap.arguments import check_int
from mfwrap.collectives import num_ranks

_DECAY = 0.9
"""Decay of the exponential mean of step times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings shared by all monitors that follow the steps of a run."""

    origin_epochs: int | None = None
    """Number of epochs of the run; ``None`` takes the loop's number."""

    dataset_size: int | None = None
    """Number of updates in an epoch; ``None`` takes the loop's number."""

    initial_epoch: int = 0
    """Epochs finished before ``state.global_step`` was 0."""

    initial_step: int = 0
    """Updates finished before ``state.global_step`` was 0, in addition to `initial_epoch`."""

    global_batch_size: int = 0
    """Samples of one update on all processes. 0 takes that of `LoopMonitor`, or, in other loops,
    ``state.train_batch_size`` times
    ``args.gradient_accumulation_steps`` (1 without ``args``) times the number of processes with
    samples of their own: 1 with ``split_batches``, and 1 for each group of processes that share
    their samples (tensor, context or sequence parallelism)."""

    clock: Callable[[], float] = field(default=time.perf_counter, repr=False, compare=False)
    """Returns seconds since an arbitrary start."""

    def check_run(self) -> None:
        """Check these settings. Subclasses call this method in ``__post_init__``.

        Raises:
            TypeError: If a setting has the wrong type.
            ValueError: If a setting is out of range.
        """
        for name in ("origin_epochs", "dataset_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=1)
        for name in ("initial_epoch", "initial_step", "global_batch_size"):
            check_int(name, getattr(self, name), minimum=0)


UNKNOWN_LENGTH = 2**31 - 1
"""``max_steps`` of a run whose length is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """Length of a run, at least one step."""

    num_epochs: int
    steps_per_epoch: int
    num_steps: int
    """Steps of the whole run; it may end in the middle of the last epoch."""

    first_step: int = 0
    """Steps finished before the loop's ``global_step`` was 0."""

    @property
    def is_known(self) -> bool:
        """Whether the number of steps is known; see `UNKNOWN_LENGTH`."""
        return self.num_steps < UNKNOWN_LENGTH

    def position(self, global_step: int) -> "RunPosition":
        """Return the position of a step.

        Args:
            global_step: The loop's number of finished steps, this one included.
        """
        step = global_step + self.first_step
        epoch, step_before = divmod(max(step, 1) - 1, self.steps_per_epoch)
        return RunPosition(epoch=epoch + 1, step_of_epoch=step_before + 1, step=step, length=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPosition:
    """Position of a step in a run; all numbers count from 1."""

    epoch: int
    step_of_epoch: int
    step: int
    length: RunLength

    @property
    def percent(self) -> float:
        """Finished fraction of the run, in percent; 100 also if the run goes on longer."""
        length = self.length
        if length.num_epochs * length.steps_per_epoch != length.num_steps:
            return min(100.0 * self.step / length.num_steps, 100.0)
        # Divide in MindFormers' order. Another order rounds differently, and could show one block
        # of the progress bar more or less.
        return min(self.step / length.num_epochs / length.steps_per_epoch * 100, 100.0)

    @property
    def steps_left(self) -> int:
        """Number of steps after this one."""
        return max(self.length.num_steps - self.step, 0)


@final
class StepClock:
    """Measure the time of steps, without the time that the loop spends between them.

    A step's time runs from the last `restart` to `end_step`. `end_step` restarts the clock too. So
    without a `restart` at the start of a step, its time runs from the end of the previous step.

    Args:
        clock: Returns seconds since an arbitrary start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start: float | None = None
        self._lap_seconds = 0.0
        self._lap_steps = 0
        self._first_seconds: float | None = None
        self._smoothed = 0.0
        self._weight = 0.0

    def restart(self) -> None:
        """Start to measure a step."""
        self._start = self._clock()

    def end_step(self) -> None:
        """Record the time since the last restart as a step's time, if there was a restart."""
        start, self._start = self._start, self._clock()
        if start is None:
            return
        seconds = max(self._start - start, 0.0)
        self._lap_seconds += seconds
        self._lap_steps += 1
        if self._first_seconds is None:
            self._first_seconds = seconds
        else:
            self._smoothed = _DECAY * self._smoothed + (1 - _DECAY) * seconds
            self._weight = _DECAY * self._weight + (1 - _DECAY)

    def end_lap(self) -> float:
        """Return the mean time of the steps since the last call, in seconds; 0 without steps."""
        seconds = self._lap_seconds / self._lap_steps if self._lap_steps else 0.0
        self._lap_seconds, self._lap_steps = 0.0, 0
        return seconds

    @property
    def typical_seconds(self) -> float:
        """Exponential mean of the step times, bias-corrected, in seconds; 0 without steps.

        The first step includes warm-up, so it is left out as soon as there is a second step.
        """
        if self._weight:
            return self._smoothed / self._weight
        return self._first_seconds or 0.0


@final
class Samples:
    """Count the samples of the updates of a run, on all processes together.

    On one process, the last batch of a pass over the data counts with the rows that it has. On
    several processes it counts as a full batch, because accelerate fills it up with other rows.

    Args:
        settings: Settings of the monitor.
        state: State of the loop.
        args: Arguments of the Trainer; ``None`` in a loop without a Trainer.
        grown: Function of `mfwrap.trainer.MonitorCallback.take_samples`, if the batch grows.
        train_dataloader: Data loader; ``None`` if unknown.
    """

    def __init__(
        self,
        settings: RunSettings,
        state: TrainerState,
        args: TrainingArguments | None,
        grown: Callable[[int], int] | None = None,
        train_dataloader: Any = None,
    ) -> None:
        self.per_update = global_batch_size(settings, state, args)
        """Samples of an update, at the end of a growth; 0 if unknown."""
        self._grown = grown
        self._per_pass = 0
        self._updates_per_pass = _num_updates(train_dataloader, args) or 1
        if num_ranks() == 1 and args is not None and not settings.global_batch_size:
            self._per_pass = _num_rows(train_dataloader, state.train_batch_size or 0)

    def until(self, step: int) -> int:
        """Return the samples of the first `step` updates; 0 if unknown."""
        if self._grown is not None:
            return self._grown(step)
        if not self._per_pass:
            return step * self.per_update
        passes, rest = divmod(step, self._updates_per_pass)
        return passes * self._per_pass + rest * self.per_update

    def mean(self, step: int, num_steps: int = 1) -> float:
        """Return the mean samples of the last `num_steps` updates up to a step; 0 if unknown."""
        return (self.until(step) - self.until(max(step - num_steps, 0))) / num_steps


def run_length(
    settings: RunSettings,
    state: TrainerState,
    args: TrainingArguments | None,
    train_dataloader: Any,
    *,
    grows: bool = False,
) -> RunLength:
    """Determine the length of a run from the monitor's settings and from the loop.

    The number of updates in an epoch has three possible sources, in this order:

    1. ``settings.dataset_size``, which is a number of updates.
    2. The number of batches in the data loader divided by ``args.gradient_accumulation_steps``,
       unless the quotient contradicts ``max_steps`` and the number of epochs.
    3. ``max_steps`` divided by the number of epochs. If the number of epochs is unknown too, the
       run is one epoch of ``max_steps`` updates.

    Args:
        settings: Settings of the monitor.
        state: State of the loop. Its ``max_steps`` and ``num_train_epochs`` are used; 0 means
            unknown.
        args: Arguments of the Trainer, which replace unknown values of `state`; ``None`` in a loop
            without a Trainer.
        train_dataloader: Data loader, with or without a length; ``None`` if unknown.
        grows: Whether the batch grows, so that epochs have different numbers of updates. Unless the
            settings say otherwise, the run then counts as one epoch.

    Returns:
        Length of the run in epochs and in updates. The length includes updates of an earlier run
        that the loop's ``global_step`` does not count.

    Raises:
        ValueError: If ``max_steps`` is unknown, and the number of epochs or of updates in an epoch
            is unknown too.
    """
    max_steps = _max_steps(state, args)
    found = (
        (1, None)
        if grows
        else (_num_epochs(state, args, max_steps), _num_updates(train_dataloader, args))
    )
    epochs = settings.origin_epochs or found[0]
    steps_per_epoch = settings.dataset_size or _steps_per_epoch(max_steps, epochs, found[1])
    if steps_per_epoch is None or not (epochs or max_steps):
        msg = (
            "the length of the run is unknown: `state.max_steps` must be set in a loop of your "
            "own, got 0; or set `origin_epochs` and `dataset_size` of the monitor"
        )
        raise ValueError(msg)
    if settings.dataset_size and max_steps and not settings.origin_epochs:
        epochs = None
    epochs = epochs or math.ceil(max_steps / steps_per_epoch)
    first_step = settings.initial_epoch * steps_per_epoch + settings.initial_step
    whole_epochs = epochs * steps_per_epoch
    # A `max_steps` below the steps of all epochs means that the last epoch is cut short. The
    # exception is a resumed loop that counts from 0 again: its `max_steps` are the remaining steps.
    within_last = 0 < max_steps < whole_epochs and not first_step
    return RunLength(
        num_epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        num_steps=max_steps if within_last else whole_epochs,
        first_step=first_step,
    )


def global_batch_size(
    settings: RunSettings, state: TrainerState, args: TrainingArguments | None
) -> int:
    """Return the number of samples of one update on all processes; 0 if it is unknown."""
    # Only the arguments of a `LoopMonitor` have the number of samples itself.
    known: int = settings.global_batch_size or getattr(args, "global_batch_size", 0)
    if known:
        return known
    batches_per_update = 1 if args is None else args.gradient_accumulation_steps
    return (state.train_batch_size or 0) * batches_per_update * _num_data_ranks(args)


def ranks_layout() -> Any:
    """Return accelerate's ``ParallelismConfig`` of the training; ``None`` if there is none."""
    # `Accelerator` keeps the layout here. The training arguments do not have the one that a network
    # brings with it, such as transformers' tensor parallelism.
    return AcceleratorState().parallelism_config if is_initialized() else None


def data_parallel_size() -> int:
    """Return the number of groups of ranks that train on different samples."""
    layout = ranks_layout()
    ranks_per_sample: int = 1 if layout is None else layout.non_data_parallel_size
    return num_ranks() // ranks_per_sample


def _num_data_ranks(args: TrainingArguments | None) -> int:
    """Return the number of ranks that each load a batch of ``state.train_batch_size`` samples."""
    if getattr(getattr(args, "accelerator_config", None), "split_batches", False):
        return 1
    return data_parallel_size()


def _max_steps(state: TrainerState, args: TrainingArguments | None) -> int:
    if state.max_steps > 0 or args is None:
        return max(state.max_steps, 0)
    return max(args.max_steps, 0)


def _num_epochs(state: TrainerState, args: TrainingArguments | None, max_steps: int) -> int | None:
    epochs: float = state.num_train_epochs
    if epochs <= 0 and args is not None and args.max_steps <= 0:
        epochs = args.num_train_epochs
    # For data of unknown length the Trainer sets the number of epochs to sys.maxsize. So a number
    # above `max_steps` counts as unknown.
    if epochs <= 0 or 0 < max_steps < epochs:
        return None
    return math.ceil(epochs)


def _num_updates(train_dataloader: Any, args: TrainingArguments | None) -> int | None:
    """Return the number of updates in one pass over the data; ``None`` if unknown."""
    if train_dataloader is None or not has_length(train_dataloader):
        return None
    batches_per_update = 1 if args is None else args.gradient_accumulation_steps
    return math.ceil(len(train_dataloader) / batches_per_update) or None


def _num_rows(train_dataloader: Any, batch_size: int) -> int:
    """Return the rows of a pass over the data; 0 unless its batches have all of them once."""
    dataset = getattr(train_dataloader, "dataset", None)
    if not batch_size or dataset is None:
        return 0
    if not (has_length(dataset) and has_length(train_dataloader)):
        return 0
    is_whole = math.ceil(len(dataset) / batch_size) == len(train_dataloader)
    return len(dataset) if is_whole else 0


def _steps_per_epoch(max_steps: int, epochs: int | None, num_updates: int | None) -> int | None:
    if not max_steps:
        return num_updates
    # Without `args` the gradient accumulation is unknown. If the loop uses several batches for each
    # update, `num_updates` is too large and contradicts the number of epochs: then ignore it.
    if num_updates and (epochs is None or math.ceil(max_steps / num_updates) == epochs):
        return num_updates
    return math.ceil(max_steps / (epochs or 1))
