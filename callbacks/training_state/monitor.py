"""What the training state monitor does at the events of a loop."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mfwrap import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.training_state.run import TrainingStateRun
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.callbacks.training_state.training_state_parts import (
    log_structure,
    missing_values,
    run_parts,
    samples_per_process,
)
from mfwrap.tensors.wrappers import inner_optimizer

__all__ = ["TrainingStateEvents"]

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
        run.end_step(
            state.global_step,
            step_output,
            step_report,
            scale_before=scale_before,
            model=known.get("model"),
            optimizer=inner_optimizer(known.get("optimizer")),
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
