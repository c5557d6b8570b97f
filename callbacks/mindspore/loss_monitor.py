"""MindSpore's loss monitor: one line for a step."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap import DeferredReads
from mfwrap.callbacks.mindspore.monitored_value import loss_of
from mfwrap.callbacks.shared.run_log import print_line, run_logger
from mfwrap.model import Callback, CallbackParameters, RunContext, named_output

__all__ = ["LossMonitor"]


@final
class LossMonitor(Callback):
    """Print the loss of steps, and end a training whose loss is not finite.

    ::

        epoch: 1 step: 1, loss is 2.302503824234009

    The line of a step is printed, on the main process, at the end of the next step, or of the
    epoch, so that the device is not waited for. After an evaluation, `Model.fit` ends the epoch
    with ``Eval result: epoch 1, metrics: {...}``.

    A loss that is not finite ends the training, unless the update was dropped for its overflow:
    with a dynamic loss scale that is part of a training. A step of one's own says so by the second
    of its values, a flag: ``(loss, overflow, loss_scale, ...)``, named or not.

    Source: MindSpore, ``train.LossMonitor``, which looks for such losses only where a cell returns
    nothing beside the loss, and then ends trainings with a dynamic loss scale, too.

    Args:
        per_print_times: Steps from one line to the next; 0 prints none.

    Raises:
        ValueError: If `per_print_times` is no int or negative; when a loss is not finite.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if type(per_print_times) is not int or per_print_times < 0:
            msg = f"`per_print_times` must be an int >= 0, got {per_print_times!r}"
            raise ValueError(msg)
        self._per_print_times = per_print_times
        self._last_print_step = 0
        self._reads: DeferredReads | None = None
        self._said_what_is_missing = False

    def on_train_begin(self, run_context: RunContext) -> None:
        """Count steps from here."""
        self._last_print_step = run_context.original_args().cur_step_num
        self._reads = None

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Print the step before; begin to copy the loss of this one."""
        parameters = run_context.original_args()
        loss = loss_of(parameters.net_outputs)
        if loss is None:
            self._say_what_is_missing()
            return
        self._flush()
        if self._reads is None:
            self._reads = DeferredReads(loss.device)
        prints = self._is_due(parameters)
        epoch, step = parameters.cur_epoch_num, _step_in_epoch(parameters)

        def receive(values: Sequence[float]) -> None:
            value, dropped = values
            if not math.isfinite(value) and not dropped:
                msg = (
                    f"In epoch: {epoch} step: {step}, loss is NAN or INF, training process cannot "
                    "continue, terminating training."
                )
                raise ValueError(msg)
            if prints:
                print_line(f"epoch: {epoch} step: {step}, loss is {value}")

        self._reads.submit(_packed(loss, parameters.net_outputs), receive)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Print what is pending."""
        del run_context
        self._flush()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Print what is pending, and the metrics of an evaluation."""
        self._flush()
        parameters = run_context.original_args()
        metrics = parameters.get("metrics")
        if metrics and parameters.is_world_process_zero:
            print_line(f"Eval result: epoch {parameters.cur_epoch_num}, metrics: {metrics}")

    def on_train_end(self, run_context: RunContext) -> None:
        """Print what is pending."""
        del run_context
        self._flush()

    def _is_due(self, parameters: CallbackParameters) -> bool:
        due = parameters.cur_step_num - self._last_print_step >= self._per_print_times
        if not self._per_print_times or not due:
            return False
        self._last_print_step = parameters.cur_step_num
        return bool(parameters.is_world_process_zero)

    def _flush(self) -> None:
        if self._reads is not None:
            self._reads.flush()

    def _say_what_is_missing(self) -> None:
        if not self._said_what_is_missing:
            self._said_what_is_missing = True
            run_logger(__package__).warning(
                "LossMonitor gets no step's output in this loop, and prints no loss. MFTrainer and "
                "Model have one; MFLossMonitor prints what a Trainer logs."
            )


def _step_in_epoch(parameters: CallbackParameters) -> int:
    step: int = (parameters.cur_step_num - 1) % parameters.batch_num + 1
    return step


def _packed(loss: Tensor, outputs: Any) -> Tensor:
    """Return the mean loss and whether the update was dropped, shape ``(2,)``."""
    mean = loss.detach().float().mean()
    overflow = getattr(named_output(outputs), "overflow", None)
    dropped = torch.zeros_like(mean) if overflow is None else overflow.float().reshape(())
    return torch.stack((mean, dropped))
