"""MindFormers' evaluation callback."""

import time
from collections.abc import Callable
from typing import Any, final

from transformers import TrainerCallback, TrainerState, TrainingArguments

from mfwrap.callbacks.shared.run_log import run_logger

__all__ = ["EvalCallback"]


@final
class EvalCallback(TrainerCallback):
    """Call a function every few steps or epochs, and log what it returns.

    ``Eval result: 0.97, eval time is 1.234000 s.``, at level INFO, on the main process;
    the function is called on every process. An end of an epoch that has just been evaluated as a
    step is not evaluated a second time.

    Source: MindFormers, ``EvalCallBack``.

    Args:
        eval_func: Takes nothing and returns what is logged.
        step_interval: Steps from one evaluation to the next; none by steps if it is <= 0.
        epoch_interval: Epochs from one to the next; none by epochs if it is <= 0.
        clock: Returns seconds from an arbitrary start.

    Raises:
        TypeError: If an argument has the wrong type.
    """

    def __init__(
        self,
        eval_func: Callable[[], Any],
        step_interval: int = 100,
        epoch_interval: int = -1,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not callable(eval_func):
            kind = type(eval_func).__name__
            msg = f"`eval_func` must be callable, got {eval_func!r} of type {kind}"
            raise TypeError(msg)
        for name, value in (("step_interval", step_interval), ("epoch_interval", epoch_interval)):
            if isinstance(value, bool) or not isinstance(value, int):
                msg = f"`{name}` must be an int, got {value!r} of type {type(value).__name__}"
                raise TypeError(msg)
        self._eval_func = eval_func
        self._step_interval = step_interval
        self._epoch_interval = epoch_interval
        self._clock = clock
        self._num_epochs = 0
        self._last_step: int | None = None

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Count epochs from where the run begins."""
        del args
        self._num_epochs = int(state.epoch or 0)
        self._last_step = None

    def on_step_end(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Evaluate, if it is the step's turn."""
        del args
        if self._step_interval > 0 and state.global_step % self._step_interval == 0:
            self._evaluate(state)

    def on_epoch_end(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Evaluate, if it is the epoch's turn."""
        del args
        self._num_epochs += 1
        is_due = self._epoch_interval > 0 and self._num_epochs % self._epoch_interval == 0
        if is_due and self._last_step != state.global_step:
            self._evaluate(state)

    def _evaluate(self, state: TrainerState) -> None:
        self._last_step = state.global_step
        start = self._clock()
        result = self._eval_func()
        seconds = self._clock() - start
        if state.is_world_process_zero:
            run_logger(__name__).info("Eval result: %s, eval time is %f s.", result, seconds)
