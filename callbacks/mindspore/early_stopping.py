"""End a training that no longer improves."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from mfwrap.arguments import check_bool, check_int, check_real
from mfwrap.average.swap import training_weights
from mfwrap.callbacks.mindspore.monitored_value import ImprovementCallback
from mfwrap.callbacks.shared.run_log import print_line, run_logger
from mfwrap.model import RunContext


@final
class EarlyStopping(ImprovementCallback):
    """End a training after `patience` epochs without an improvement.

    An epoch whose value is unknown, for example without an evaluation, does not count. The value is
    the same on every rank, so all ranks stop together. In a Trainer, wrap it with
    `as_trainer_callback`; with ``eval_strategy="steps"``, it counts evaluations instead of epochs.
    The checkpoints of `MFTrainer` have its state and the best weights.

    Source: MindSpore, ``train.EarlyStopping``. There ``patience=0`` ends every training after its
    first epoch, `min_delta` overwrites `baseline`, and a value of 0 counts as unknown.

    Args:
        monitor: Name of the value: a metric, ``"eval_loss"``, or ``"loss"`` for the loss of the
            last step.
        min_delta: An improvement must be larger than this, >= 0.
        patience: Epochs without an improvement after which training ends. 0 means 1.
        verbose: Print a line when training ends early.
        mode: ``"min"`` or ``"max"``: whether a smaller or a larger value is better. ``"auto"``:
            ``"min"`` for losses and errors, else ``"max"``.
        baseline: Value to beat. An improvement resets the patience only if the new value is better
            than `baseline`. ``None``: every improvement resets the patience.
        restore_best_weights: When training ends early, load the weights of the best epoch. A copy
            of these weights is kept on the CPU.

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
        super().__init__(monitor, mode, min_delta)
        check_int("patience", patience, minimum=0)
        check_bool("verbose", verbose)
        check_bool("restore_best_weights", restore_best_weights)
        if baseline is not None:
            check_real("baseline", baseline)
        self._patience = max(patience, 1)
        self._verbose = verbose
        self._baseline = baseline
        self._restores = restore_best_weights

    def _restart(self) -> None:
        super()._restart()
        self.stopped_epoch = 0
        """Epoch, counted from 1, after which training ended early; 0 if it did not."""
        self._best_weights: dict[str, Tensor] = {}

    def _compare(self, value: float, run_context: RunContext) -> None:
        parameters = run_context.original_args()
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
            elif self._restores and not math.isinf(self.best):
                run_logger(__name__).warning(
                    "EarlyStopping cannot restore the best weights: they are not in the checkpoint "
                    "from which the training has resumed"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value (``None`` before the first) and the counters."""
        return {**super().state_dict(), "stopped_epoch": self.stopped_epoch}

    def ends_after(self, state_dict: Mapping[str, Any]) -> bool:
        """Return whether patience was used up; the present `patience` counts."""
        return bool(state_dict) and state_dict["wait"] >= self._patience

    def save_into(self, folder: Path) -> None:
        """Write the best weights, unless they are shards of a distributed network."""
        weights = self._best_weights
        if weights and not any(isinstance(tensor, DTensor) for tensor in weights.values()):
            whole = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(whole, folder / self._file)

    def resume_from(self, folder: Path) -> None:
        """Read the best weights."""
        if self._restores and (folder / self._file).is_file():
            self._best_weights = load_file(folder / self._file)

    @property
    def _file(self) -> str:
        """Name of the file of best weights; callbacks with equal names have equal weights."""
        better = "lower" if self._improvement.is_downward else "higher"
        monitor = re.sub(r"\W", "_", self._improvement.monitor)
        return f"early_stopping_{better}_{monitor}_{self._improvement.min_delta:g}.safetensors"

    def on_train_end(self, run_context: RunContext) -> None:
        """Print a line if training ended early."""
        main = run_context.original_args().is_world_process_zero
        if self.stopped_epoch and self._verbose and main:
            best = "none" if math.isinf(self.best) else self.best
            print_line(
                f"Epoch {self.stopped_epoch:05d}: early stopping, best "
                f"{self._improvement.monitor}: {best}"
            )
        self._best_weights = {}


def _copy_of(network: torch.nn.Module) -> dict[str, Tensor]:
    with training_weights():
        state = network.state_dict()
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
