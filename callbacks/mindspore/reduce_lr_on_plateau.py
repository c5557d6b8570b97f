"""Lower the learning rate when a value no longer improves."""

from collections.abc import Mapping
from typing import Any, final

from mfwrap.arguments import check_bool, check_int, check_number, check_real
from mfwrap.callbacks.mindspore.learning_rate_scheduler import set_rate
from mfwrap.callbacks.mindspore.monitored_value import ImprovementCallback
from mfwrap.callbacks.shared.run_log import print_line
from mfwrap.model import RunContext


@final
class ReduceLROnPlateau(ImprovementCallback):
    """Multiply the learning rate by `factor` after `patience` epochs without an improvement.

    The rates of all parameter groups are lowered. In a Trainer with ``eval_strategy="steps"``,
    evaluations count instead of epochs. With the same `patience` and `cooldown`,
    ``torch.optim.lr_scheduler.ReduceLROnPlateau`` lowers them one epoch later.

    Source: MindSpore, ``train.ReduceLROnPlateau``. There, parameter groups and schedules are
    refused, and a value of 0 counts as unknown.

    Args:
        monitor: Name of the value: a metric, ``"eval_loss"``, or ``"loss"`` for the loss of the
            last step.
        factor: Factor for the learning rates, in (0, 1).
        patience: Epochs without an improvement after which the rates are lowered.
        verbose: Print each change.
        mode: ``"min"`` or ``"max"``: whether a smaller or a larger value is better. ``"auto"``:
            ``"min"`` for losses and errors, else ``"max"``.
        min_delta: An improvement must be larger than this, >= 0.
        cooldown: Number of epochs to wait after a change of the rates. While waiting, epochs
            without an improvement do not count toward `patience`. The last of these epochs counts.
        min_lr: Lowest rate.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(  # noqa: PLR0917  (MindSpore's signature)
        self,
        monitor: str = "eval_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        if not 0 < check_real("factor", factor) < 1:
            msg = f"`factor` must be in (0, 1), got {factor}"
            raise ValueError(msg)
        check_int("patience", patience, minimum=0)
        check_int("cooldown", cooldown, minimum=0)
        check_bool("verbose", verbose)
        self._factor = factor
        self._patience = patience
        self._verbose = verbose
        self._cooldown = cooldown
        self._min_lr = check_number("min_lr", min_lr)

    def _restart(self) -> None:
        super()._restart()
        self._cooldown_left = 0

    def _compare(self, value: float, run_context: RunContext) -> None:
        if self._cooldown_left > 0:
            self._cooldown_left -= 1
            self.wait = 0
        if self._improvement.improves(value, self.best):
            self.best = value
            self.wait = 0
        elif self._cooldown_left == 0:
            self.wait += 1
            if self.wait >= self._patience:
                self._reduce(run_context)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value (``None`` before the first) and the counters."""
        return {**super().state_dict(), "cooldown_left": self._cooldown_left}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with a best value and counters."""
        super().load_state_dict(state_dict)
        self._cooldown_left = state_dict["cooldown_left"]

    def _reduce(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        for group in parameters.optimizer.param_groups:
            rate = float(group["lr"])
            if rate <= self._min_lr:
                continue
            new_rate = max(rate * self._factor, self._min_lr)
            set_rate(group, new_rate)
            self._cooldown_left, self.wait = self._cooldown, 0
            if self._verbose and parameters.is_world_process_zero:
                print_line(
                    f"Epoch {parameters.cur_epoch_num:05d}: ReduceLROnPlateau reducing learning "
                    f"rate to {new_rate}."
                )
