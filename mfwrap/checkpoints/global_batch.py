"""Keep the global batch of a training that resumes on another number of ranks."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mfwrap.arguments import callers_stacklevel
from mfwrap.collectives import this_rank

_LOG = logging.getLogger(__name__)


class GlobalBatch(NamedTuple):
    """Division of an update's rows into ranks and micro-batches."""

    num_ranks: int
    """Number of ranks that get rows of their own. 1 if all ranks together get a micro-batch."""

    batch_size: int
    """Number of rows of a micro-batch on one rank; 1 if `size` counts micro-batches."""

    accumulation_steps: int
    """Number of micro-batches of an update on one rank."""

    configured_steps: int
    """``gradient_accumulation_steps`` in the user's settings. It differs from `accumulation_steps`
    in a training that was resumed on another number of ranks."""

    @property
    def size(self) -> int:
        """Number of rows of an update on all ranks."""
        return self.num_ranks * self.batch_size * self.accumulation_steps

    def state_dict(self) -> dict[str, int]:
        """Return all numbers by name."""
        return self._asdict()

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "GlobalBatch":
        """Return the global batch of a state that `state_dict` returned.

        Raises:
            TypeError: If `state` is not a mapping of these names.
            ValueError: If a number is not an int > 0.
        """
        return cls(**{name: positive(number) for name, number in dict(state).items()})


def positive(number: Any) -> int:
    """Return a number from a file.

    Raises:
        ValueError: If it is not an int > 0.
    """
    if type(number) is not int or number < 1:
        msg = f"expected an int > 0, got {number!r:.80}"
        raise ValueError(msg)
    return number


def resumed_accumulation(
    saved: GlobalBatch, now: GlobalBatch, checkpoint: Path, unit: str = "rows"
) -> int:
    """Return the accumulation steps that keep the global batch of a checkpoint.

    - If the number of ranks or the batch size has changed, the accumulation steps are the global
      batch divided by both. Rank 0 logs the change.
    - If the user has changed ``gradient_accumulation_steps`` as well, or only the batch size so
      that the division leaves a remainder, a warning says that the global batch changes.

    Args:
        saved: Global batch of the checkpoint.
        now: Global batch of the present settings.
        checkpoint: The checkpoint.
        unit: What `GlobalBatch.size` counts: ``"rows"`` or ``"micro-batches"``.

    Raises:
        ValueError: If the number of ranks does not divide the global batch. The message says which
            numbers do.
    """
    if now.size == saved.size:
        return now.accumulation_steps
    steps, remainder = divmod(saved.size, now.num_ranks * now.batch_size)
    is_wanted = now.configured_steps != saved.configured_steps
    if is_wanted or (remainder and now.num_ranks == saved.num_ranks):
        warnings.warn(
            f"updates train on {now.size} {unit} after {checkpoint}, and on {saved.size} {unit} "
            "before it, because the batch size or gradient_accumulation_steps was changed; rows of "
            "the present epoch may be repeated or left out",
            stacklevel=callers_stacklevel(),
        )
        return now.accumulation_steps
    if remainder:
        raise ValueError(_refusal(saved, now, checkpoint, unit))
    if this_rank() == 0:
        _LOG.warning(
            "%s",
            f"gradient_accumulation_steps is {steps} instead of {now.configured_steps}, so that "
            f"updates still train on {saved.size} {unit}: {checkpoint} was written with "
            f"{saved.num_ranks} x {saved.batch_size} x {saved.accumulation_steps} (ranks x batch "
            f"size x accumulation), this run has {now.num_ranks} x {now.batch_size} x {steps}",
        )
    return steps


def _refusal(saved: GlobalBatch, now: GlobalBatch, checkpoint: Path, unit: str) -> str:
    plural = "s" if now.num_ranks > 1 else ""
    each = f" with a batch size of {now.batch_size}" if now.batch_size > 1 else ""
    start = (
        f"cannot resume from {checkpoint} on {now.num_ranks} rank{plural}{each}: an update trains "
        f"on {saved.size} {unit}, which cannot be divided equally"
    )
    shares, remainder = divmod(saved.size, now.batch_size)
    if remainder:
        return f"{start}; set the batch size to a divisor of {saved.size}"
    fitting = [str(number) for number in range(1, shares + 1) if shares % number == 0]
    listed = " or ".join([", ".join(fitting[:-1]), fitting[-1]] if fitting[1:] else fitting)
    return f"{start}; start {listed} rank{'s' if fitting[1:] else ''}"
