"""Show a training in a terminal as one progress bar, with lines above it for what goes wrong."""

import collections
import logging
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from transformers import ProgressCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from mfwrap.outputs import StepReport
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.trainer.events import monitors


@final
class StepProgressCallback(ProgressCallback):
    """Show one progress bar with the numbers of the last step whose values have arrived.

    In a terminal the bar shows loss, norm and learning rate, and, where they apply, the loss scale
    and the number of skipped updates. A skipped update and a warning of a callback are one line
    above the bar, cut to the terminal's width. The Trainer's dict, and the lines of a callback that
    prints each step, are not printed.

    Where standard error is not a terminal, or a callback's `MonitorCallback.step_lines` is
    ``"always"``, there is no bar if a callback prints each step. Without such a callback, this is
    transformers' ``ProgressCallback``.

    The values of a step are copied in the background, and shown when the next step ends.

    Args:
        handler: Callback handler of the trainer.
    """

    def __init__(self, handler: CallbackHandler) -> None:
        super().__init__()
        self._handler = handler
        self._reads = DeferredReads()
        self._num_skipped = 0
        self._log: _AboveBar | None = None
        self._is_hidden = False

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **known: Any) -> None:
        """Decide what is shown, and show the bar."""
        lines = {callback.step_lines for callback in monitors(self._handler.callbacks)}
        is_terminal = sys.stderr.isatty()
        self._is_hidden = "always" in lines or (not is_terminal and "without a bar" in lines)
        self._num_skipped = 0
        if self._is_hidden:
            return
        super().on_train_begin(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)
        if is_terminal and self.training_bar is not None:
            self._log = _AboveBar(self.training_bar)
            logging.getLogger("mfwrap").addHandler(self._log)

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
        if self._log is not None and step_report is not None:
            self._reads.flush()
            self._copy(state.global_step, step_report)
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
        """Show the last step; print an evaluation in a terminal, and the dict elsewhere."""
        if self._log is None:
            if not self._is_hidden:
                super().on_log(args, state, control, logs=logs, **known)  # type: ignore[no-untyped-call]  # (transformers)
            return
        self._reads.flush()
        values = {name: value for name, value in (logs or {}).items() if name.startswith("eval_")}
        prints = any(one.step_lines != "never" for one in monitors(self._handler.callbacks))
        if values and not prints:
            text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._log.write(f"step {state.global_step}: {text}")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **known: Any) -> None:
        """Show the last step, and close the bar."""
        self._reads.flush()
        self._release_log()
        if not self._is_hidden:
            super().on_train_end(args, state, control, **known)  # type: ignore[no-untyped-call]  # (transformers)

    def end_with_error(self) -> None:
        """Leave the terminal to the error that ends the training."""
        self._reads.discard()
        self._release_log()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _release_log(self) -> None:
        if self._log is not None:
            logging.getLogger("mfwrap").removeHandler(self._log)
            self._log = None

    def _copy(self, step: int, report: StepReport) -> None:
        output = report.output
        values = {"loss": output.loss, "norm": output.global_norm, "lr": output.learning_rate}
        values |= {"scale": output.loss_scale, "skipped": report.skipped}
        known = {name: value for name, value in values.items() if value is not None}
        device = next(iter(known.values())).device
        tensors = [value.detach().float().mean().to(device) for value in known.values()]

        def receive(numbers: Sequence[float]) -> None:
            self._show(step, dict(zip(known, numbers, strict=True)))

        self._reads.submit(torch.stack(tensors), receive)

    def _show(self, step: int, values: dict[str, float]) -> None:
        if self._log is None or self.training_bar is None:
            return
        scale = values.pop("scale", 1.0)
        is_skipped = bool(values.pop("skipped", 0.0))
        texts = [f"{name} {value:.4g}" for name, value in values.items() if not math.isnan(value)]
        if scale != 1:
            texts.append(f"scale {scale:g}")
        if is_skipped:
            self._num_skipped += 1
            norm = f"norm {values['norm']:.4g}" if "norm" in values else "non-finite gradients"
            # A monitor may have said more about it.
            if not self._log.has_said(f"step {step}: "):
                self._log.write(f"step {step}: update skipped, loss {values['loss']:.4g}, {norm}")
        if self._num_skipped:
            texts.append(f"skipped {self._num_skipped}")
        self.training_bar.set_postfix_str(", ".join(texts), refresh=False)


@final
class _AboveBar(logging.Handler):
    """Write what callbacks log above a progress bar, except for records of steps.

    Args:
        bar: Bar of tqdm.
    """

    def __init__(self, bar: Any) -> None:
        super().__init__()
        # By this name, mfwrap.callbacks.shared.run_log knows that there is a bar.
        self.name = "mfwrap-bar"
        self._bar = bar
        self._said: collections.deque[str] = collections.deque(maxlen=16)

    def has_said(self, beginning: str) -> bool:
        """Return whether one of the last lines says of a step that its update was skipped."""
        return any(said.startswith(beginning) and "update skipped" in said for said in self._said)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record in one line, unless the root logger's handlers write it."""
        is_step = record.levelno < logging.WARNING and record.name.endswith(".loss_monitor")
        if not is_step and not logging.getLogger().handlers:
            self.write(record.getMessage())

    def write(self, text: str) -> None:
        """Write a text in one line of the terminal, cut to its width."""
        width = shutil.get_terminal_size().columns - 1
        line = " ".join(text.split())
        self._said.append(line)
        cut = line if len(line) <= width else f"{line[: width - 3]}..."
        self._bar.write(cut, file=sys.stderr)


def show_in_one_place(handler: CallbackHandler) -> None:
    """Replace transformers' progress bar in a handler; a notebook's table stays.

    Args:
        handler: Callback handler of a trainer.
    """
    for index, callback in enumerate(handler.callbacks):
        if type(callback) is ProgressCallback:
            handler.callbacks[index] = StepProgressCallback(handler)
