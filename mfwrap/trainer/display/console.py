"""Show a training in a terminal as one progress bar, with lines above it for what goes wrong."""

import collections
import contextlib
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from transformers import PrinterCallback, ProgressCallback, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from mfwrap.outputs import StepReport
from mfwrap.records.evaluations import prefix_of, results_of
from mfwrap.records.rewards import REWARD, REWARD_MEAN
from mfwrap.termination import RankTermination
from mfwrap.trainer.display.step_numbers import ShownStep
from mfwrap.trainer.events import MonitorCallback, monitors

_MOST_OF_FAMILY = 12
"""Largest number of values of one family, such as ``local_norm/<parameter>``, that are printed."""


def _fitted(line: str, width: int) -> str:
    """Cut the middle of a line that is too long, and keep its end: whether the update was skipped.

    Where to read more is left out first; the lines at the end of the training name the folder.
    """
    if len(line) > width:
        line = line.rpartition("; see ")[0] or line
    if len(line) <= width:
        return line
    _, mark, outcome = line.rpartition("; ")
    # Quoted is what a model has said, whose middle must not be left out.
    is_kept = mark and "'" not in outcome and len(outcome) < width // 2
    end = f"...{mark}{outcome}" if is_kept else "..."
    return line[: max(0, width - len(end))] + end


@final
class StepProgressCallback(ProgressCallback):
    """Show one progress bar with the numbers of the last step whose values have arrived.

    In a terminal the bar shows the step's number, loss, norm, learning rate and, where they apply,
    the loss scale and the number of skipped updates; the last number is the peak of the memory
    (`mfwrap.memory.peak_memory`). A skipped update and a warning of a callback are one line above
    the bar, cut to the terminal's width. The Trainer's dict, and the lines of a callback that
    prints each step, are not printed.

    Where standard error is not a terminal, or a callback's `MonitorCallback.step_lines` is
    ``"always"``, there is no bar if a callback prints each step. Without such a callback, this is
    transformers' ``ProgressCallback``.

    The values of a step are copied in the background, and shown when the next step ends. The rate
    of a resumed training is that of its own steps.

    Args:
        handler: Callback handler of the trainer.
        termination: Says at the end whether a signal has stopped the training. If so, another line
            says how to continue.
    """

    def __init__(self, handler: CallbackHandler, termination: RankTermination) -> None:
        super().__init__()
        self._handler = handler
        self._termination = termination
        self._numbers: ShownStep | None = None
        self._is_hidden = False
        self._hides_other_bars = False
        self.says_end = True
        """Whether to print three lines at the end: the result, the folder, and what to run next."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **known: Any) -> None:
        """Decide what is shown, and show the bar."""
        lines = {callback.step_lines for callback in monitors(self._handler.callbacks)}
        is_terminal = sys.stderr.isatty()
        self._is_hidden = "always" in lines or (not is_terminal and "without a bar" in lines)
        if self._is_hidden:
            return
        super().on_train_begin(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)
        if self.training_bar is not None:
            # The steps before the checkpoint of a resumed training took no time in this one.
            self.training_bar.initial = self.training_bar.n = state.global_step
            self.current_step = state.global_step
        if is_terminal and self.training_bar is not None:
            self._numbers = ShownStep(self._show, self._write)
            # The bars of transformers, such as "Writing model shards", would tear this one apart.
            self._hides_other_bars = is_progress_bar_enabled()
            disable_progress_bar()

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        step_report: StepReport | None = None,
        **known: Any,
    ) -> None:
        """Show the previous step, and start to copy the values of this one."""
        if self._is_hidden:
            return
        if self._numbers is not None and step_report is not None:
            self._numbers.copy(state.global_step, step_report)
        super().on_step_end(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)

    def on_prediction_step(self, *args: Any, **known: Any) -> None:
        """Count a step of an evaluation."""
        if not self._is_hidden:
            super().on_prediction_step(*args, **known)  # type: ignore[no-untyped-call]  # (transformers)
            if self.prediction_bar is not None:
                # Remove it also if it is not within a training; transformers would leave it.
                self.prediction_bar.leave = False

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **known: Any,
    ) -> None:
        """Show the last step; print what a subclass logs, and results unless a callback does."""
        logs = logs or {}
        if self._numbers is None and not self._is_hidden:
            super().on_log(args, state, control, logs=_readable(logs), **known)  # type: ignore[no-untyped-call]  # (transformers)
            return
        if self._numbers is not None:
            self._numbers.flush()
        callbacks = monitors(self._handler.callbacks)
        own = _of_subclass(logs, callbacks)
        if not own and any(one.evaluation_lines for one in callbacks):
            return
        said = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in (own or results_of(logs, prefix_of(state))).items()
        ]
        if said and state.is_world_process_zero:
            line = f"step {state.global_step}: {', '.join(said)}"
            if self._numbers is None:
                print(line, flush=True)
            else:
                self._numbers.say(line)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **known: Any) -> None:
        """Show the last step, close the bar, and say where the result is."""
        is_terminal = self._numbers is not None
        if self._numbers is not None:
            self._numbers.flush()
        self._release_numbers()
        if not self._is_hidden:
            super().on_train_end(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)
        if is_terminal and self.says_end and not self._termination.is_stopping:
            self._say_end(args, state)

    def _say_end(self, args: Any, state: TrainerState) -> None:
        steps = f"{state.global_step} steps"
        if state.global_step < state.max_steps:
            steps = f"{state.global_step} of {state.max_steps} steps, ended by a callback"
        entries = (one["loss"] for one in reversed(state.log_history) if "loss" in one)
        loss = next(entries, None)
        result = steps if loss is None else f"{steps}, loss {loss:.4g}"
        if state.best_metric is not None:
            name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            result = f"{result}, best {name} {state.best_metric:.4g}"
        folder = Path(args.output_dir)
        has_records = any(folder.glob("*.jsonl")) or any(folder.glob("checkpoint-*"))
        page = shlex.join(["mfwrap", "report", str(folder)])
        following = page if has_records else "trainer.save_model() writes the weights"
        print(f"result: {result}\nrun folder: {folder}\nnext: {following}", flush=True)

    def end_with_error(self) -> None:
        """Leave the terminal to the error that ends the training."""
        self._release_numbers()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _release_numbers(self) -> None:
        if self._numbers is not None:
            self._numbers.close()
            self._numbers = None
            if self._hides_other_bars:
                enable_progress_bar()

    def _show(self, texts: Sequence[str]) -> None:
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(", ".join(texts), refresh=False)

    def _write(self, line: str) -> None:
        """Write a line above the bar, cut to the width of the terminal."""
        if self.training_bar is not None:
            width = shutil.get_terminal_size().columns - 1
            self.training_bar.write(_fitted(line, width), file=sys.stderr)


@final
class StepPrinterCallback(PrinterCallback):
    """Print the Trainer's dict without a progress bar, unless a callback prints the same.

    Args:
        handler: Callback handler of the trainer.
    """

    def __init__(self, handler: CallbackHandler) -> None:
        self._handler = handler

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **known: Any,
    ) -> None:
        """Print a log, unless a callback prints each step, or, of an evaluation, its results."""
        own = monitors(self._handler.callbacks)
        is_evaluation = any(name.startswith("eval_") for name in logs or {})
        is_said = any(one.step_lines != "never" for one in own)
        if is_evaluation:
            is_said = any(one.evaluation_lines for one in own)
        missing = _of_subclass(logs or {}, own)
        if not is_said or missing:
            shown = missing if is_said else _readable(logs or {})
            super().on_log(args, state, control, logs=shown, **known)  # type: ignore[no-untyped-call]  # (transformers)


def _of_subclass(logs: Mapping[str, Any], callbacks: Sequence[MonitorCallback]) -> dict[str, Any]:
    """Return numbers that no callback says: of a log that is of no step, evaluation or end.

    TRL's trainers that generate log the rewards with the loss; a callback may say these.
    """
    if {"loss", REWARD} <= logs.keys() and not any(one.evaluation_lines for one in callbacks):
        return {name: logs[name] for name in logs if name == REWARD or REWARD_MEAN.fullmatch(name)}
    others = (
        name == "loss" or name.startswith("eval_") or name.endswith("_runtime") for name in logs
    )
    return {} if any(others) else {name: one for name, one in logs.items() if name != "epoch"}


def _readable(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a log without the numbers of each parameter, which would fill a screen.

    Trackers and ``trainer_state.json`` get them all.
    """
    families = collections.Counter(name.partition("/")[0] for name in logs if "/" in name)
    return {
        name: value
        for name, value in logs.items()
        if families[name.partition("/")[0]] <= _MOST_OF_FAMILY
    }


@contextlib.contextmanager
def closed_after_error(callbacks: Sequence[object]) -> Iterator[None]:
    """Train within the block; after an error, leave the terminal to it."""
    try:
        yield
    except BaseException:
        for callback in callbacks:
            if isinstance(callback, StepProgressCallback):
                callback.end_with_error()
        raise


def show_in_one_place(handler: CallbackHandler, termination: RankTermination) -> None:
    """Replace transformers' progress bar, printer, or table in a notebook, by mfwrap's.

    Args:
        handler: Callback handler of a trainer.
        termination: Says whether a signal has stopped the training.
    """
    for index, callback in enumerate(handler.callbacks):
        if type(callback) is ProgressCallback:
            handler.callbacks[index] = StepProgressCallback(handler, termination)
        elif type(callback).__name__ == "NotebookProgressCallback":
            # This module needs IPython, which is there in a notebook.
            from mfwrap.trainer.display.notebook import NotebookStepCallback  # noqa: PLC0415  (see above)

            handler.callbacks[index] = NotebookStepCallback()
        elif type(callback) is PrinterCallback:
            handler.callbacks[index] = StepPrinterCallback(handler)
