"""End a training that does not become better."""

import math
from typing import final

import torch
from torch import Tensor

from mfwrap.arguments import check_bool, check_int
from mfwrap.callbacks.mindspore.monitored_value import Improvement, value_of_epoch
from mfwrap.callbacks.shared.run_log import print_line
from mfwrap.model import Callback, RunContext

__all__ = ["EarlyStopping"]


@final
class EarlyStopping(Callback):
    """End a training after `patience` epochs without an improvement.

    Epochs whose value is unknown, those without an evaluation for example, do not count. The value
    is the same on every rank, and so is the decision.

    Source: MindSpore, ``train.EarlyStopping``. There ``patience=0`` ends each training after its
    first epoch, `baseline` is replaced by `min_delta`, and a value of 0 counts as unknown.

    Args:
        monitor: Name of a metric, ``"eval_loss"``, or ``"loss"`` for the last step's.
        min_delta: By how much a value has to be better than the best, >= 0.
        patience: Epochs without an improvement; 0 and 1 both end a training at the first.
        verbose: Print when it ends.
        mode: ``"min"``, ``"max"``, or ``"auto"``: ``"min"`` for losses and errors.
        baseline: An improvement counts only if it is better than this, too; ``None`` for any.
        restore_best_weights: End with the weights of the best epoch, of which the CPU keeps a copy.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(  # noqa: PLR0917  (MindSpore's signature)
        self,
        monitor: str = "eval_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
    ) -> None:
        self._improvement = Improvement(monitor, mode, min_delta)
        check_int("patience", patience, minimum=0)
        check_bool("verbose", verbose)
        check_bool("restore_best_weights", restore_best_weights)
        if baseline is not None and (
            isinstance(baseline, bool) or not isinstance(baseline, (int, float))
        ):
            msg = f"`baseline` must be a number or None, got {type(baseline).__name__}"
            raise TypeError(msg)
        self._patience = max(patience, 1)
        self._verbose = verbose
        self._baseline = baseline
        self._restores = restore_best_weights
        self._restart()

    def _restart(self) -> None:
        self.best = self._improvement.worst
        """The best value so far."""
        self.wait = 0
        """Epochs since the last improvement."""
        self.stopped_epoch = 0
        """Number of the epoch, from 1, at which the training was ended; 0 if it was not."""
        self._best_weights: dict[str, Tensor] = {}

    def on_train_begin(self, run_context: RunContext) -> None:
        """Forget the training before."""
        del run_context
        self._restart()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Compare; ask for the end after too many epochs without an improvement."""
        parameters = run_context.original_args()
        value = value_of_epoch(self, parameters, self._improvement.monitor)
        if value is None:
            return
        self.wait += 1
        if self._improvement.improves(value, self.best):
            self.best = value
            if self._restores:
                self._best_weights = _copy_of(parameters.network)
            if self._baseline is None or self._improvement.improves(value, self._baseline):
                self.wait = 0
        if self.wait >= self._patience:
            self.stopped_epoch = parameters.cur_epoch_num
            run_context.request_stop()
            if self._best_weights:
                parameters.network.load_state_dict(self._best_weights)

    def on_train_end(self, run_context: RunContext) -> None:
        """Print when the training was ended."""
        main = run_context.original_args().is_world_process_zero
        if self.stopped_epoch and self._verbose and main:
            best = "none" if math.isinf(self.best) else self.best
            print_line(
                f"Epoch {self.stopped_epoch:05d}: early stopping, best "
                f"{self._improvement.monitor}: {best}"
            )
        self._best_weights = {}


def _copy_of(network: torch.nn.Module) -> dict[str, Tensor]:
    state = network.state_dict()
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
