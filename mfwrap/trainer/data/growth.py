"""Let the batch of an `MFTrainer` grow: ``rampup_batch_size``.

The number of rows of a micro-batch stays, and updates take more and more micro-batches. In the
Trainer, each update has ``args.gradient_accumulation_steps`` micro-batches, which are those of the
last updates here. An update with fewer gets empty ones (`mfwrap.trainer.data.parts`).
"""

import contextlib
import math
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, final

import torch
from accelerate import skip_first_batches

from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.global_batch import GlobalBatch
from mfwrap.compatibility.transformers import makes_batches_itself
from mfwrap.schedules.batch_growth import BatchGrowth, RampUp, check_ramp_up
from mfwrap.trainer.data.dealt import Dealing
from mfwrap.trainer.data.global_batch import TrainerBatch
from mfwrap.trainer.data.parts import Part, UpdateParts
from mfwrap.trainer.data.skip import DataStart
from mfwrap.trainer.events import monitors
from mfwrap.trainer.view import TrainerView


@final
class GrowingBatch:
    """Let the number of micro-batches of an update grow with the number of updates.

    A pass over the data ends with all its micro-batches, as in a stock Trainer: its last update may
    have fewer than others. It counts as a whole update for the growth, which therefore depends on
    the number of updates alone, whatever the size of the data.

    Args:
        trainer: The trainer.
        rampup_batch_size: See `mfwrap.schedules.BatchGrowth`; ``None`` for a batch that does not
            grow.
        batch: Global batch of the trainer, to which the batch grows.
        parts: Micro-batches of an update.

    Raises:
        TypeError: If `rampup_batch_size` has another type.
        ValueError: If it has a wrong value.
    """

    def __init__(
        self,
        trainer: TrainerView,
        rampup_batch_size: RampUp | None,
        batch: TrainerBatch,
        parts: UpdateParts,
    ) -> None:
        if rampup_batch_size is not None:
            check_ramp_up(rampup_batch_size)
        self._trainer = trainer
        self.is_on = rampup_batch_size is not None
        """Whether the batch grows."""
        self._given = rampup_batch_size
        self._batch = batch
        self._parts = parts
        # Of the present training.
        self._growth = BatchGrowth({0: 1}, 1)
        self._rows_per_slot = 1
        self._num_slots: int | None = None
        self._rows_per_pass: int | None = None
        self._max_steps = 0
        self._begun = 0
        self._first_updates = [0]
        # Of the present pass over the data.
        self._pass = 0
        self._updates_done = 0
        self._slots_done = 0
        self._delays_random_states: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the argument by its name, as JSON values; empty if no batch grows."""
        given = self._given
        if given is None:
            return {}
        return {"rampup_batch_size": dict(given) if isinstance(given, Mapping) else list(given)}

    def initial_values(self, values: Sequence[Any], loader: Any) -> Any:
        """Return the numbers of updates and epochs of a training whose batch grows.

        Args:
            values: Result of the Trainer's ``set_initial_training_values``.
            loader: Data loader of the training.

        Raises:
            ValueError: If the sizes do not grow to the global batch, or are no multiples of the
                rows of a micro-batch; or if the trainer chooses its batches or their size itself.
        """
        if self._given is None:
            return values
        args = self._trainer.args
        if makes_batches_itself(self._trainer):
            _refuse(
                f"{type(self._trainer).__name__}, which makes its own micro-batches",
                "leave `rampup_batch_size` out",
            )
        if args.auto_find_batch_size:
            _refuse("`auto_find_batch_size`", "set it to False")
        now = self._batch.now()
        self._rows_per_slot = now.num_ranks * now.batch_size
        self._growth = BatchGrowth(self._given, now.size)
        self._growth.check_divisible(self._rows_per_slot)
        num_epochs, per_epoch, num_rows, num_seen, total, slots, max_steps = values
        has_length = num_epochs != sys.maxsize
        self._num_slots = slots if has_length else None
        self._rows_per_pass = self._rows_of_pass(loader)
        self._first_updates = [0]
        if has_length and args.max_steps <= 0:
            # As in the Trainer, the share of the last epoch is rounded up.
            whole, share = divmod(args.num_train_epochs, 1)
            begin = self._first_update(int(whole))
            rows = math.ceil(share * slots * self._rows_per_slot)
            max_steps = begin + self._growth.num_updates(begin, rows)
        elif has_length:
            num_epochs = self._pass_of(max_steps - 1) + 1
        self._max_steps = max_steps
        if args.max_steps > 0:
            num_seen = self.samples(max_steps)
        return num_epochs, per_epoch, num_rows, num_seen, total, slots, max_steps

    def _rows_of_pass(self, loader: Any) -> int | None:
        """Return the number of rows of a pass, if its last micro-batch may lack rows."""
        try:
            dealing = Dealing.of_loader(loader, 1)
        except ValueError:
            return None
        return None if dealing.fills_up else dealing.num_rows

    def _first_update(self, number: int) -> int:
        """Return the number of updates before a pass over the data."""
        firsts, size = self._first_updates, (self._num_slots or 1) * self._rows_per_slot
        while len(firsts) <= number:
            firsts.append(firsts[-1] + self._growth.num_updates(firsts[-1], size))
        return firsts[number]

    def _pass_of(self, update: int) -> int:
        """Return the pass over the data that an update belongs to."""
        if self._num_slots is None:
            return 0
        while self._first_updates[-1] <= update:
            self._first_update(len(self._first_updates))
        return bisect_right(self._first_updates, update) - 1

    def _slots(self, first: int, update: int) -> int:
        """Return the number of micro-batches from one update to another."""
        growth = self._growth
        return (growth.samples(update) - growth.samples(first)) // self._rows_per_slot

    def samples(self, num_updates: int) -> int:
        """Return the samples of the first updates of the training, on all ranks together.

        The last update of a pass may have fewer than others. In data without a length it counts as
        a whole one.
        """
        if self._num_slots is None:
            return self._growth.samples(num_updates)
        number = self._pass_of(num_updates)
        of_pass = self._num_slots * self._rows_per_slot
        of_pass = min(of_pass, self._rows_per_pass or of_pass)
        slots = self._slots(self._first_update(number), num_updates)
        return number * of_pass + min(slots * self._rows_per_slot, of_pass)

    def start(self, done: int) -> DataStart | None:
        """Return where a training begins or resumes in the data; ``None`` if no batch grows.

        Args:
            done: Number of updates before.
        """
        if self._given is None:
            return None
        self._begun = done
        number = self._pass_of(done)
        first = self._first_update(number)
        return DataStart(number, done - first, self._slots(first, done))

    def first_slots(self, number: int) -> Sequence[int] | None:
        """Return the first micro-batch of each update of a pass; ``None`` if no batch grows."""
        if self._given is None or self._num_slots is None:
            return None
        first = self._first_update(number)
        return [
            self._slots(first, update) for update in range(first, self._first_update(number + 1))
        ]

    def check_resumed(self, saved: Mapping[str, Any] | None) -> None:
        """Warn if the batch has grown otherwise before a checkpoint.

        Args:
            saved: Position of the checkpoint; ``None`` for a training from the start, or from a
                checkpoint of a stock Trainer.
        """
        args, done = self._trainer.args, self._trainer.state.global_step
        if args.ignore_data_skip or not done:
            return
        was: int | str = "an unknown number"
        now = self._growth.samples(done)
        if saved is not None:
            of_steps = done * GlobalBatch.restored(saved["global_batch"]["sizes"]).size
            was, now = saved.get("samples") or of_steps, now if self.is_on else of_steps
        elif not self.is_on:
            return
        if was != now and args.should_save:
            warnings.warn(
                f"the first {done} updates take {now} rows with the present `rampup_batch_size`, "
                f"and took {was} before the checkpoint, so rows of the present epoch may be "
                "repeated or left out; give the same `rampup_batch_size` as before",
                stacklevel=callers_stacklevel(),
            )

    def state_dict(self) -> int | None:
        """Return the rows that the updates so far take; ``None`` if no batch grows."""
        return self._growth.samples(self._trainer.state.global_step) if self.is_on else None

    def of_epoch(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return keywords with which the Trainer makes the updates of an epoch.

        The Trainer computes the number of micro-batches to skip from that of the updates to skip.
        So they are skipped here, and it gets the rest of the epoch as an epoch of its own.

        Args:
            keywords: Keywords of the Trainer's ``_run_epoch``.
        """
        if self._given is None:
            return dict(keywords)
        args, done = self._trainer.args, self._trainer.state.global_step
        checkpoint, self._pass = keywords["resume_from_checkpoint"], keywords["epoch"]
        is_resumed = checkpoint is not None and self._pass == keywords["epochs_trained"]
        skipped = keywords["steps_trained_in_current_epoch"] if is_resumed else 0
        self._slots_done = skipped = 0 if args.ignore_data_skip else skipped
        if self._num_slots is None:
            self._updates_done = done if skipped else 0
            num_updates = self._max_steps - self._updates_done
        else:
            rest = (self._num_slots - skipped) * self._rows_per_slot
            num_updates = self._growth.num_updates(done, rest)
        loader = keywords["train_dataloader"]
        self._iterator = None
        self._next_pass = loader if skipped and self._num_slots is None else None
        # The Trainer restores the random states of a checkpoint after it has read the first batches
        # behind those it skips; see `take_delayed`.
        self._delays_random_states = str(checkpoint) if skipped else None
        return {
            **keywords,
            "train_dataloader": skip_first_batches(loader, skipped) if skipped else loader,
            "steps_trained_in_current_epoch": 0,
            "num_update_steps_per_epoch": num_updates,
            "steps_in_epoch": num_updates * args.gradient_accumulation_steps,
        }

    @property
    def delays_random_states(self) -> bool:
        """Whether the random states of the checkpoint are to be restored later."""
        return self._delays_random_states is not None

    def take_delayed(self) -> str | None:
        """Return the checkpoint whose random states are to be restored now, if there is one."""
        checkpoint, self._delays_random_states = self._delays_random_states, None
        return checkpoint

    def read(
        self,
        read: Callable[..., tuple[list[Any], Any]],
        epoch_iterator: Iterator[Any],
        device: torch.device,
    ) -> tuple[list[Any], Any]:
        """Read the micro-batches of an update, with empty ones before them.

        Args:
            read: The Trainer's ``get_batch_samples``, which takes the other arguments.
            epoch_iterator: Iterator over the micro-batches of the epoch.
            device: Device of the number of targets.
        """
        number = self._growth.size(self._trainer.state.global_step) // self._rows_per_slot
        if self._num_slots is not None:
            number = min(number, self._num_slots - self._slots_done)
        batches, num_items = read(self._iterator or epoch_iterator, number, device)
        if not batches and self._next_pass is not None:
            # Data without a length ended before the checkpoint. The Trainer takes a pass without
            # rows for the end of the data, so the next pass begins within this one.
            if hasattr(self._next_pass, "set_epoch"):
                self._next_pass.set_epoch(self._pass + 1)
            self._iterator = iter(self._next_pass)
            batches, num_items = read(self._iterator, number, device)
        self._next_pass = None
        if not batches:
            self._parts.begin()
            return batches, num_items
        self._slots_done += len(batches)
        num_empty = self._trainer.args.gradient_accumulation_steps - number
        rows = [Part.ROWS] * len(batches)
        return self._parts.begin_with_empty(num_empty, rows, batches, len(batches)), num_items

    def end_update(self) -> None:
        """Set the progress of the epoch, which the Trainer computes from the updates; after one."""
        self._updates_done += 1
        share = self._updates_done / self._max_steps
        if self._num_slots is not None:
            share = self._slots_done / self._num_slots
        self._trainer.state.epoch = self._pass + share

    def values_to_log(self) -> dict[str, int]:
        """Return values, by name, for each training log."""
        step = self._trainer.state.global_step
        seen = self.samples(step)
        return {"global_batch_size": seen - self.samples(step - 1), "num_samples_seen": seen}

    def speed(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Return the samples per second of this training, for its final log entry.

        The Trainer takes a share of the samples of the whole training, by the share of the updates.

        Args:
            logs: The Trainer's entry.
        """
        seconds = logs.get("train_runtime")
        if not seconds:
            return {}
        seen = self.samples(self._trainer.state.global_step) - self.samples(self._begun)
        return {"train_samples_per_second": round(seen / seconds, 3)}

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Take the function of `tell_monitors` from the monitors after the block, a training."""
        try:
            yield
        finally:
            self._tell(None)

    def tell_monitors(self) -> None:
        """Tell monitors how many samples updates have; call it before ``on_train_begin``."""
        self._tell(self.samples if self.is_on else None)

    def _tell(self, samples: Callable[[int], int] | None) -> None:
        for callback in monitors(self._trainer.callback_handler.callbacks):
            callback.take_samples(samples)


def _refuse(what: str, remedy: str) -> NoReturn:
    msg = f"`rampup_batch_size` needs updates whose size it sets, got {what}; {remedy}"
    raise ValueError(msg)
