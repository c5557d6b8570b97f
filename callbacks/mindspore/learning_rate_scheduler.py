"""Compute each learning rate from the previous rate and the number of steps done."""

import math
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from mfwrap.arguments import check_callable
from mfwrap.model import Callback, RunContext


@final
class LearningRateScheduler(Callback):
    """Set the learning rate of each parameter group after each step.

    The function is called once per group with the rate of that group. A rate that is a tensor is
    changed in place; reading it synchronizes with its device. If `Model` also has an
    `lr_scheduler`, the rate that is set last takes effect.

    Source: MindSpore, ``train.LearningRateScheduler``. There, the callback works only if the
    optimizer is passed to `Model`.

    Args:
        learning_rate_function: Called with the current rate and the number of steps done, >= 1;
            returns the rate of the next step.

    Raises:
        TypeError: If `learning_rate_function` is not callable.
    """

    def __init__(self, learning_rate_function: Callable[[float, int], float]) -> None:
        check_callable("learning_rate_function", learning_rate_function)
        self._function = learning_rate_function

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Set the rates of the next step."""
        parameters = run_context.original_args()
        for group in parameters.optimizer.param_groups:
            rate = float(group["lr"])
            new_rate = float(self._function(rate, parameters.cur_step_num))
            if not math.isclose(rate, new_rate, rel_tol=1e-10):
                set_rate(group, new_rate)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; a rate that is a tensor is changed in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
