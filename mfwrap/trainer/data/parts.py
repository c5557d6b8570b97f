"""What the micro-batches of an update have: rows, rows of another micro-batch, or nothing."""

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from mfwrap.trainer.view import TrainerView


class Part(enum.Enum):
    """What a micro-batch of an update has."""

    NOTHING = enum.auto()
    """No rows on any rank."""

    STAND_IN = enum.auto()
    """A row without weight, because only other ranks have rows."""

    ROWS = enum.auto()


@final
class UpdateParts:
    """Follow the micro-batches of an update, some of which the Trainer must not train on.

    The Trainer takes ``args.gradient_accumulation_steps`` micro-batches for each update. If an
    update has fewer, it gets empty ones, too. They come first: the Trainer reduces gradients in the
    last micro-batch of an update, so that one must have rows on some rank.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self.left: deque[Part] = deque()
        """What the micro-batches have that come next; empty in an update that has all its rows."""
        self._divisor: float = 1
        self._is_read = False
        self.present = Part.ROWS
        """What the micro-batch has that is being trained on."""

    def clear(self) -> None:
        """Forget what was read; call it after a training."""
        self.left.clear()
        self._is_read, self.present = False, Part.ROWS

    def begin(self) -> None:
        """Begin an update that has rows in each micro-batch."""
        self.clear()
        self._is_read = True

    def begin_with_empty(
        self, number: int, parts: Sequence[Part], batches: Sequence[Any], divisor: float
    ) -> list[Any]:
        """Begin an update, and return its micro-batches with empty ones before them.

        Args:
            number: Number of empty micro-batches.
            parts: What each of `batches` has.
            batches: The micro-batches that are trained on, at least one.
            divisor: Number by which the Trainer divides the loss of each micro-batch, unless it
                counts targets.
        """
        self.begin()
        self.left += [Part.NOTHING] * number
        self.left += parts
        self._divisor = divisor
        return [*(_without_rows(batches[0]) for _ in range(number)), *batches]

    def next(self) -> Part:
        """Return the next one `left`; let the Trainer divide its loss by their number."""
        self.present = self.left.popleft()
        if self.present is not Part.NOTHING:  # the Trainer divides by this number
            self._trainer.current_gradient_accumulation_steps = self._divisor
        return self.present

    def check_update(self) -> None:
        """Raise unless the micro-batches of the update were read and trained here; before it.

        Raises:
            RuntimeError: If a subclass of the trainer has replaced one of the two methods.
        """
        if self.left or not self._is_read:
            name = "training_step" if self.left else "get_batch_samples"
            msg = (
                "`skip_rows`, `rollback` and `rampup_batch_size` need the trainer's "
                f"`{name}`, got that of {type(self._trainer).__name__}, which does not call "
                f"`super().{name}`"
            )
            raise RuntimeError(msg)
        self._is_read = False


def _without_rows(batch: Any) -> dict[str, Any]:
    """Return a batch with no rows; the Trainer counts its tokens, and subclasses read its keys."""
    if not isinstance(batch, Mapping):
        return {}
    return {
        name: value[:0]
        if isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.dim())
        else value
        for name, value in batch.items()
    }
