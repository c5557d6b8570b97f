"""Records as TensorBoard curves, under MindFormers' tags."""

from pathlib import Path
from typing import Any, final

from mfwrap.callbacks.loss_monitor.record import StepRecord
from mfwrap.callbacks.shared.tensorboard import summary_writer_class

__all__ = ["ScalarWriter"]

_SECONDS_PER_DAY = 86400


@final
class ScalarWriter:
    """Write records to an events file, made at the first one.

    A value that is unknown is not written. Curves are over steps, those that MindFormers has
    twice also over samples, if the batch size is known.

    Source: MindFormers, ``MFLossMonitor`` with ``tensorboard`` in the configuration.

    Args:
        directory: Where the events file goes.
        loss_scale: Write ``loss-scale`` too.
        timers: Write ``iteration-time``, ``throughput`` and ``B-samples-per-day`` too.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(self, directory: Path, *, loss_scale: bool, timers: bool) -> None:
        self._make_writer = summary_writer_class()
        self._writer: Any = None
        self._directory = directory
        self._loss_scale = loss_scale
        self._timers = timers

    def write(self, record: StepRecord) -> None:
        """Write one record."""
        if self._writer is None:
            self._writer = self._make_writer(str(self._directory))
        step = record.position.step
        for tag, value in self._over_samples_too(record).items():
            if value is not None:
                self._writer.add_scalar(tag, value, global_step=step)
                if record.global_batch_size:
                    num_samples = step * record.global_batch_size
                    self._writer.add_scalar(f"{tag} vs samples", value, global_step=num_samples)
        for tag, value in self._over_steps(record).items():
            if value is not None:
                self._writer.add_scalar(tag, value, global_step=step)

    def close(self) -> None:
        """Write what is pending; a later record goes to a new file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _over_samples_too(self, record: StepRecord) -> dict[str, float | None]:
        values = record.values
        scalars: dict[str, float | None] = {
            "learning-rate": values.learning_rate,
            "batch-size": record.global_batch_size or None,
            "loss": values.loss,
            "grad-norm": values.global_norm,
        }
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
