"""Losses and metrics of a training, epoch by epoch."""

from typing import Any, final

from mfwrap.callbacks.mindspore.monitored_value import loss_of
from mfwrap.model import Callback, RunContext

__all__ = ["History"]


@final
class History(Callback):
    """Keep the last loss and the metrics of each epoch.

    Reading the loss waits for the device, once an epoch.

    Source: MindSpore, ``train.History``.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        """``net_output``, the loss of the last step of each epoch on this rank, and each metric of
        each evaluation."""
        self.epoch: dict[str, list[int]] = {"epoch": []}
        """Numbers of the epochs, from 1."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Forget the training before."""
        del run_context
        self.history, self.epoch = {}, {"epoch": []}

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Keep what is known of the epoch."""
        parameters = run_context.original_args()
        self.epoch["epoch"].append(parameters.cur_epoch_num)
        loss = loss_of(parameters.net_outputs)
        values = {} if loss is None else {"net_output": float(loss.detach().float().mean())}
        values |= parameters.get("metrics") or {}
        for name, value in values.items():
            self.history.setdefault(name, []).append(value)
