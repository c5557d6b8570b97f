"""Tell monitors where the rows of the last steps are in the training data."""

import contextlib
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, final

from torch.utils.data import Sampler
from transformers import Trainer

from mfwrap.compatibility.transformers import prepares_inputs_itself
from mfwrap.records.skipped_rows import RowPlace, SkippedRow
from mfwrap.trainer.dealt_rows import Dealing, EpochRows
from mfwrap.trainer.events import MonitorCallback, monitors

if TYPE_CHECKING:
    from mfwrap.trainer.mixin import MFTrainerMixin


@final
class NotedRows:
    """Note which rows of the data set this rank's batch sampler deals, for monitors that name rows.

    Rows are noted as they are dealt, so the order of a sampler is never computed again, and no
    random numbers are drawn. A step costs one append to a list for each batch, and only if a
    monitor names rows.

    Rows stay unknown if they have no place that `skip_rows` takes: those of an iterable data set,
    of a batch sampler other than torch's, with ``dispatch_batches`` on several ranks, with
    ``ignore_data_skip``, or of a Trainer that makes its own batches (TRL's GRPO).

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: "MFTrainerMixin") -> None:
        self._trainer = trainer
        self._takers: list[MonitorCallback] = []
        self._sampler: Any = None
        # A step is judged in the next step, which may belong to the next epoch.
        self._epochs: deque[_NotedEpoch] = deque(maxlen=2)

    def begin(self) -> None:
        """Give `places` to the monitors that name rows; call it before ``on_train_begin``."""
        callbacks = monitors(self._trainer.callback_handler.callbacks)
        self._takers = [callback for callback in callbacks if callback.names_rows]
        for callback in self._takers:
            callback.take_row_places(self.places)

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Restore the sampler after the block, and take `places` from the monitors again."""
        self._epochs.clear()
        try:
            yield
        finally:
            for callback in self._takers:
                callback.take_row_places(None)
            self._takers = []
            self._release()

    def begin_epoch(
        self,
        loader: Any,
        epoch: int,
        first_update: int,
        updates_per_epoch: int,
        left_out: EpochRows | None,
    ) -> None:
        """Note the rows of an epoch.

        Args:
            loader: Data loader of the epoch.
            epoch: Number of the epoch.
            first_update: Update of the epoch at which the training begins or resumes.
            updates_per_epoch: Number of updates of an epoch with all rows.
            left_out: Rows of the epoch that are left out; ``None`` for none.
        """
        if not self._takers:
            return
        trainer = self._trainer
        rows = self._whole_epoch(loader, first_update) if left_out is None else left_out
        is_unknown = trainer.args.ignore_data_skip or _makes_batches(type(trainer))
        if rows is None or is_unknown or rows.dealing.num_updates != updates_per_epoch:
            rows = None
        num_ahead = (getattr(loader, "num_workers", 0) or 0) * (
            getattr(loader, "prefetch_factor", None) or 2
        )
        # The batches of the last two updates, those that workers are making, and a few more.
        num_kept = 3 * trainer.args.gradient_accumulation_steps + num_ahead + 4
        self._epochs.append(_NotedEpoch(epoch, trainer.state.global_step, rows, num_kept))
        sampler = getattr(loader, "batch_sampler", None)
        if self._sampler is not sampler:
            self._release()
        if self._sampler is None and isinstance(sampler, Sampler) and rows is not None:
            self._sampler = sampler
            vars(sampler)["noted_rows"] = self
            sampler.__class__ = _noting_class(type(sampler))

    def _whole_epoch(self, loader: Any, first_update: int) -> EpochRows | None:
        """Return an epoch without rows left out; ``None`` if it is unknown where its rows go."""
        try:
            dealing = Dealing.of_loader(loader, self._trainer.args.gradient_accumulation_steps)
        except ValueError:
            return None
        return EpochRows(dealing, first_update=first_update)

    def _release(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            return
        if hasattr(type(sampler), "without_notes"):
            sampler.__class__ = type(sampler).without_notes
        vars(sampler).pop("noted_rows", None)

    def newest(self) -> "_NotedEpoch":
        """Return the present epoch."""
        return self._epochs[-1]

    def places(self, step: int, sizes: Sequence[int]) -> Sequence[Sequence[RowPlace | None]]:
        """Return the places of this rank's rows in a step; see `RowPlaces`.

        Args:
            step: One of the last two steps, counted from 1 over the whole training.
            sizes: Number of rows of each micro-batch of the rank. The places of a micro-batch of
                another size than the sampler's, for example of packed texts, are ``None``.
        """
        epochs = [each for each in self._epochs if each.steps_before < step]
        return epochs[-1].places(step, sizes) if epochs else ()


@final
class _NotedEpoch:
    """Rows that the batch sampler has dealt last in a pass over the data.

    Args:
        number: Number of the pass.
        steps_before: Steps of the training before the pass.
        rows: Rows that are left out; ``None`` if it is unknown where rows go.
        num_kept: Number of batches that are kept.
    """

    def __init__(
        self, number: int, steps_before: int, rows: EpochRows | None, num_kept: int
    ) -> None:
        self.steps_before = steps_before
        self.num_iterations = 0
        """How often the sampler has been iterated over in this pass."""
        self.dealt: deque[tuple[int, Sequence[Any]]] = deque(maxlen=num_kept)
        """Slots with the indices of this rank's rows."""
        self._number = number
        self._rows = rows

    def places(self, step: int, sizes: Sequence[int]) -> Sequence[Sequence[RowPlace | None]]:
        """Return the places of rows, as `NotedRows.places` does."""
        rows = self._rows
        # If a callback has iterated over the loader, too, the order may be that of its iteration.
        if rows is None or self.num_iterations != 1:
            return ()
        update = next(islice(rows.updates(), step - self.steps_before - 1, None), None)
        if update is None:
            return ()
        dealt = dict(self.dealt)
        kept = rows.kept_positions(update, rows.dealing.rank)
        # A network that is called twice per micro-batch has more calls than there are slots.
        if len(kept) != len(sizes) or not kept.keys() <= dealt.keys():
            return ()
        return [
            self._of_batch(dealt[slot], positions, size)
            for (slot, positions), size in zip(kept.items(), sizes, strict=True)
        ]

    def _of_batch(
        self, indices: Sequence[Any], positions: Sequence[int], size: int
    ) -> Sequence[RowPlace | None]:
        unknown = [None] * size
        if not len(indices) == len(positions) == size:
            return unknown
        try:
            numbers = [operator.index(index) for index in indices]
        except TypeError:
            return unknown  # the sampler yields keys
        return [
            RowPlace(index, SkippedRow(self._number, position))
            for index, position in zip(numbers, positions, strict=True)
        ]


def _makes_batches(trainer_class: type[Trainer]) -> bool:
    """Return whether a Trainer may train on other rows than those of its loader's batches."""
    return (
        prepares_inputs_itself(trainer_class, Trainer)
        or trainer_class.get_batch_samples is not Trainer.get_batch_samples
    )


def _noting_class(sampler_class: Any) -> Any:
    class Noting(sampler_class):  # type: ignore[misc]  # (a base that is known at run time)
        """A batch sampler that notes the indices that it yields."""

        without_notes = sampler_class
        noted_rows: NotedRows

        def __iter__(self: Self) -> Iterator[Any]:
            epoch = self.noted_rows.newest()
            epoch.num_iterations += 1
            for number, indices in enumerate(super().__iter__()):
                # If rows are left out, some batches are missing.
                epoch.dealt.append((getattr(self, "slot", number), indices))
                yield indices

    Noting.__name__, Noting.__qualname__ = sampler_class.__name__, sampler_class.__qualname__
    return Noting
