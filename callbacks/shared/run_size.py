"""How long a run is and where in it a step lies; how many samples and processes."""

import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from mfwrap.collectives import num_ranks

__all__ = ["RunLength", "RunPosition", "global_batch_size", "run_length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """Length of a run, at least one step."""

    num_epochs: int
    steps_per_epoch: int
    num_steps: int
    """May end within the last epoch."""

    first_step: int = 0
    """Steps before the first one that is counted as 1."""

    def position(self, global_step: int) -> "RunPosition":
        """Return where the step lies that makes `global_step` steps done."""
        step = global_step + self.first_step
        epoch, step_before = divmod(max(step, 1) - 1, self.steps_per_epoch)
        return RunPosition(epoch=epoch + 1, step_of_epoch=step_before + 1, step=step, length=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPosition:
    """Where a step lies in a run; all numbers count from 1."""

    epoch: int
    step_of_epoch: int
    step: int
    length: RunLength

    @property
    def percent(self) -> float:
        """How much of the run is done."""
        length = self.length
        whole_epochs = length.num_epochs * length.steps_per_epoch
        # MindFormers' order of divisions: its rounding decides on the last block of the bar.
        percent = self.step / length.num_epochs / length.steps_per_epoch * 100
        return percent * (whole_epochs / length.num_steps)

    @property
    def steps_left(self) -> int:
        """Number of steps after this one."""
        return max(self.length.num_steps - self.step, 0)


def run_length(
    state: TrainerState,
    args: TrainingArguments | None,
    train_dataloader: Any,
    *,
    origin_epochs: int | None = None,
    dataset_size: int | None = None,
    initial_epoch: int = 0,
    initial_step: int = 0,
) -> RunLength:
    """Work out how long a run is, from what is given and what the loop says of itself.

    The updates of an epoch are `dataset_size`; or the data loader's batches, in groups of
    ``args.gradient_accumulation_steps``, if they agree with `state`; or the ``max_steps`` of
    `state` over its epochs. Data of unknown length is one epoch of ``max_steps``.

    Args:
        state: Its ``max_steps`` and ``num_train_epochs`` are read; 0 is unknown.
        args: What `state` leaves unknown is taken from here.
        train_dataloader: ``None`` or anything, with a length or without.
        origin_epochs: Number of epochs; ``None`` for the loop's.
        dataset_size: Updates of one epoch; ``None`` for the loop's.
        initial_epoch: Epochs before global step 0.
        initial_step: Updates before global step 0, beside `initial_epoch`.

    Raises:
        ValueError: If the length is not known.
    """
    max_steps = _max_steps(state, args)
    epochs = origin_epochs or _num_epochs(state, args, max_steps)
    steps_per_epoch = dataset_size or _steps_per_epoch(
        max_steps, epochs, _num_updates(train_dataloader, args)
    )
    if steps_per_epoch is None or not (epochs or max_steps):
        msg = (
            "`state.max_steps` must be set in a loop of your own, got 0; or give `origin_epochs` "
            "and `dataset_size`"
        )
        raise ValueError(msg)
    if dataset_size and max_steps and not origin_epochs:
        epochs = None
    epochs = epochs or math.ceil(max_steps / steps_per_epoch)
    first_step = initial_epoch * steps_per_epoch + initial_step
    whole_epochs = epochs * steps_per_epoch
    # A loop that counts from 0 again after a resume says nothing of the steps before.
    within_last = 0 < max_steps < whole_epochs and not first_step
    return RunLength(
        num_epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        num_steps=max_steps if within_last else whole_epochs,
        first_step=first_step,
    )


def global_batch_size(args: TrainingArguments | None, state: TrainerState) -> int:
    """Return the samples of one update on all processes; 0 if `state` does not know."""
    batches_per_update = 1 if args is None else args.gradient_accumulation_steps
    return (state.train_batch_size or 0) * batches_per_update * num_ranks()


def _max_steps(state: TrainerState, args: TrainingArguments | None) -> int:
    if state.max_steps > 0 or args is None:
        return max(state.max_steps, 0)
    return max(args.max_steps, 0)


def _num_epochs(state: TrainerState, args: TrainingArguments | None, max_steps: int) -> int | None:
    epochs: float = state.num_train_epochs
    if epochs <= 0 and args is not None and args.max_steps <= 0:
        epochs = args.num_train_epochs
    # The Trainer says sys.maxsize of data of unknown length.
    if epochs <= 0 or 0 < max_steps < epochs:
        return None
    return math.ceil(epochs)


def _num_updates(train_dataloader: Any, args: TrainingArguments | None) -> int | None:
    """Return the updates in one pass over the data; ``None`` if unknown."""
    if train_dataloader is None or not has_length(train_dataloader):
        return None
    batches_per_update = 1 if args is None else args.gradient_accumulation_steps
    return math.ceil(len(train_dataloader) / batches_per_update) or None


def _steps_per_epoch(max_steps: int, epochs: int | None, num_updates: int | None) -> int | None:
    if not max_steps:
        return num_updates
    # A loop may take several batches for one update without saying so.
    if num_updates and (epochs is None or math.ceil(max_steps / num_updates) == epochs):
        return num_updates
    return math.ceil(max_steps / (epochs or 1))
