"""What the Trainer says of losses: with those left out that are not finite, and after a resume."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from mfwrap.accelerate.attached_step import AttachedStep
from mfwrap.trainer.events import values_to_log
from mfwrap.trainer.log import StepLog

__all__ = ["LossMixin"]

if TYPE_CHECKING:
    # What the mixin is mixed in before has the Trainer's methods.
    from transformers import Trainer as _Base
else:
    _Base = object


class LossMixin(_Base):
    """The part of `MFTrainerMixin` that has to do with losses and the log."""

    attached: AttachedStep
    step_log: StepLog
    _training_loss: float | None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Do forward and backward of a micro-batch; return its loss, 0 if it is not finite."""
        share = self._share_of_update(inputs, num_items_in_batch)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return self.step_log.filtered(loss, share)

    def _share_of_update(self, inputs: dict[str, Any], num_items: Any) -> Tensor | float:
        """Return what part of its update's loss a micro-batch has, as the Trainer weighs it."""
        counts_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        # On several ranks counting sends a message.
        counts_here = self.step_log.filters and counts_items and self.args.world_size == 1
        num_micro_batches = self.current_gradient_accumulation_steps
        if num_items is None or not counts_here or num_micro_batches == 1:
            return 1 / num_micro_batches
        items = self._get_num_items_in_batch([inputs], self.args.device)
        # With DataParallel both are repeated for each device.
        share: Tensor | float = 1.0 if items is None else (items / num_items).reshape(-1)[0]
        return share

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with what the step knows beside the training loss."""
        report = self.attached.last_report
        # The Trainer's own entry, not one of its user.
        if {"loss", "learning_rate"} <= logs.keys() and report is not None:
            self.attached.flush()
            num_steps = self.step_log.num_steps
            logs, missing = self.step_log.completed(logs, report)
            # The Trainer has just added to its sum what lacks the losses that were left out.
            self._total_loss_scalar += missing * num_steps
            logs |= values_to_log(self.callback_handler.callbacks)
        elif "train_loss" in logs and self._training_loss is not None:
            logs = logs | {"train_loss": self._training_loss}
        super().log(logs, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        losses, total = self._tr_loss, self._total_loss_scalar
        # What was left out since the last log would pull the mean of the training down.
        self._tr_loss = self.step_log.completed_sum(losses)
        # The Trainer divides by the steps of this process, or in older releases by all: neither is
        # the number of steps whose losses a resumed run has added up.
        num_steps = self.state.global_step - self.step_log.begin
        loss = (total + self._tr_loss.item()) / max(num_steps, 1)
        self._training_loss = loss
        try:
            result = super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._training_loss = None
            # For a checkpoint that is still to come: the Trainer has added one to the other.
            self._tr_loss, self._total_loss_scalar = losses, total
        return TrainOutput(result.global_step, loss, result.metrics | {"train_loss": loss})
