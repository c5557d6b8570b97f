"""Follow a run for the loss monitor: collect the values of its steps, and make the records."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, final

import torch
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments

from mfwrap import DeferredReads, StepReport
from mfwrap.callbacks.loss_monitor.flops import device_peak_tflops
from mfwrap.callbacks.loss_monitor.record import StepRecord
from mfwrap.callbacks.loss_monitor.settings import LossMonitorSettings
from mfwrap.callbacks.shared.progress import Samples, StepClock, run_length
from mfwrap.callbacks.shared.step_values import PackedValues, StepValues, pack, values_of_logs
from mfwrap.collectives import add_over_ranks, gather_objects, num_ranks
from mfwrap.memory import device_memory


class SavedMean(TypedDict):
    """State of an `EpochMean`, ready for JSON."""

    global_step: int
    """Step after which the state was saved."""

    epoch: int
    total: float
    num_losses: int
    num_not_finite: int


class _Moment(NamedTuple):
    """What the host knows about a step as soon as the step ends."""

    epoch: tuple[int, int]
    """Number of the epoch, and number of passes over the data so far."""

    make_record: Callable[..., StepRecord] | None
    """Takes `values` and `mean_loss` of the record; ``None`` if the step is not printed."""


@final
class MonitoredRun:
    """Collect the values of each step of a run and make a record of each step that is printed.

    Values are copied to the host without synchronizing with the device. They are used at the end
    of the next step, or at `flush`.

    Args:
        settings: Settings of the monitor.
        emit: Called with each record.
        flops: Returns the FLOPs of an update of so many samples; ``None`` if they are unknown.
        args: Arguments of the Trainer; ``None`` in a loop without a Trainer.
        state: State of the loop.
        global_step: Steps finished before the first step of this run.
        train_dataloader: Data loader, for the length of an epoch; ``None`` if unknown.
        model: Network, for the peak rate of its device; ``None`` if unknown.
        saved_mean: Mean that an earlier run saved. It continues if it was saved at `global_step`;
            otherwise it is ignored.
        grown: See `mfwrap.callbacks.shared.progress.Samples`.

    Raises:
        ValueError: If the length of the run is unknown.
    """

    def __init__(
        self,
        settings: LossMonitorSettings,
        emit: Callable[[StepRecord], None],
        flops: Callable[[float], float | None],
        *,
        args: TrainingArguments | None,
        state: TrainerState,
        global_step: int,
        train_dataloader: Any = None,
        model: nn.Module | None = None,
        saved_mean: SavedMean | None = None,
        grown: Callable[[int], int] | None = None,
    ) -> None:
        self.clock = StepClock(settings.clock)
        self._emit, self._flops = emit, flops
        self._length = run_length(settings, state, args, train_dataloader, grows=grown is not None)
        self._per_print_times = settings.per_print_times
        self.samples = Samples(settings, state, args, grown, train_dataloader)
        """Samples of the updates."""
        self._num_processes = num_ranks()
        self._averages_loss = averages_loss(settings)
        self._is_main = state.is_world_process_zero
        self._peak_tflops = settings.peak_tflops
        if self._peak_tflops is None and settings.shows_flops:
            self._peak_tflops = device_peak_tflops(model)
        fits = saved_mean is not None and saved_mean["global_step"] == global_step
        self._mean = EpochMean(saved_mean if fits else None)
        self._reads = DeferredReads()
        self._unsent: list[tuple[PackedValues, _Moment]] = []
        self._shared_names: list[str] | None = None
        self._num_steps = 0
        self._pass_over_data = 0
        self._last_step = self._last_logged = global_step
        # A run that resumes between two lines goes on with the steps of an uninterrupted run.
        self._last_printed = global_step - global_step % self._per_print_times
        self.has_outputs = False
        """Whether any step of this run has had an output."""

    def begin_epoch(self) -> None:
        """Begin a new mean, except at the start of a run.

        At the start of a run, the saved mean continues, because the run may resume within an epoch.
        """
        if self._num_steps:
            self._pass_over_data += 1

    def end_step(
        self,
        global_step: int,
        output: Any,
        *,
        report: StepReport | None = None,
        sends: bool = False,
    ) -> None:
        """Print the previous step if it is due, and begin to copy the values of this step.

        Args:
            global_step: Finished steps, this one included.
            output: Output of the step; ``None`` if the loop passes none.
            report: Report of the step, with its named losses and the rates of named groups.
            sends: Average the losses over ranks now even if this step is not printed.
        """
        # Flush before reading the clock: the wait for the previous step's values is step time.
        self.flush()
        self.clock.end_step()
        self._num_steps += 1
        self._last_step = global_step
        if output is None:
            return
        self.has_outputs = True
        packed = pack(output, report=report)
        moment = self._moment(global_step, packed.tensor.device)
        self._unsent.append((packed, moment))
        if sends or moment.make_record is not None or not self._averages_loss:
            self.send()

    def send(self, *, alone: bool = False) -> None:
        """Average over ranks each loss since the last call, and start to copy the steps' values.

        Args:
            alone: Use this rank's own losses without communication, because the other ranks may
                have left the loop.
        """
        steps, self._unsent = self._unsent, []
        if not steps:
            return
        packed = [values for values, _ in steps]
        if self._averages_loss and not alone:
            if self._shared_names is None:
                # A network may return other named losses on another rank. All ranks must send
                # messages of the same shape, so agree on the names in the first message.
                names = dict.fromkeys(name for values in packed for name in values.loss_names)
                self._shared_names = gather_objects(list(names))[0]
            packed = _averaged_over_ranks(packed, self._shared_names)
        if not self._is_main:
            return
        for values, (_, moment) in zip(packed, steps, strict=True):
            receive = functools.partial(self._receive, values, moment)
            self._reads.submit(values.tensor, receive)

    def log(self, global_step: int, logs: Mapping[str, Any]) -> None:
        """Make a record from an entry of the Trainer's log, whose loss is a mean of several steps.

        Args:
            global_step: Finished steps.
            logs: Entry of the log; an entry without a ``loss`` is ignored.
        """
        values = values_of_logs(logs)
        if values is None:
            return
        num_steps = max(global_step - self._last_logged, 1)
        self._last_logged = global_step
        self._keep(values, self._moment(global_step), num_steps=num_steps)

    def flush(self) -> None:
        """Wait for the pending values of the last step, and print them."""
        self._reads.flush()

    def save_mean(self) -> SavedMean | None:
        """Return the state of the running mean. Call `flush` first."""
        return self._mean.save(self._last_step)

    def _moment(self, global_step: int, device: torch.device | None = None) -> _Moment:
        position = self._length.position(global_step)
        make_record = None
        num_steps = max(global_step - max(self._last_printed, self._length.first_step), 1)
        if self._is_due(global_step):
            size = self.samples.mean(global_step, num_steps)
            seconds, flops = self.clock.end_lap(), self._flops(size)
            memory = None if device is None else device_memory(device)
            earlier = self._length.first_step * self.samples.per_update
            make_record = functools.partial(
                StepRecord,
                position=position,
                seconds=seconds,
                seconds_left=position.steps_left * self.clock.typical_seconds,
                global_batch_size=size,
                num_samples=earlier + self.samples.until(global_step),
                num_processes=self._num_processes,
                tflops=flops / seconds / 1e12 if flops and seconds else None,
                peak_tflops=self._peak_tflops,
                max_memory=None if memory is None else memory.max_allocated,
            )
        return _Moment((position.epoch, self._pass_over_data), make_record)

    def _is_due(self, global_step: int) -> bool:
        # As in MindFormers, also print if the number of the step has not increased.
        if 0 < global_step - self._last_printed < self._per_print_times:
            return False
        self._last_printed = global_step
        return True

    def _receive(self, packed: PackedValues, moment: _Moment, host_values: Sequence[float]) -> None:
        self._keep(packed.unpack(host_values), moment)

    def _keep(self, values: StepValues, moment: _Moment, *, num_steps: int = 1) -> None:
        self._mean.add(values.loss, epoch=moment.epoch, num_steps=num_steps)
        if moment.make_record is not None and self._is_main:
            self._emit(moment.make_record(values=values, mean_loss=self._mean.value))


@final
class EpochMean:
    """Average the finite losses of an epoch, and count the non-finite losses of the run.

    Args:
        saved: State to continue from; ``None`` starts without any loss.
    """

    def __init__(self, saved: SavedMean | None = None) -> None:
        self._epoch = (saved["epoch"], 0) if saved else None
        self._total = saved["total"] if saved else 0.0
        self._num_losses = saved["num_losses"] if saved else 0
        self.num_not_finite = saved["num_not_finite"] if saved else 0
        """Number of non-finite losses of the run."""

    @property
    def value(self) -> float:
        """Mean of the epoch so far; nan if the epoch has no finite loss yet."""
        return self._total / self._num_losses if self._num_losses else math.nan

    def add(self, loss: float, *, epoch: tuple[int, int], num_steps: int = 1) -> None:
        """Add the loss of one step, or the mean loss of several steps.

        Args:
            loss: Loss, finite or not.
            epoch: Number of the epoch and number of passes over the data. If either has changed
                since the last call, a new mean begins.
            num_steps: Number of steps that `loss` is the mean of.
        """
        if epoch != self._epoch:
            self._epoch, self._total, self._num_losses = epoch, 0.0, 0
        if math.isfinite(loss):
            self._total += loss * num_steps
            self._num_losses += num_steps
        else:
            self.num_not_finite += num_steps

    def save(self, global_step: int) -> SavedMean | None:
        """Return the state; ``None`` before the first loss."""
        if self._epoch is None:
            return None
        return {
            "global_step": global_step,
            "epoch": self._epoch[0],
            "total": self._total,
            "num_losses": self._num_losses,
            "num_not_finite": self.num_not_finite,
        }


def averages_loss(settings: LossMonitorSettings) -> bool:
    """Return whether losses are averaged over several ranks."""
    return settings.loss_over_ranks and num_ranks() > 1


@torch.no_grad()
def _averaged_over_ranks(steps: Sequence[PackedValues], names: Sequence[str]) -> list[PackedValues]:
    """Replace this rank's losses by the means over all ranks, with one message for all steps.

    Every rank must call this for the same steps and names. A rank's loss is left out of the mean if
    it is non-finite although the step did not overflow. Such a loss means that the batch of that
    rank had no target. A named loss that a rank does not have is left out, too.

    Args:
        steps: Values of ``n`` steps, at least one, each with a loss.
        names: Named losses to average.

    Returns:
        Values of the ``n`` steps in new tensors. No host-device synchronization, except with a
        process group that synchronizes by itself, such as gloo.
    """
    all_names = ("loss", *names)
    message = torch.stack([_counted_losses(step, all_names) for step in steps])
    add_over_ranks(message)
    means = message[:, 0] / message[:, 1]
    return [
        dataclasses.replace(step, tensor=_with_losses(step, all_names, mean))
        for step, mean in zip(steps, means, strict=True)
    ]


def _counted_losses(step: PackedValues, names: Sequence[str]) -> Tensor:
    """Return the losses of a step, and 1 for each that counts; shape ``(2, len(names))``.

    Instead of a loss that does not count, or that this rank does not have, there are two zeros.
    """
    zero = step.tensor.new_zeros(())
    one = torch.ones_like(zero)
    overflow = step.tensor[step.names.index("overflow")] if "overflow" in step.names else zero
    indices = [step.index_of_loss(name) for name in names]
    losses = torch.stack([zero if index is None else step.tensor[index] for index in indices])
    is_present = torch.stack([zero if index is None else one for index in indices]).bool()
    counts = is_present & (losses.isfinite() | overflow.bool())
    return torch.stack((torch.where(counts, losses, 0.0), counts.float()))


def _with_losses(step: PackedValues, names: Sequence[str], losses: Tensor) -> Tensor:
    values = list(step.tensor.unbind())
    for name, loss in zip(names, losses.unbind(), strict=True):
        index = step.index_of_loss(name)
        if index is not None:
            values[index] = loss
    return torch.stack(values)
