"""MindFormers' loss monitor: a record of each step in the log and in TensorBoard."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from mfwrap import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.arguments import (
    directory_name,
)
from mfwrap.callbacks.loss_monitor.flops import StepFlops, device_peak_tflops
from mfwrap.callbacks.loss_monitor.record import StepRecord, record_lines
from mfwrap.callbacks.loss_monitor.run import MonitoredRun, SavedMean
from mfwrap.callbacks.loss_monitor.scalar_writer import ScalarWriter
from mfwrap.callbacks.loss_monitor.settings import (
    LossMonitorSettings,
)
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.run_size import global_batch_size, run_length
from mfwrap.callbacks.shared.step_clock import StepClock
from mfwrap.collectives import num_ranks

__all__ = [
    "MFLossMonitor",
]


@final
class MFLossMonitor(TrainerCallback, ExportableState):
    """Print a record of each step, as MindFormers does, without waiting for the device.

    ``on_step_end`` takes the output of the step as keyword ``step_output``, or its report as
    ``step_report``. The values of a step are copied while the device goes on and printed at the
    end of the next step, or earlier where the loop logs, evaluates, saves, or ends an epoch or
    the training. A record is two lines of level INFO in the log ``mfwrap.callbacks``, on the
    main process, that of ``state.is_world_process_zero``::

        { Epoch:[  1/  2], step:[    2/    3], loss:[10.500/10.750], per_step_time: 76ms, ...
          33.3% |████████████████                                  | 52.10850 samples/s/p  0:00:00 }

    - ``loss``: of this step, and the mean over the steps of its epoch. A loss that is not finite is
      shown, left out of the mean, and counted in `num_losses_not_finite`. Of several ranks it is
      the mean: one message of two numbers a step since the last one, at the steps that are printed
      or at which the loop logs, saves, evaluates or ends. All ranks have to have the callback.
    - ``per_step_time``: mean over the steps since the last record, each from ``on_step_begin``
      to ``on_step_end``; evaluation, checkpoints and logging do not count. The time left, at the
      end, comes from an exponential mean that leaves out the first step of the run.
    - ``lr`` is left out if unknown, ``overflow cond`` and ``loss_scale`` are ``unavailable``,
      ``global_norm`` is ``None``; without a batch size there are ``0.00000 samples/s/p``.
    - With FLOPs known, ``, train_throughput_per_npu: 1.234T`` (TFLOP/s of this device) stands
      after the norm, and ``, mfu: 41.0%`` if the peak rate is known. Recomputed activations
      count as work.

    In a loop that passes no output, such as a stock Trainer, the numbers are those of
    ``on_log``, where the loss is the mean of the steps since the last log; a warning says once
    what is missing. A loop of your own sets ``max_steps`` and ``global_step`` of its state.

    With a Trainer the running mean is part of the checkpoint. `MFTrainer` restores it; a stock
    Trainer does if ``restore_callback_states_from_checkpoint`` is set, with the default `clock`.

    Source: MindFormers, ``MFLossMonitor``; settings from `loss_over_ranks` on are ours.

    Args:
        per_print_times: Steps from one record to the next.
        origin_epochs: Number of epochs; ``None`` for the loop's.
        dataset_size: Updates of one epoch; ``None`` for the loop's.
        initial_epoch: Epochs done before ``state.global_step`` was 0.
        initial_step: Updates done before that, beside `initial_epoch`.
        global_batch_size: Samples of one update on all processes; 0 for
            ``state.train_batch_size`` times ``args.gradient_accumulation_steps`` (1 without
            `args`) times the number of processes.
        loss_over_ranks: Average losses over ranks; otherwise they are the main process's own, and
            nothing is sent.
        flops_per_step: FLOPs of one update on this device.
        count_flops: Count them over the first update, between ``on_step_begin`` and
            ``on_step_end``, which makes that update slow. A compiled network cannot be counted.
            `mfwrap.callbacks.loss_monitor.flops.StepFlops` says which operations count.
        peak_tflops: Dense half-precision TFLOP/s of this device; ``None`` for its maker's.
        tensorboard_dir: Where to write MindFormers' curves; ``None`` writes none.
        log_loss_scale_to_tensorboard: Write the loss scale too.
        log_timers_to_tensorboard: Write times and throughput too.
        clock: Returns seconds from an arbitrary start.

    Raises:
        ImportError: If `tensorboard_dir` is given and TensorBoard is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or two do not go together; at
            ``on_train_begin`` if the length of the run is unknown.
    """

    def __init__(
        self,
        per_print_times: int = 1,
        *,
        origin_epochs: int | None = None,
        dataset_size: int | None = None,
        initial_epoch: int = 0,
        initial_step: int = 0,
        global_batch_size: int = 0,
        loss_over_ranks: bool = True,
        flops_per_step: float | None = None,
        count_flops: bool = False,
        peak_tflops: float | None = None,
        tensorboard_dir: str | Path | None = None,
        log_loss_scale_to_tensorboard: bool = False,
        log_timers_to_tensorboard: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings = LossMonitorSettings(
            per_print_times=per_print_times,
            origin_epochs=origin_epochs,
            dataset_size=dataset_size,
            initial_epoch=initial_epoch,
            initial_step=initial_step,
            global_batch_size=global_batch_size,
            loss_over_ranks=loss_over_ranks,
            flops_per_step=flops_per_step,
            count_flops=count_flops,
            peak_tflops=peak_tflops,
            tensorboard_dir=directory_name("tensorboard_dir", tensorboard_dir),
            log_loss_scale_to_tensorboard=log_loss_scale_to_tensorboard,
            log_timers_to_tensorboard=log_timers_to_tensorboard,
        )
        self._clock = clock
        self._writer = writer_of(self._settings)
        self._flops = StepFlops(flops_per_step, count=count_flops)
        self._run: MonitoredRun | None = None
        self._said_what_is_missing = False
        self._num_losses_not_finite = 0
        self.saved_mean: SavedMean | None = None
        """Running mean to go on with, if the next run begins at its step."""

    @property
    def num_losses_not_finite(self) -> int:
        """Losses of the run that were not finite, among those that have arrived."""
        if self._run is None:
            return self._num_losses_not_finite
        return self._run.num_losses_not_finite

    def on_train_begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        train_dataloader: Any = None,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Work out the length of the run."""
        self._flops.cancel()
        self._run = None
        if self._takes_part(state):
            self._run = self._begin(args, state, state.global_step, train_dataloader, model)
            self._run.clock.restart()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begin a new mean."""
        if self._run is not None:
            self._run.begin_epoch()

    def on_step_begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        train_dataloader: Any = None,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Start the clock, and the count of the first update."""
        if not self._takes_part(state):
            return
        if self._run is None:
            self._run = self._begin(args, state, state.global_step, train_dataloader, model)
        if state.is_world_process_zero:
            self._flops.start(model, compiled=args is not None and bool(args.torch_compile))
        self._run.clock.restart()

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        control: TrainerControl,
        *_: Any,
        step_output: StepOutput | LocalNormStepOutput | Tensor | None = None,
        step_report: StepReport | None = None,
        train_dataloader: Any = None,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Print the step before; begin to copy the values of this one.

        Raises:
            TypeError: If `step_output` is no output of a step.
        """
        if not self._takes_part(state):
            return
        self._flops.stop()
        if self._run is None:
            before = state.global_step - 1
            self._run = self._begin(args, state, before, train_dataloader, model)
        if step_output is None and step_report is not None:
            step_output = step_report.output
        self._run.end_step(
            state.global_step, step_output, self._flops.value, sends=is_read_next(control)
        )
        if state.is_world_process_zero and not self._run.has_outputs:
            self._say_what_is_missing()

    def on_log(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Print what is pending, or in a loop without outputs what is logged."""
        del args
        self._flush()
        if self._run is not None:
            if logs and not self._run.has_outputs:
                self._run.log(state.global_step, logs, self._flops.value)
            self._run.clock.restart()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Print what is pending."""
        self._pause()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Print what is pending."""
        self._pause()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Print what is pending."""
        if self._run is not None:
            self._run.send()
        self._flush()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Print what is pending and close the events file."""
        self._flops.cancel()
        if self._run is not None:
            # A loop that was broken off says so too, on the rank where it was.
            self._run.send(alone=True)
        self._flush()
        if self._run is not None:
            self.saved_mean = self._run.save_mean()
            self._num_losses_not_finite = self._run.num_losses_not_finite
            self._run = None
        if self._writer is not None:
            self._writer.close()

    def state(self) -> dict[str, Any]:
        """Return what a Trainer writes into its checkpoint, after printing what is pending.

        Returns:
            Settings as ``args``, the running mean as ``attributes``; JSON.
        """
        self._flush()
        mean = self.saved_mean if self._run is None else self._run.save_mean()
        return {"args": asdict(self._settings), "attributes": {"saved_mean": mean}}

    def _begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        global_step: int,
        train_dataloader: Any,
        model: nn.Module | None,
    ) -> MonitoredRun:
        return begin_run(
            self._settings,
            self._print,
            clock=StepClock(self._clock),
            args=args,
            state=state,
            global_step=global_step,
            train_dataloader=train_dataloader,
            model=model,
            saved_mean=self.saved_mean,
        )

    def _takes_part(self, state: TrainerState) -> bool:
        return state.is_world_process_zero or averages_loss(self._settings)

    def _pause(self) -> None:
        self._flush()
        if self._run is not None:
            self._run.clock.restart()

    def _flush(self) -> None:
        if self._run is not None:
            self._run.flush()

    def _print(self, record: StepRecord) -> None:
        logger = run_logger(__package__)
        for line in record_lines(record):
            logger.info("%s", line)
        if self._writer is not None:
            self._writer.write(record)

    def _say_what_is_missing(self) -> None:
        if not self._said_what_is_missing:
            self._said_what_is_missing = True
            run_logger(__package__).warning(
                "MFLossMonitor gets no `step_output` in this loop. It cannot show overflow, loss "
                "scale and the loss of each step, and prints the numbers that the loop logs."
            )


def begin_run(
    settings: LossMonitorSettings,
    emit: Callable[[StepRecord], None],
    *,
    clock: StepClock,
    args: TrainingArguments | None,
    state: TrainerState,
    global_step: int,
    train_dataloader: Any,
    model: nn.Module | None,
    saved_mean: SavedMean | None,
) -> MonitoredRun:
    """Return a run that begins.

    Args:
        settings: Of the monitor.
        emit: Takes each record.
        clock: Of the steps.
        args: Of the Trainer; ``None`` in another loop.
        state: Of the loop.
        global_step: Steps done before the first one.
        train_dataloader: For the length of an epoch; ``None`` if unknown.
        model: For the device; ``None`` if unknown.
        saved_mean: Of the epoch that is gone on with.

    Raises:
        ValueError: If the length of the run is unknown.
    """
    peak = settings.peak_tflops
    if peak is None and settings.shows_flops:
        peak = device_peak_tflops(model)
    return MonitoredRun(
        run_length(
            state,
            args,
            train_dataloader,
            origin_epochs=settings.origin_epochs,
            dataset_size=settings.dataset_size,
            initial_epoch=settings.initial_epoch,
            initial_step=settings.initial_step,
        ),
        emit,
        clock=clock,
        global_step=global_step,
        per_print_times=settings.per_print_times,
        global_batch_size=settings.global_batch_size or global_batch_size(args, state),
        num_processes=num_ranks(),
        averages_loss=averages_loss(settings),
        is_main=state.is_world_process_zero,
        peak_tflops=peak,
        saved_mean=saved_mean,
    )


def averages_loss(settings: LossMonitorSettings) -> bool:
    """Tell whether ranks send each other their losses."""
    return settings.loss_over_ranks and num_ranks() > 1


def is_read_next(control: TrainerControl) -> bool:
    """Tell whether the loop is about to do what shows or keeps the mean of the losses."""
    return (
        control.should_log
        or control.should_save
        or control.should_evaluate
        or control.should_training_stop
    )


def writer_of(settings: LossMonitorSettings) -> ScalarWriter | None:
    """Return what writes MindFormers' curves; ``None`` if nothing does.

    Raises:
        ImportError: If curves are asked for and TensorBoard is not installed.
    """
    if settings.tensorboard_dir is None:
        return None
    return ScalarWriter(
        Path(settings.tensorboard_dir),
        loss_scale=settings.log_loss_scale_to_tensorboard,
        timers=settings.log_timers_to_tensorboard,
    )
