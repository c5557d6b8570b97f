"""MindFormers' loss monitor: a record of each step in the log and in TensorBoard."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from mfwrap import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.callbacks.loss_monitor.flops import StepFlops
from mfwrap.callbacks.loss_monitor.record import StepRecord, record_lines
from mfwrap.callbacks.loss_monitor.run import MonitoredRun, SavedMean, averages_loss
from mfwrap.callbacks.loss_monitor.scalar_writer import ScalarWriter
from mfwrap.callbacks.loss_monitor.settings import LossMonitorSettings
from mfwrap.callbacks.shared.run_log import WarnOnce, run_logger
from mfwrap.callbacks.shared.settings import saved_settings, takes_settings
from mfwrap.trainer import MonitorCallback

_NO_OUTPUTS = (
    "MFLossMonitor gets no `step_output` in this loop. It prints only the numbers that the loop "
    "logs, without overflow, loss scale and the loss of each step."
)


@final
class MFLossMonitor(MonitorCallback, ExportableState):
    """Print a record of each step, as MindFormers does, without host-device synchronization.

    The arguments are the fields of `LossMonitorSettings`; the first field may be positional.

    ``on_step_end`` takes the output of the step as keyword ``step_output``, or its report as
    ``step_report``. The values of a step are copied in the background. They are printed at the end
    of the next step, or earlier if the loop logs, evaluates, saves, or ends an epoch or the
    training. A record is two lines of level INFO in the log ``mfwrap.callbacks``, printed by the
    main process (``state.is_world_process_zero``)::

        { Epoch:[  1/  2], step:[    2/    3], loss:[10.500/10.750], per_step_time: 76ms, ...
          33.3% |████████████████                                  | 52.10850 samples/s/p  0:00:00 }

    - ``loss``: loss of this step, and mean loss of the epoch so far. A non-finite loss is printed,
      left out of the mean, and counted in `num_losses_not_finite`. On several ranks both numbers
      are means over ranks, so all ranks must have the callback. The ranks exchange a message
      whenever a step is printed or the loop logs, saves, evaluates or ends. A message has two
      numbers for each loss of each step since the previous message.
    - Named losses that the network returns beside their sum (``lm_loss``, ``load_balancing_loss``,
      ``mtp_loss``, ...) follow as ``lm_loss: 2.300000, ``. They need the ``step_report``, and are
      means over ranks, too, of those that the main process has in its first record.
    - If the parameter groups have names (their entry ``name``) and there are several, a line for
      each name follows: ``default_lr: 1.000000e-03, equal to `lr:` above.`` for the first, here
      named ``default``, and ``group_0_lr: 2.000000e-04, group_0_params: *.bias`` for the others.
      The lines need the ``step_report``.
    - ``per_step_time``: mean over the steps since the last record. A step's time runs from
      ``on_step_begin`` to ``on_step_end``, so evaluation, checkpoints and logging are not included.
    - The time at the end of the second line: estimate of the time left, from an exponential mean of
      the step times. The first step of the run is left out of this mean.
    - Unknown values: ``lr`` is left out, ``overflow cond`` and ``loss_scale`` are ``unavailable``,
      ``global_norm`` is ``None``, and without a batch size the throughput is
      ``0.00000 samples/s/p``.
    - If the FLOPs of an update are known, the first line ends with
      ``, train_throughput_per_npu: 1.234T`` (TFLOP/s of this device). If the device's peak rate is
      known too, ``, mfu: 41.0%`` follows. Recomputed operations count as FLOPs.
    - On an accelerator the first line ends with ``, max_memory: 12.34 GiB``: torch's peak of the
      allocated memory, on the main process.

    While an `MFTrainer` shows its progress bar in a terminal, the records are not printed;
    ``console="lines"`` prints them instead of the bar.

    Some loops, such as a stock Trainer's, do not pass the output of a step. The numbers then come
    from ``on_log``, where the loss is the mean of the steps since the last log. A warning, logged
    once, names the values that are missing. In a loop of your own, set ``max_steps`` and
    ``global_step`` of the state.

    With a Trainer, the running mean is part of the checkpoint. `MFTrainer` restores it. A stock
    Trainer restores it if ``restore_callback_states_from_checkpoint`` is set; it then creates the
    callback again, with the default ``clock``.

    Source: MindFormers, ``MFLossMonitor``.

    Raises:
        ImportError: If ``tensorboard_dir`` is given and TensorBoard is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range or contradicts another one; at
            ``on_train_begin`` if the length of the run is unknown.
    """

    @takes_settings(LossMonitorSettings)
    def __init__(self, settings: LossMonitorSettings) -> None:
        self._settings = settings
        self.step_lines = "always" if settings.console == "lines" else "without a bar"
        self._writer = None
        if settings.tensorboard_dir is not None:
            self._writer = ScalarWriter(
                settings.tensorboard_dir,
                loss_scale=settings.log_loss_scale_to_tensorboard,
                timers=settings.log_timers_to_tensorboard,
            )
        self._counted_flops = StepFlops() if settings.count_flops else None
        self._counted_samples: float | None = None
        self._grown: Callable[[int], int] | None = None
        self._run: MonitoredRun | None = None
        self._logger = logging.getLogger(__package__)
        self._warn_once = WarnOnce(__package__)
        self.saved_mean: SavedMean | None = None
        """Mean that an earlier run saved; ignored by a run that begins at another step."""

    @property
    def num_losses_not_finite(self) -> int:
        """Number of non-finite losses of the run, among the losses read so far."""
        mean = self.saved_mean if self._run is None else self._run.save_mean()
        return 0 if mean is None else mean["num_not_finite"]

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Begin a run, and determine its length."""
        self._cancel_count()
        self._run = None
        if not state.is_world_process_zero:
            # Only the main process keeps the mean. Other ranks get it from a checkpoint, too.
            self.saved_mean = None
        if self._takes_part(state):
            self._run = self._begin(args, state, state.global_step, known)
            self._run.clock.restart()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begin a new mean of the losses."""
        if self._run is not None:
            self._run.begin_epoch()

    def on_step_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Start the clock; in the first update, start to count FLOPs."""
        if not self._takes_part(state):
            return
        if self._run is None:
            self._run = self._begin(args, state, state.global_step, known)
        if self._counted_flops is not None and state.is_world_process_zero:
            is_compiled = args is not None and bool(args.torch_compile)
            self._counted_flops.start(known.get("model"), compiled=is_compiled)
        self._run.clock.restart()

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        control: TrainerControl,
        *_: Any,
        step_output: StepOutput | LocalNormStepOutput | Tensor | None = None,
        step_report: StepReport | None = None,
        **known: Any,
    ) -> None:
        """Print the previous step if it is due, and begin to copy the values of this step.

        Raises:
            TypeError: If `step_output` is not the output of a step.
        """
        if not self._takes_part(state):
            return
        if self._counted_flops is not None:
            self._counted_flops.stop()
        if self._run is None:
            self._run = self._begin(args, state, state.global_step - 1, known)
        if self._counted_flops is not None and self._counted_samples is None:
            self._counted_samples = self._run.samples.mean(state.global_step)
        if step_output is None and step_report is not None:
            step_output = step_report.output
        self._run.end_step(
            state.global_step,
            step_output,
            report=step_report,
            sends=_needs_mean_now(control),
        )
        if state.is_world_process_zero and not self._run.has_outputs:
            self._warn_once(_NO_OUTPUTS)

    def on_log(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Print the last step if it is due; without step outputs, print the values in the log."""
        del args
        if self._run is not None:
            self._run.flush()
            if logs and not self._run.has_outputs:
                self._run.log(state.global_step, logs)
            self._run.clock.restart()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Print the last step if it is due, and leave this event out of the step time."""
        if self._run is not None:
            self._run.flush()
            self._run.clock.restart()

    on_save = on_evaluate

    def on_pre_save(self, *_: Any, **__: Any) -> None:
        """Include all steps in the mean, and print the last step if it is due."""
        if self._run is not None:
            self._run.send()
            self._run.flush()

    on_epoch_end = on_pre_save

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Print the last step if it is due, and close the events file."""
        self._cancel_count()
        if self._run is not None:
            # Use this rank's losses only. This event also occurs when the loop has failed on one
            # rank. The other ranks would then never answer a message, and this rank would hang.
            self._run.send(alone=True)
            self._run.flush()
            self.saved_mean = self._run.save_mean()
            self._run = None
        if self._writer is not None:
            self._writer.close()

    def state(self) -> dict[str, Any]:
        """Return the state that a Trainer writes into its checkpoint.

        Prints the last step if it is due.

        Returns:
            Settings under ``args`` and the running mean under ``attributes``, ready for JSON.
        """
        mean = self.saved_mean
        if self._run is not None:
            self._run.flush()
            mean = self._run.save_mean()
        return {"args": saved_settings(self._settings), "attributes": {"saved_mean": mean}}

    def take_samples(self, samples: Callable[[int], int] | None) -> None:
        """Receive the function that counts samples if the batch grows."""
        self._grown = samples

    def _flops(self, samples: float) -> float | None:
        """Return the FLOPs of an update of so many samples; ``None`` if unknown."""
        flops = self._settings.flops_per_step
        size: float | None = None if self._run is None else self._run.samples.per_update
        if self._counted_flops is not None:
            flops, size = self._counted_flops.value, self._counted_samples
        if flops is None or not size:
            return flops
        return flops * samples / size

    def _begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        global_step: int,
        known: Mapping[str, Any],
    ) -> MonitoredRun:
        if state.is_world_process_zero:
            self._logger = run_logger(__package__)
        return MonitoredRun(
            self._settings,
            self._print,
            self._flops,
            args=args,
            state=state,
            global_step=global_step,
            train_dataloader=known.get("train_dataloader"),
            model=known.get("model"),
            saved_mean=self.saved_mean,
            grown=self._grown,
        )

    def _takes_part(self, state: TrainerState) -> bool:
        return state.is_world_process_zero or averages_loss(self._settings)

    def _cancel_count(self) -> None:
        if self._counted_flops is not None:
            self._counted_flops.cancel()

    def _print(self, record: StepRecord) -> None:
        # Formatting takes longer than everything else here, so skip it if the level hides it.
        if self._logger.isEnabledFor(logging.INFO):
            for line in record_lines(record):
                self._logger.info("%s", line)
        if self._writer is not None:
            self._writer.write(record)


def _needs_mean_now(control: TrainerControl) -> bool:
    """Return whether the loop is about to report or save the mean of the losses."""
    return (
        control.should_log
        or control.should_save
        or control.should_evaluate
        or control.should_training_stop
    )
