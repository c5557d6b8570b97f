"""Collect losses and metrics of each epoch."""

from collections.abc import Mapping
from typing import Any, final

from mfwrap.callbacks.mindspore.monitored_value import loss_of
from mfwrap.model import Callback, RunContext


@final
class History(Callback):
    """Collect the last loss and the metrics of each epoch.

    Synchronizes with the device once per epoch, to read the loss.

    Source: MindSpore, ``train.History``.
    """

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        """Lists of values by name: ``net_output`` (loss of the last step of each epoch, on this
        rank) and the metrics of each evaluation."""
        self.epoch: dict[str, list[int]] = {"epoch": []}
        """Numbers of the epochs, counted from 1."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Discard the values of an earlier training."""
        del run_context
        self.history, self.epoch = {}, {"epoch": []}

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Collect the values of the epoch."""
        parameters = run_context.original_args()
        self.epoch["epoch"].append(parameters.cur_epoch_num)
        loss = loss_of(parameters.net_outputs)
        values = {} if loss is None else {"net_output": float(loss.detach().float().mean())}
        values |= parameters.get("metrics") or {}
        for name, value in values.items():
            self.history.setdefault(name, []).append(value)

    def on_evaluation(self, run_context: RunContext) -> None:
        """Collect the metrics of an evaluation in an epoch."""
        for name, value in run_context.original_args().metrics.items():
            self.history.setdefault(name, []).append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that have been collected."""
        return {"history": self.history, "epoch": self.epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with values that were collected before."""
        self.history = {name: list(values) for name, values in state_dict["history"].items()}
        self.epoch = {name: list(values) for name, values in state_dict["epoch"].items()}
