"""Call an evaluation function every few steps or epochs."""

import time
from collections.abc import Callable
from typing import Any, final

from transformers import TrainerCallback, TrainerState, TrainingArguments

from mfwrap.arguments import check_callable, described
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.training_weights import monitors_training
from mfwrap.collectives import section_clock


@final
@monitors_training
class EvalCallback(TrainerCallback):
    """Call a function every few steps or epochs, and log its result.

    The main process logs ``Eval result: 0.97, eval time is 1.234000 s.`` at level INFO. Every
    process calls the function. If both a step and the end of its epoch are due, the function is
    called once.

    The model has its raw weights in the call, also if another callback has put averages into it.

    Source: MindFormers, ``EvalCallBack``.

    Args:
        eval_func: Function without arguments that returns the result.
        step_interval: Steps from one evaluation to the next; <= 0 turns evaluation by steps off.
        epoch_interval: Epochs from one evaluation to the next; <= 0 turns evaluation by epochs off.
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
        check_callable("eval_func", eval_func)
        for name, value in (("step_interval", step_interval), ("epoch_interval", epoch_interval)):
            if isinstance(value, bool) or not isinstance(value, int):
                msg = f"`{name}` must be an int, got {described(value)}"
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
        """Start counting epochs at the epoch that the run begins in."""
        del args
        self._num_epochs = int(state.epoch or 0)
        self._last_step = None

    def on_step_end(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Evaluate if the step is due."""
        del args
        if self._step_interval > 0 and state.global_step % self._step_interval == 0:
            self._evaluate(state)

    def on_epoch_end(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Evaluate if the epoch is due."""
        del args
        self._num_epochs += 1
        is_due = self._epoch_interval > 0 and self._num_epochs % self._epoch_interval == 0
        if is_due and self._last_step != state.global_step:
            self._evaluate(state)

    def _evaluate(self, state: TrainerState) -> None:
        self._last_step = state.global_step
        with section_clock.left_out():
            start = self._clock()
            result = self._eval_func()
            seconds = self._clock() - start
        if state.is_world_process_zero:
            run_logger(__name__).info("Eval result: %s, eval time is %f s.", result, seconds)
