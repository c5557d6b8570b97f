"""From the steps of a run to the records that are printed."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, final

import torch
from torch import Tensor

from mfwrap import DeferredReads
from mfwrap.callbacks.loss_monitor.record import StepRecord
from mfwrap.callbacks.shared.run_size import RunLength, RunPosition
from mfwrap.callbacks.shared.step_clock import StepClock
from mfwrap.callbacks.shared.step_values import PackedValues, StepValues, pack, values_of_logs
from mfwrap.collectives import add_over_ranks

__all__ = [
    "EpochMean",
    "MonitoredRun",
    "SavedMean",
]


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


class _Rates(NamedTuple):
    """What the clock says when a step ends that is printed."""

    seconds: float
    seconds_left: float
    tflops: float | None


class _Moment(NamedTuple):
    """What is known on the host when a step ends."""

    position: RunPosition
    epoch: tuple[int, int]
    rates: _Rates | None
    """``None`` if the step is not printed."""


class _Step(NamedTuple):
    """A step whose values are on the device."""

    packed: PackedValues
    moment: _Moment


@final
class MonitoredRun:
    """One run of training as a monitor sees it.

    Args:
        length: Of the run.
        emit: Takes each record.
        clock: Of the steps.
        global_step: Steps done before the first one.
        per_print_times: Steps from one record to the next.
        global_batch_size: Samples of one update on all processes; 0 is unknown.
        num_processes: Over which they are spread.
        averages_loss: Show the mean of all ranks' losses; each of them has such a run.
        is_main: Whether this process reads and prints.
        peak_tflops: Of this device; ``None`` is unknown.
        saved_mean: Of the epoch that is gone on with; used if it is of `global_step`.
    """

    def __init__(
        self,
        length: RunLength,
        emit: Callable[[StepRecord], None],
        *,
        clock: StepClock,
        global_step: int,
        per_print_times: int,
        global_batch_size: int,
        num_processes: int,
        averages_loss: bool,
        is_main: bool,
        peak_tflops: float | None,
        saved_mean: SavedMean | None,
    ) -> None:
        self.clock = clock
        self._length = length
        self._emit = emit
        self._per_print_times = per_print_times
        self._global_batch_size = global_batch_size
        self._num_processes = num_processes
        self._averages_loss = averages_loss
        self._is_main = is_main
        self._peak_tflops = peak_tflops
        fits = saved_mean is not None and saved_mean["global_step"] == global_step
        self._mean = EpochMean(saved_mean if fits else None)
        self._reads: DeferredReads | None = None
        self._unsent: list[_Step] = []
        self._num_steps = 0
        self._pass_over_data = 0
        self._last_step = self._last_printed = self._last_logged = global_step
        self.has_outputs = False
        """A step of this run has had an output."""

    @property
    def num_losses_not_finite(self) -> int:
        """Number of losses so far, of those that were read, that were not finite."""
        return self._mean.num_not_finite

    def begin_epoch(self) -> None:
        """Begin a new mean, unless the run has just begun, in the middle of an epoch maybe."""
        if self._num_steps:
            self._pass_over_data += 1

    def end_step(
        self, global_step: int, output: Any, flops: float | None, *, sends: bool = False
    ) -> None:
        """Print the step before; keep what is needed of this one.

        Args:
            global_step: Steps done, this one included.
            output: Of the step; ``None`` if there is none.
            flops: Of one update; ``None`` is unknown.
            sends: Average losses over ranks now, though the step is not printed.
        """
        # Before the clock is read: the wait for the step before is time of a step.
        self.flush()
        self.clock.end_step()
        self._num_steps += 1
        self._last_step = global_step
        if output is None:
            return
        self.has_outputs = True
        moment = self._moment(global_step, flops)
        self._unsent.append(_Step(pack(output), moment))
        if sends or moment.rates is not None or not self._averages_loss:
            self.send()

    def send(self, *, alone: bool = False) -> None:
        """Average the losses of the steps since the last time, and begin to copy their values.

        Args:
            alone: Take this rank's own losses: nothing says that the others are still there.
        """
        steps, self._unsent = self._unsent, []
        if not steps:
            return
        packed = [step.packed for step in steps]
        if self._averages_loss and not alone:
            packed = over_ranks(packed)
        if not self._is_main:
            return
        if self._reads is None:
            self._reads = DeferredReads(packed[0].tensor.device)
        for values, step in zip(packed, steps, strict=True):
            receive = functools.partial(self._receive, values, step.moment)
            self._reads.submit(values.tensor, receive)

    def log(self, global_step: int, logs: Mapping[str, Any], flops: float | None) -> None:
        """Print what the Trainer logs, the mean loss of several steps, as a record.

        Args:
            global_step: Steps done.
            logs: Without a ``loss``, nothing is printed.
            flops: Of one update; ``None`` is unknown.
        """
        values = values_of_logs(logs)
        if values is None:
            return
        num_steps = max(global_step - self._last_logged, 1)
        self._last_logged = global_step
        self._keep(values, self._moment(global_step, flops), num_steps=num_steps)

    def flush(self) -> None:
        """Wait for what is pending of the last step, and print it."""
        if self._reads is not None:
            self._reads.flush()

    def save_mean(self) -> SavedMean | None:
        """Return the state of the running mean; call `flush` first."""
        return self._mean.save(self._last_step)

    def _moment(self, global_step: int, flops: float | None) -> _Moment:
        position = self._length.position(global_step)
        return _Moment(
            position=position,
            epoch=(position.epoch, self._pass_over_data),
            rates=self._rates(position, flops) if self._is_due(global_step) else None,
        )

    def _is_due(self, global_step: int) -> bool:
        # As in MindFormers, a count that went back begins anew.
        if 0 < global_step - self._last_printed < self._per_print_times:
            return False
        self._last_printed = global_step
        return True

    def _rates(self, position: RunPosition, flops: float | None) -> _Rates:
        seconds = self.clock.end_lap()
        return _Rates(
            seconds=seconds,
            seconds_left=position.steps_left * self.clock.typical_seconds,
            tflops=flops / seconds / 1e12 if flops and seconds else None,
        )

    def _receive(self, packed: PackedValues, moment: _Moment, host_values: Sequence[float]) -> None:
        self._keep(packed.unpack(host_values), moment, num_steps=1)

    def _keep(self, values: StepValues, moment: _Moment, *, num_steps: int) -> None:
        self._mean.add(values.loss, epoch=moment.epoch, num_steps=num_steps)
        if moment.rates is None or not self._is_main:
            return
        self._emit(
            StepRecord(
                position=moment.position,
                values=values,
                mean_loss=self._mean.value,
                seconds=moment.rates.seconds,
                seconds_left=moment.rates.seconds_left,
                global_batch_size=self._global_batch_size,
                num_processes=self._num_processes,
                tflops=moment.rates.tflops,
                peak_tflops=self._peak_tflops,
            )
        )


@torch.no_grad()
def over_ranks(steps: Sequence[PackedValues]) -> list[PackedValues]:
    """Put the mean over ranks in the place of this rank's losses, with one message for all steps.

    Every rank has to call it, for the same steps. A loss that is not finite though the step's
    gradients are is left out: that of a rank whose batch has no target.

    Args:
        steps: ``n`` of them, at least one, which all have a loss.

    Returns:
        As many, with tensors of their own. Does not wait for the device, unless the process group
        does, as gloo.
    """
    losses = torch.stack([_value(step, "loss") for step in steps])
    overflows = torch.stack([_value(step, "overflow") for step in steps])
    counts = losses.isfinite() | overflows.bool()
    message = torch.stack((torch.where(counts, losses, 0.0), counts.float()))
    add_over_ranks(message)
    total, number = message
    return [
        dataclasses.replace(step, tensor=_with_loss(step, mean))
        for step, mean in zip(steps, (total / number).unbind(), strict=True)
    ]


def _value(step: PackedValues, name: str) -> Tensor:
    if name in step.names:
        return step.tensor[step.names.index(name)]
    return step.tensor.new_zeros(())


def _with_loss(step: PackedValues, loss: Tensor) -> Tensor:
    values = list(step.tensor.unbind())
    values[step.names.index("loss")] = loss
    return torch.stack(values)
