"""The running mean of an epoch's losses."""

import math
from typing import TypedDict, final

__all__ = ["EpochMean", "SavedMean"]


class SavedMean(TypedDict):
    """An `EpochMean` as JSON keeps it."""

    global_step: int
    """The step it was saved at."""

    epoch: int
    total: float
    num_losses: int
    num_not_finite: int


@final
class EpochMean:
    """Mean of the finite losses of one epoch; losses that are not finite are counted.

    Args:
        saved: Where to go on; ``None`` begins anew.
    """

    def __init__(self, saved: SavedMean | None = None) -> None:
        self._epoch = (saved["epoch"], 0) if saved else None
        self._total = saved["total"] if saved else 0.0
        self._num_losses = saved["num_losses"] if saved else 0
        self.num_not_finite = saved["num_not_finite"] if saved else 0
        """Number of losses of the run that were not finite."""

    @property
    def value(self) -> float:
        """The mean; nan if the epoch has had no finite loss."""
        return self._total / self._num_losses if self._num_losses else math.nan

    def add(self, loss: float, *, epoch: tuple[int, int], num_steps: int = 1) -> None:
        """Add the loss of one step, or the mean loss of several.

        Args:
            loss: Any float.
            epoch: Number of the epoch and of its passes over the data; another pair than that
                of the loss before begins a new mean.
            num_steps: Steps that `loss` stands for.
        """
        if epoch != self._epoch:
            self._epoch, self._total, self._num_losses = epoch, 0.0, 0
        if math.isfinite(loss):
            self._total += loss * num_steps
            self._num_losses += num_steps
        else:
            self.num_not_finite += num_steps

    def save(self, global_step: int) -> SavedMean | None:
        """Return the state, ``None`` before the first loss."""
        if self._epoch is None:
            return None
        return {
            "global_step": global_step,
            "epoch": self._epoch[0],
            "total": self._total,
            "num_losses": self._num_losses,
            "num_not_finite": self.num_not_finite,
        }
