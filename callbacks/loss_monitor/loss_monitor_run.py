"""What the loss monitor puts together when a run begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap.callbacks.loss_monitor.epoch_mean import SavedMean
from mfwrap.callbacks.loss_monitor.flops import device_peak_tflops
from mfwrap.callbacks.loss_monitor.record import StepRecord
from mfwrap.callbacks.loss_monitor.run import MonitoredRun
from mfwrap.callbacks.loss_monitor.scalar_writer import ScalarWriter
from mfwrap.callbacks.loss_monitor.settings import LossMonitorSettings
from mfwrap.callbacks.shared.run_size import global_batch_size, num_processes, run_length
from mfwrap.callbacks.shared.step_clock import StepClock

__all__ = ["averages_loss", "begin_run", "is_read_next", "writer_of"]


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
        num_processes=num_processes(),
        averages_loss=averages_loss(settings),
        is_main=state.is_world_process_zero,
        peak_tflops=peak,
        saved_mean=saved_mean,
    )


def averages_loss(settings: LossMonitorSettings) -> bool:
    """Tell whether ranks send each other their losses."""
    return settings.loss_over_ranks and num_processes() > 1


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
