"""What the training state monitor does at the events of a loop."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from mfwrap import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.arguments import (
    directory_name,
)
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.training_state.run import (
    TrainingStateRun,
    log_structure,
    missing_values,
    run_parts,
    samples_per_process,
)
from mfwrap.callbacks.training_state.settings import (
    TrainingStateSettings,
    checked_formats,
    checked_stable_rank,
    checked_target,
)
from mfwrap.tensors.wrappers import unwrapped_optimizer

__all__ = [
    "TrainingStateEvents",
    "TrainingStateMonitor",
]


_TIMINGS = ("_runtime", "_per_second", "_time", "epoch")


class TrainingStateEvents(TrainerCallback):
    """Follow a loop by its events; `TrainingStateMonitor` describes what comes of it.

    Args:
        settings: Of the monitor.
        clock: Returns seconds from an arbitrary start.
        log_to: Takes what is for trackers; ``None`` for none.
    """

    def __init__(
        self,
        settings: TrainingStateSettings,
        clock: Callable[[], float],
        log_to: Callable[[dict[str, float], int], None] | None,
    ) -> None:
        self._settings = settings
        self._log_to = log_to
        self._clock = clock
        self._run: TrainingStateRun | None = None
        self._scale_before: Tensor | None = None
        self._said: set[str] = set()
        self._num_scale_overflows = 0
        self.saved_run: dict[str, Any] | None = None
        """What to go on with, if the next run begins at its step."""

    @property
    def num_scale_overflows(self) -> int:
        """Overflows of the run by which a loss scale found its level, among those that arrived."""
        finder = None if self._run is None else self._run.parts.finder
        return self._num_scale_overflows if finder is None else finder.num_scale_overflows

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Work out the length of the run, look at the weights."""
        self._close()
        self._begin(args, state, state.global_step, known)

    def on_step_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Start the clock; note the loss scale."""
        run = self._run or self._begin(args, state, state.global_step, known)
        attached = getattr(known.get("optimizer"), "attachment", None)
        self._scale_before = getattr(attached, "loss_scale", None)
        run.begin_step(state.global_step + 1)
        run.clock.restart()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Act on the step before, while the weights are still those it left."""
        self._flush()

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        control: TrainerControl,
        step_output: StepOutput | LocalNormStepOutput | Tensor | None = None,
        step_report: StepReport | None = None,
        **known: Any,
    ) -> None:
        """Begin to copy the values of this step.

        Raises:
            TypeError: If `step_output` is no output of a step.
        """
        if self._run is None:
            self._begin(args, state, state.global_step - 1, known)
        run = self._run
        if run is None:
            return
        if step_output is None and step_report is not None:
            step_output = step_report.output
        scale_before, self._scale_before = self._scale_before, None
        optimizer = unwrapped_optimizer(known.get("optimizer"))
        run.end_step(
            state.global_step,
            step_output,
            step_report,
            scale_before=scale_before,
            model=known.get("model"),
            optimizer=optimizer if isinstance(optimizer, Optimizer) else None,
        )
        for text in missing_values(self._settings, step_output, known):
            self._say_once(text)
        if self._settings.print_struct:
            log_structure(known.get("model"))
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        logs: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Act on what is pending, or in a loop without outputs on what is logged."""
        del args
        self._flush()
        if self._run is not None:
            if logs and not self._run.has_outputs:
                self._run.log(state.global_step, logs)
            tracked = self._run.parts.writers.tracked
            if logs and "loss" in logs and not tracked.keys() <= logs.keys():
                self._say_once("to trackers, without MFTrainer or `log_to`: anything")
            self._run.clock.restart()

    def values_to_log(self) -> dict[str, float]:
        """Return what is for trackers of the last step that is shown, by its tags.

        `MFTrainer` adds it to what it logs. Waits for the device, as logging does.
        """
        self._flush()
        return {} if self._run is None else dict(self._run.parts.writers.tracked)

    def on_evaluate(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        metrics: Mapping[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Act on what is pending; look at the weights; write what was found."""
        del args
        self._pause()
        if self._run is not None and state.is_world_process_zero:
            found = {
                name: float(value)
                for name, value in ({} if metrics is None else metrics).items()
                if isinstance(value, (int, float)) and not name.endswith(_TIMINGS)
            }
            self._run.parts.writers.write_evaluation(state.global_step, found)

    def on_save(self, *_: Any, **__: Any) -> None:
        """Act on what is pending; look at the weights."""
        self._pause()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Act on what is pending; look at the weights."""
        self._pause()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Act on what is pending and close files."""
        self._flush()
        self._close()

    def _begin(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        global_step: int,
        known: Mapping[str, Any],
    ) -> TrainingStateRun:
        samples = samples_per_process(self._settings, args, state)
        if self._settings.throughput_baseline is not None and not samples:
            self._say_once("without `global_batch_size`: throughput_linearity")
        parts, clock = run_parts(self._settings, args, state, known, self._clock, self._log_to)
        run = TrainingStateRun(
            self._settings,
            parts,
            clock=clock,
            global_step=global_step,
            samples_per_process=samples,
            is_main=state.is_world_process_zero,
        )
        if self.saved_run is not None:
            run.load_state_dict(self.saved_run)
        clock.restart()
        self._run = run
        return run

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            run_logger(__package__).warning("TrainingStateMonitor cannot show %s", text)

    def _pause(self) -> None:
        self._flush()
        if self._run is not None:
            finder = self._run.parts.finder
            if finder is not None and finder.weights is not None:
                finder.weights.look()
            self._run.clock.restart()

    def _flush(self) -> None:
        if self._run is not None:
            self._run.flush()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self.saved_run = run.state_dict()
            if run.parts.finder is not None:
                self._num_scale_overflows = run.parts.finder.num_scale_overflows
            run.close()


@final
class TrainingStateMonitor(TrainingStateEvents, ExportableState):
    """Show the state of a training, and say who is to blame when a step goes wrong.

    ``on_step_end`` takes the output of the step as keyword ``step_output`` and its report as
    ``step_report``. Nothing of it waits for the device: values are copied while it goes on and used
    just before the next update (``on_pre_optimizer_step``, or the end of the next step where a
    loop does not send that), or earlier where the loop logs, evaluates, saves or ends.

    Each metric has a format: ``"log"`` (level INFO in the log ``mfwrap.callbacks``, on the main
    process), ``"tensorboard"``, ``"jsonl"`` (``training_state.jsonl`` in the run folder, each
    record with loss, norm, rate and scale of the step; both on every rank, those but 0 in files of
    their own), ``"trackers"`` (the trackers of `MFTrainer`'s ``report_to``, when it logs, or
    `log_to`), a list of these, or ``None``.

    - `local_norm_format`: ``local_norm/<parameter>``, L2 norms of this rank's unscaled gradients;
      ``local_norm/<group>`` with groups. `device_local_norm_format`: ``device_local_norm``, of all.
    - `local_loss_format`: ``local_loss``, `device_local_loss_format`: ``device_accum_local_loss``:
      of this rank, over all of its micro-batches.
    - `optimizer_state_format`: ``adam_m_norm/<parameter>`` and ``adam_v_norm/<parameter>``.
    - `weight_state_format`: ``weight_norm``, of all trainable weights. These two read state and
      weights once in each step they are shown for.
    - `max_attention_logit_format`: ``max_attention_logit/<module>/head_<i>``, ``/mean``, ``/max``,
      over all micro-batches, as `AttentionLogits` sees it; computes the logits once more.
    - `expert_load_format`: of mixture-of-experts networks ``expert_load/<module>/expert_<i>``, the
      share of the tokens; ``expert_imbalance/<module>``, the largest share over the mean one; with
      `expert_capacity_factor` ``drop_rate/<module>``, what such a capacity would drop.
    - `stable_rank_config`: ``weight_stable_rank/<parameter>`` and ``weight_eigenvalue/<parameter>``
      (``/expert_<i>``, ``/expert_max``, ``/expert_min``, ``/expert_mean`` of experts).
    - `throughput_baseline`: ``throughput_linearity``, samples a second and process over it.

    With `find_culprit` a step that overflows, spikes or has a loss that is not finite is written to
    ``anomalies.jsonl`` in the run folder, with layer, rank and norms (`Anomaly` has the fields),
    and to the log in one line. Overflows by which a dynamic loss scale finds its level are counted
    in `num_scale_overflows` and written nowhere. For a layer to be named, the step must have local
    norms (``StepConfig(local_norm=True)``); what goes wrong in the forward spoils all gradients,
    and only `replay` tells where it began.

    In a loop that passes no output, such as a stock Trainer, it shows optimizer state, weights and
    throughput, and judges what the loop logs; a warning says once what is missing.

    With a Trainer, usual norms and counts are part of the checkpoint.

    Source: MindFormers, ``TrainingStateMonitor`` and ``monitor_config``; `find_culprit`, `replay`,
    `spike_factor`, `folder`, `log_to`, `expert_load_format` and the formats ``"jsonl"`` and
    ``"trackers"`` are ours.

    Args:
        target: Regular expressions, searched for in names of parameters: which to show in
            ``local_norm/`` and ``adam_*_norm/``. ``None`` for all.
        invert: Show those that match none.
        step_interval: Steps from one record to the next.
        local_norm_format: As above.
        device_local_norm_format: As above.
        local_loss_format: As above.
        device_local_loss_format: As above.
        optimizer_state_format: As above.
        weight_state_format: As above.
        max_attention_logit_format: As above.
        expert_load_format: As above.
        expert_capacity_factor: Capacity of an expert over its mean share; ``None`` for none.
        stable_rank_config: Keys ``format``, ``step_interval`` (100), ``target``,
            ``do_aggregation`` (False; True: of the whole of a sharded weight), ``moe_show_mode``
            (``"full"``, ``"statistics"``, ``"all"``), ``power_iteration_num`` (5).
        throughput_baseline: Samples a second and process that count as 1; ``None`` for none.
        print_struct: Log the names of all trainable parameters and end after the first step.
        check_for_nan_in_loss_and_grad: Raise ``ValueError`` when the loss, or gradients for another
            reason than the loss scale, are not finite. The update was skipped.
        check_for_global_norm: Raise ``RuntimeError`` at a global norm from
            `global_norm_spike_threshold` on, unless it comes back at the same step of a resumed
            run.
        use_skip_data_by_global_norm: Raise ``ValueError`` after
            `global_norm_spike_count_threshold` such steps in a row, which
            ``StepConfig(use_skip_data_by_global_norm=True)`` skips.
        global_norm_spike_threshold: Smallest norm that is a spike to these two.
        global_norm_spike_count_threshold: How many in a row are too many.
        find_culprit: Write ``anomalies.jsonl``.
        replay: Do a step with something that is not finite again, on its own inputs and random
            numbers, to name the first module whose output or gradient it is; unless all gradients
            are finite, whose update was applied. Keeps the inputs of two steps, no copies.
        spike_factor: How many times the usual global norm is an anomaly.
        folder: Of the run; ``None`` for ``args.output_dir``.
        tensorboard_dir: Where curves go; ranks but 0 write to ``rank_<n>`` in it.
        log_to: Takes numbers by their tags, and the step, on the main process: what is for
            trackers in a loop of your own, as `accelerate.Accelerator.log` does.
        origin_epochs: As in `MFLossMonitor`.
        dataset_size: As in `MFLossMonitor`.
        initial_epoch: As in `MFLossMonitor`.
        initial_step: As in `MFLossMonitor`.
        global_batch_size: As in `MFLossMonitor`.
        clock: Returns seconds from an arbitrary start.

    Raises:
        ImportError: If `tensorboard_dir` is given and TensorBoard is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or two do not go together; at ``on_train_begin``
            if the length of the run or, for ``"jsonl"``, its folder is unknown.
    """

    def __init__(
        self,
        *,
        target: Sequence[str] | None = None,
        invert: bool = False,
        step_interval: int = 1,
        local_norm_format: str | Sequence[str] | None = None,
        device_local_norm_format: str | Sequence[str] | None = None,
        local_loss_format: str | Sequence[str] | None = None,
        device_local_loss_format: str | Sequence[str] | None = None,
        optimizer_state_format: str | Sequence[str] | None = None,
        weight_state_format: str | Sequence[str] | None = None,
        max_attention_logit_format: str | Sequence[str] | None = None,
        expert_load_format: str | Sequence[str] | None = None,
        expert_capacity_factor: float | None = None,
        stable_rank_config: Mapping[str, Any] | None = None,
        throughput_baseline: float | None = None,
        print_struct: bool = False,
        check_for_nan_in_loss_and_grad: bool = False,
        check_for_global_norm: bool = False,
        use_skip_data_by_global_norm: bool = False,
        global_norm_spike_threshold: float = 3.0,
        global_norm_spike_count_threshold: int = 10,
        find_culprit: bool = True,
        replay: bool = False,
        spike_factor: float = 10.0,
        folder: str | Path | None = None,
        tensorboard_dir: str | Path | None = None,
        origin_epochs: int | None = None,
        dataset_size: int | None = None,
        initial_epoch: int = 0,
        initial_step: int = 0,
        global_batch_size: int = 0,
        log_to: Callable[[dict[str, float], int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        settings = TrainingStateSettings(
            target=checked_target(target),
            invert=invert,
            step_interval=step_interval,
            **checked_formats(
                local_norm_format=local_norm_format,
                device_local_norm_format=device_local_norm_format,
                local_loss_format=local_loss_format,
                device_local_loss_format=device_local_loss_format,
                optimizer_state_format=optimizer_state_format,
                weight_state_format=weight_state_format,
                max_attention_logit_format=max_attention_logit_format,
                expert_load_format=expert_load_format,
            ),
            expert_capacity_factor=expert_capacity_factor,
            stable_rank_config=checked_stable_rank(stable_rank_config),
            throughput_baseline=throughput_baseline,
            print_struct=print_struct,
            check_for_nan_in_loss_and_grad=check_for_nan_in_loss_and_grad,
            check_for_global_norm=check_for_global_norm,
            use_skip_data_by_global_norm=use_skip_data_by_global_norm,
            global_norm_spike_threshold=global_norm_spike_threshold,
            global_norm_spike_count_threshold=global_norm_spike_count_threshold,
            find_culprit=find_culprit,
            replay=replay,
            spike_factor=spike_factor,
            folder=directory_name("folder", folder),
            tensorboard_dir=directory_name("tensorboard_dir", tensorboard_dir),
            origin_epochs=origin_epochs,
            dataset_size=dataset_size,
            initial_epoch=initial_epoch,
            initial_step=initial_step,
            global_batch_size=global_batch_size,
        )
        super().__init__(settings, clock, log_to)

    def state(self) -> dict[str, Any]:
        """Return what a Trainer writes into its checkpoint, after acting on what is pending.

        Returns:
            Settings as ``args``, usual norms and counts as ``attributes``; JSON.
        """
        self._flush()
        saved = self.saved_run if self._run is None else self._run.state_dict()
        return {"args": asdict(self._settings), "attributes": {"saved_run": saved}}
