"""Print one line with the loss for each step."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap import DeferredReads
from mfwrap.callbacks.mindspore.monitored_value import loss_of
from mfwrap.callbacks.shared.run_log import WarnOnce, print_line
from mfwrap.model import Callback, CallbackParameters, RunContext, named_output

_NO_OUTPUT = (
    "LossMonitor prints no loss, because this loop does not pass the output of a step. Use it with "
    "MFTrainer or Model; MFLossMonitor prints what a stock Trainer logs."
)


@final
class LossMonitor(Callback):
    """Print the loss of steps, and end a training whose loss is non-finite.

    ::

        epoch: 1 step: 1, loss is 2.302503824234009

    The main process prints the line of a step at the end of the next step, or of the epoch, so
    that no step synchronizes with the device. After an evaluation in `Model.fit` it also prints
    ``Eval result: epoch 1, metrics: {...}``.

    A non-finite loss ends the training, unless the update was skipped because of an overflow: with
    a dynamic loss scale, overflows are normal. A training step of your own reports an overflow as
    its second value: ``(loss, overflow, loss_scale, ...)``, as a named or a plain tuple.

    Source: MindSpore, ``train.LossMonitor``. There, the loss is checked only if the cell returns
    nothing else. A non-finite loss then ends the training even with a dynamic loss scale.

    Args:
        per_print_times: Steps from one line to the next; 0 prints no lines.

    Raises:
        ValueError: If `per_print_times` is not an int >= 0. During training, if a loss is
            non-finite.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if type(per_print_times) is not int or per_print_times < 0:
            msg = f"`per_print_times` must be an int >= 0, got {per_print_times!r}"
            raise ValueError(msg)
        self._per_print_times = per_print_times
        self._last_print_step = 0
        self._reads = DeferredReads()
        self._warn_once = WarnOnce(__package__)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Start counting steps."""
        self._last_print_step = run_context.original_args().cur_step_num
        self._reads = DeferredReads()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Print the last step; start copying the loss of this step to the host."""
        parameters = run_context.original_args()
        loss = loss_of(parameters.net_outputs)
        if loss is None:
            self._warn_once(_NO_OUTPUT)
            return
        self._reads.flush()
        prints = self._is_due(parameters)
        epoch, step = parameters.cur_epoch_num, _step_in_epoch(parameters)

        def receive(values: Sequence[float]) -> None:
            value, skipped = values
            if not math.isfinite(value) and not skipped:
                msg = (
                    f"In epoch: {epoch} step: {step}, loss is NAN or INF, training process cannot "
                    "continue, terminating training."
                )
                raise ValueError(msg)
            if prints:
                print_line(f"epoch: {epoch} step: {step}, loss is {value}")

        self._reads.submit(_packed(loss, parameters.net_outputs), receive)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Print the pending line."""
        del run_context
        self._reads.flush()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Print the pending line and the metrics of an evaluation."""
        self._reads.flush()
        parameters = run_context.original_args()
        metrics = parameters.get("metrics")
        if metrics and parameters.is_world_process_zero:
            print_line(f"Eval result: epoch {parameters.cur_epoch_num}, metrics: {metrics}")

    def on_train_end(self, run_context: RunContext) -> None:
        """Print the pending line."""
        del run_context
        self._reads.flush()

    def _is_due(self, parameters: CallbackParameters) -> bool:
        due = parameters.cur_step_num - self._last_print_step >= self._per_print_times
        if not self._per_print_times or not due:
            return False
        self._last_print_step = parameters.cur_step_num
        return bool(parameters.is_world_process_zero)


def _step_in_epoch(parameters: CallbackParameters) -> int:
    step: int = (parameters.cur_step_num - 1) % parameters.batch_num + 1
    return step


def _packed(loss: Tensor, outputs: Any) -> Tensor:
    """Return the mean loss and whether the update was skipped, shape ``(2,)``."""
    mean = loss.detach().float().mean()
    overflow = getattr(named_output(outputs), "overflow", None)
    skipped = torch.zeros_like(mean) if overflow is None else overflow.float().reshape(())
    return torch.stack((mean, skipped))
