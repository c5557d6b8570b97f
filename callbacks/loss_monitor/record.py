"""Format the record of a step as the lines that MindFormers prints and scripts parse."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from mfwrap.callbacks.shared.progress import RunPosition
from mfwrap.callbacks.shared.step_values import StepValues
from mfwrap.memory import GIB

_UNKNOWN = "unavailable"
_BAR_WIDTH = 50
_MOST_SECONDS = 86_399_999_999_999
"""Longest time that ``datetime.timedelta`` can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The numbers that are printed about a step."""

    position: RunPosition
    values: StepValues
    mean_loss: float
    seconds: float
    """Mean time of a step since the last record; 0 if unknown."""

    seconds_left: float
    global_batch_size: float
    """Samples of an update on all processes, mean since the last record; 0 if unknown."""

    num_samples: int
    """Samples of all updates so far; 0 if unknown."""

    num_processes: int
    tflops: float | None
    """TFLOP/s of one device; ``None`` if unknown."""

    peak_tflops: float | None

    max_memory: int | None = None
    """Peak of the memory that is allocated on the device, in bytes; ``None`` on a CPU."""

    @property
    def throughput(self) -> float:
        """Samples per second and process; 0 if unknown."""
        if not self.seconds:
            return 0.0
        return self.global_batch_size / self.num_processes / self.seconds


def record_lines(record: StepRecord) -> tuple[str, ...]:
    """Format a record as two lines, and a line for each learning rate if there are several.

    Source: MindFormers, ``MFLossMonitor.print_output_info``; ``mfu`` and ``max_memory`` are ours.
    MindFormers prints the names of all parameters of a group instead of the group's name. If the
    length of the run is unknown, which MindFormers never has, ``?`` is in its place, and no share
    of the run.
    """
    return (_numbers(record), _progress(record), *_rates(record.values.learning_rates))


def _rates(rates: Mapping[str, float]) -> Iterator[str]:
    if len(rates) > 1:
        (first, rate), *others = rates.items()
        yield f"{first}_lr: {rate:.6e}, equal to `lr:` above."
        for number, (name, rate) in enumerate(others):
            yield f"group_{number}_lr: {rate:.6e}, group_{number}_params: {name}"


def _numbers(record: StepRecord) -> str:
    position, values = record.position, record.values
    learning_rate = (
        "" if values.learning_rate is None else f"lr: {_float32(values.learning_rate)}, "
    )
    overflow = _UNKNOWN if values.overflow is None else values.overflow
    loss_scale = _UNKNOWN if values.loss_scale is None else _float32(values.loss_scale)
    norm = None if values.global_norm is None else _vector(values.global_norm)
    named = "".join(f"{name}: {loss:5.6f}, " for name, loss in values.losses.items())
    length = position.length
    num_epochs, num_steps = f"{length.num_epochs:3d}", f"{length.steps_per_epoch:5d}"
    if not length.is_known:
        is_one_epoch = length.steps_per_epoch >= length.num_steps
        num_epochs, num_steps = "  ?", "    ?" if is_one_epoch else num_steps
    return (
        f"{{ Epoch:[{position.epoch:3d}/{num_epochs}], "
        f"step:[{position.step_of_epoch:5d}/{num_steps}], "
        f"loss:[{values.loss:5.3f}/{record.mean_loss:5.3f}], {named}"
        f"per_step_time: {int(record.seconds * 1000)}ms, {learning_rate}"
        f"overflow cond: {overflow}, loss_scale: {loss_scale}, global_norm: {norm}"
        f"{_compute(record)}{_memory(record)}"
    )


def _compute(record: StepRecord) -> str:
    if record.tflops is None:
        return ""
    text = f", train_throughput_per_npu: {record.tflops:.3f}T"
    if record.peak_tflops is not None:
        text += f", mfu: {100 * record.tflops / record.peak_tflops:.1f}%"
    return text


def _memory(record: StepRecord) -> str:
    return "" if record.max_memory is None else f", max_memory: {record.max_memory / GIB:.2f} GiB"


def _progress(record: StepRecord) -> str:
    if not record.position.length.is_known:
        return f"  {record.throughput:.5f} samples/s/p }}"
    percent = record.position.percent
    bar = "█" * int(_BAR_WIDTH * percent / 100)
    left = timedelta(seconds=int(min(record.seconds_left, _MOST_SECONDS)))
    return f"  {percent:4.1f}% |{bar:<50}| {record.throughput:.5f} samples/s/p  {left} }}"


def _float32(value: float) -> str:
    """Format a number with the fewest digits that identify a float32."""
    # A number from the Trainer's log may be too large for float32. It is printed as inf; numpy's
    # warning would be noise.
    with np.errstate(over="ignore"):
        return str(np.float32(value))


def _vector(value: float) -> str:
    """Format a norm as MindFormers does, as an array of one element: ``[3.]``."""
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if 1e-4 <= number < 1e6:
        # NumPy prints such an array without an exponent. This is how, in a tenth of the time.
        return f"[{np.format_float_positional(number, precision=8, unique=True, trim='.')}]"
    return str(np.array([number]))
