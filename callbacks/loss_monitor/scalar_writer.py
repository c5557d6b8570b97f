"""Step records as TensorBoard curves, under MindFormers' tags."""

import os
from typing import final

from mfwrap.callbacks.loss_monitor.record import StepRecord
from mfwrap.callbacks.shared.tensorboard import EventsFile

_SECONDS_PER_DAY = 86400


@final
class ScalarWriter:
    """Write step records as curves.

    The x-axis is the step. If the batch size is known, most curves are written a second time over
    the number of samples, as ``<tag> vs samples``. Unknown values are left out.

    Source: MindFormers, ``MFLossMonitor`` with ``tensorboard`` in the configuration.

    Args:
        directory: Folder of the events file.
        loss_scale: Also write ``loss-scale``.
        timers: Also write ``iteration-time``, ``throughput`` and ``B-samples-per-day``.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, loss_scale: bool, timers: bool
    ) -> None:
        self._events = EventsFile(directory)
        self._loss_scale = loss_scale
        self._timers = timers

    def write(self, record: StepRecord) -> None:
        """Add a point for one step to each curve."""
        step = record.position.step
        for tag, value in self._over_steps_and_samples(record).items():
            if value is not None:
                self._events.add(tag, value, step)
                if record.num_samples:
                    self._events.add(f"{tag} vs samples", value, record.num_samples)
        for tag, value in self._over_steps(record).items():
            if value is not None:
                self._events.add(tag, value, step)

    def close(self) -> None:
        """Write all points to disk. A later record opens a new file."""
        self._events.close()

    def _over_steps_and_samples(self, record: StepRecord) -> dict[str, float | None]:
        values = record.values
        scalars: dict[str, float | None] = {
            "learning-rate": values.learning_rate,
            "batch-size": record.global_batch_size or None,
            "loss": values.loss,
            "grad-norm": values.global_norm,
        }
        # MindFormers' tags: `lm-loss`, `mtp-loss`, `load-balancing-loss`.
        scalars |= {name.replace("_", "-"): loss for name, loss in values.losses.items()}
        if self._loss_scale:
            scalars["loss-scale"] = values.loss_scale
        if self._timers and record.seconds:
            scalars["iteration-time"] = int(record.seconds * 1000)
            scalars["throughput"] = record.throughput or None
        return scalars

    def _over_steps(self, record: StepRecord) -> dict[str, float | None]:
        scalars = {"model-flops-throughput-per-npu": record.tflops}
        if self._timers and record.throughput:
            samples_per_second = record.throughput * record.num_processes
            scalars["B-samples-per-day"] = samples_per_second * _SECONDS_PER_DAY / 1e9
        return scalars
