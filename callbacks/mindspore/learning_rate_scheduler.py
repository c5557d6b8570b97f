"""A learning rate that is a function of the last one and the step."""

import math
from collections.abc import Callable
from typing import final

from torch import Tensor

from mfwrap.model import Callback, RunContext

__all__ = ["LearningRateScheduler"]


@final
class LearningRateScheduler(Callback):
    """Set the learning rate after each step.

    Every parameter group gets a rate of its own, from its own. A rate that is a tensor is changed
    in place, and read, which waits for its device. With a schedule (`lr_scheduler`), which sets
    rates too, the later of the two wins.

    Source: MindSpore, ``train.LearningRateScheduler``, which works only where `Model` was given
    the optimizer.

    Args:
        learning_rate_function: From a group's rate and the number of steps done, from 1, to the
            rate of the next step.

    Raises:
        TypeError: If it cannot be called.
    """

    def __init__(self, learning_rate_function: Callable[[float, int], float]) -> None:
        if not callable(learning_rate_function):
            msg = (
                "`learning_rate_function` must be callable, got "
                f"{type(learning_rate_function).__name__}"
            )
            raise TypeError(msg)
        self._function = learning_rate_function

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Set the rates of the next step."""
        parameters = run_context.original_args()
        for group in parameters.optimizer.param_groups:
            rate = float(group["lr"])
            new_rate = float(self._function(rate, parameters.cur_step_num))
            if math.isclose(rate, new_rate, rel_tol=1e-10):
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(new_rate)
            else:
                group["lr"] = new_rate
