"""The gradient noise scale: from which batch size on larger batches gain little."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from mfwrap import StepReport
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.collectives import num_ranks
from mfwrap.tensors.shards import on_device


@final
class NoiseScale:
    """Estimate the gradient noise scale from norms before and after the reduction over ranks.

    The gradient of ``B`` samples is the gradient of the loss over all data plus noise whose squared
    norm is ``S / B``. The expected squared norms of a rank's own gradient and of the mean over the
    ranks therefore differ by the noise alone, and give both ``S`` and the squared norm ``G**2``
    without noise. The noise scale ``S / G**2`` is the batch size, in samples, at which both are
    equal. A batch that is much smaller wastes steps, one that is much larger wastes samples.

    One step says little, so ``S`` and ``G**2`` are means over many updates. Skipped updates do not
    count. Each rank uses its own norm, so nothing is sent. A step costs nine operations on the
    device, on at most three elements each, and does not synchronize. A resumed run continues with
    the sums of the rank that saved them, on every rank.

    The ranks must have different samples, of about the same number of targets.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162,
    appendix A.1.

    Args:
        batch_size: Number of samples of an update on all ranks together, unless the batch grows.
        num_ranks: Number of ranks whose gradients are averaged, > 1.
        interval: Number of steps over which `S` and ``G**2`` are averaged.
    """

    def __init__(self, batch_size: int, num_ranks: int, interval: int) -> None:
        self._batch_size = batch_size
        self._num_ranks = num_ranks
        self._interval = interval
        # Sums of the noise and the signal of the present interval, shape (2,).
        self._sums = torch.zeros(2)

    def end_step(
        self, step: int, report: StepReport, batch_size: float | None = None
    ) -> Tensor | None:
        """Include a step, and return the noise scale if the step ends an interval.

        Args:
            step: Number of the step, from 1; an interval ends at its multiples.
            report: Report of the step. One without `StepReport.reduction_norms` is ignored.
            batch_size: Number of samples of the update; ``None`` for that of the constructor.

        Returns:
            Shape ``()``, float32. Infinite if the mean ``G**2`` is not above 0, so that the
            noise hides the gradient; NaN if no update of the interval was applied. ``None`` within
            an interval.
        """
        norms = report.reduction_norms
        if norms is None:
            return None
        own, reduced = norms.square().unbind()
        size = self._batch_size if batch_size is None else batch_size
        noise = (own - reduced) * (size / (self._num_ranks - 1))
        signal = (reduced * self._num_ranks - own) / (self._num_ranks - 1)
        sums = on_device(self._sums, norms.device)
        self._sums = torch.where(report.skipped, sums, sums + torch.stack([noise, signal]))
        if step % self._interval:
            return None
        noise, signal = self._sums.unbind()
        self._sums = torch.zeros_like(self._sums)
        scale = torch.where(signal > 0, noise.clamp(min=0) / signal, torch.inf)
        return torch.where((noise == 0) & (signal == 0), torch.nan, scale)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums of the present interval. Synchronizes with the device."""
        return {"sums": self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._sums = torch.tensor(state["sums"])


def new_noise_scale(settings: TrainingStateSettings, batch_size: int) -> NoiseScale | None:
    """Return the noise scale of a run; ``None`` on one rank, or if it is not asked for.

    Args:
        settings: Settings of the monitor.
        batch_size: Number of samples of an update on all ranks; 0 if unknown.

    Raises:
        ValueError: If the batch size is unknown.
    """
    if not settings.noise_scale_format or num_ranks() == 1:
        return None
    if not batch_size:
        msg = (
            "`global_batch_size` must be given for `noise_scale_format` in a loop that does not "
            "tell its batch size, got 0"
        )
        raise ValueError(msg)
    return NoiseScale(batch_size, num_ranks(), settings.noise_scale_steps)
