"""Add the step's counts to a Trainer's log, and leave non-finite losses out of logged means."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.compatibility.transformers import COUNT_ITEMS, LossSums, has_own, method_of
from mfwrap.outputs import LocalNormStepOutput, StepReport
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.trainer.events import monitors
from mfwrap.trainer.view import TrainerView

_OUTPUTS_AT = 2
"""Place of ``return_outputs`` among the positional arguments of the Trainer's ``compute_loss``."""


@final
class Losses:
    """Filter the losses of an `MFTrainer`, and correct the means that the Trainer logs.

    The Trainer sums up the losses of micro-batches in ``_tr_loss``, and at each log moves this sum
    to ``_total_loss_scalar``. A non-finite loss is added as 0, and `StepLog` counts it. The logged
    means are then scaled up to make up for the losses that were added as 0.

    Args:
        trainer: The trainer, which already has its accelerator.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self._sums = LossSums(trainer)
        self.step_log = StepLog(trainer.accelerator.device)
        """Counts since the last log."""
        self._training_loss: float | None = None
        self._is_filter_off = False
        self._may_report = False
        self.are_reported = False
        """Whether the losses beside the ``loss`` of a model's output are reported now.

        A subclass with a ``compute_loss`` of its own calls ``attached.report_losses`` instead.
        """

    @contextlib.contextmanager
    def filtering(self) -> Iterator[None]:
        """Reset the counts; the block is a training."""
        args = self._trainer.args
        filters = args.logging_nan_inf_filter
        self.step_log = StepLog(self._trainer.accelerator.device, filters=filters)
        # A method of the user's own may refuse `return_outputs=True`.
        self._may_report = not has_own(self._trainer, "compute_loss")
        try:
            yield
        finally:
            self._may_report = False
            self.end_micro_batch()

    def add(self, loss: Tensor, share: Callable[[], Tensor | float]) -> Tensor:
        """Count a micro-batch, and return its loss for the Trainer; see `StepLog.filtered`.

        The Trainer's own filter reads each loss on the host, so it is off until
        `end_micro_batch`. It stays on for the losses of a ``training_step`` that does not call the
        method of `MFTrainerMixin`.
        """
        self.are_reported = False
        self._turn_filter_off()
        return self.step_log.filtered(loss, share)

    def of_nothing(self) -> Tensor:
        """Return the loss of an empty micro-batch, which does not count."""
        self._turn_filter_off()
        return torch.zeros((), device=self._trainer.args.device)

    def _turn_filter_off(self) -> None:
        if self.step_log.filters:
            self._trainer.args.logging_nan_inf_filter = False
            self._is_filter_off = True

    def end_micro_batch(self) -> None:
        """Restore the user's setting of the Trainer's own filter.

        Call it before each event, which ends a micro-batch also if an error has.
        """
        self.are_reported = False
        if self._is_filter_off:
            self._trainer.args.logging_nan_inf_filter = True
            self._is_filter_off = False

    def begin_micro_batch(
        self, inputs: dict[str, Any], num_items: Any
    ) -> Callable[[], Tensor | float]:
        """Return a function that returns `share_of_update`; call this before the training step.

        On a CPU few shares are needed, so the share is not computed yet.
        """
        self.are_reported = self._may_report
        # The training step of a subclass may take the labels out of the micro-batch.
        return functools.partial(self.share_of_update, copy.copy(inputs), num_items)

    def share_of_update(self, inputs: dict[str, Any], num_items: Any) -> Tensor | float:
        """Return the weight of a micro-batch in the loss of its update.

        The weights of all micro-batches of an update add up to 1.

        Args:
            inputs: The micro-batch.
            num_items: Number of targets in all micro-batches of the update; ``None`` if the Trainer
                weighs micro-batches equally.
        """
        trainer = self._trainer
        num_micro_batches: float = trainer.current_gradient_accumulation_steps
        if num_items is None or not self._counts_items or num_micro_batches == 1:
            return 1 / num_micro_batches
        items = method_of(trainer, COUNT_ITEMS)([inputs], trainer.args.device)
        # Under DataParallel both counts are repeated once per device, so take the first ratio.
        share: Tensor | float = 1.0 if items is None else (items / num_items).reshape(-1)[0]
        return share

    @property
    def _counts_items(self) -> bool:
        """Whether micro-batches are weighed by their targets."""
        trainer = self._trainer
        counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        # On several ranks, counting targets would cost a collective per micro-batch, so weigh all
        # micro-batches equally there.
        return self.step_log.filters and counts and trainer.args.world_size == 1

    def completed(self, logs: dict[str, float]) -> dict[str, float]:
        """Return a log entry of the Trainer, with the values of the step and the callbacks added.

        Only the Trainer's training log and its final entry are changed. Entries that a user logs
        are returned unchanged. For the training log, this synchronizes with the device.
        """
        trainer = self._trainer
        report = trainer.attached.attachment.last_report
        # Test for both keys, which only the Trainer's training log has: an entry that a user logs
        # may also have the key `loss`.
        if {"loss", "learning_rate"} <= logs.keys() and report is not None:
            trainer.attached.attachment.flush()
            num_steps = self.step_log.num_steps
            logs, missing = self.step_log.completed(logs, report)
            if report.learning_rate_factor != 1:  # the Trainer asks the schedule
                logs["learning_rate"] *= report.learning_rate_factor
            # Just before it logs, the Trainer adds the losses since the last log to this sum.
            # Filtered losses are 0 in that sum, so add here what the total lacks.
            if "loss" not in logs:
                missing = self._mean_before(num_steps)
            self._sums.until_last_log += missing * num_steps
            for callback in monitors(trainer.callback_handler.callbacks):
                logs |= callback.values_to_log()
            logs |= trainer.loss_by_row.values_to_log()
            if trainer.batch_growth.is_on:
                logs |= trainer.batch_growth.values_to_log()
            return logs
        if "train_loss" in logs and self._training_loss is not None:
            # In place: the Trainer adds the epoch to this entry, and returns it as its metrics.
            logs["train_loss"] = self._training_loss
            if trainer.batch_growth.is_on:
                logs |= trainer.batch_growth.speed(logs)
        return logs

    @contextlib.contextmanager
    def finishing(self) -> Iterator[float]:
        """Yield the mean loss of the training, and put it into the final log entry of the block.

        The mean covers all steps, including the steps before the checkpoint in a resumed training.
        It is NaN if all losses were filtered.
        """
        trainer = self._trainer
        sums = self._sums
        losses, total = sums.since_last_log, sums.until_last_log
        step_log = self.step_log
        # Make up for the losses that were filtered since the last log: they count as 0 in the sum
        # and would pull the mean down.
        sums.since_last_log = step_log.completed_sum(losses)
        if step_log.has_left_out_all:
            sums.since_last_log += self._mean_before(step_log.num_steps) * step_log.num_steps
        # The losses are summed up since step `begin`, so divide by the steps since then. The
        # Trainer itself divides by the steps of this process (older releases: by all steps).
        num_steps = trainer.state.global_step - step_log.begin
        found = total + sums.since_last_log.item()
        self._training_loss = found / max(num_steps, 1)
        if not found and step_log.state_dict()["non_finite_losses"]:
            self._training_loss = math.nan
        try:
            yield self._training_loss
        finally:
            self._training_loss = None
            # The Trainer has added the first sum to the second. Undo this: a checkpoint that is
            # written after the end of the training stores the two sums separately.
            sums.since_last_log, sums.until_last_log = losses, total

    def _mean_before(self, num_steps: int) -> float:
        """Return the mean loss of the steps before the last `num_steps`; 0 if there are none.

        All losses of an interval may be filtered. In the mean of the training they would count as 0
        and pull it down: a training that is lost after a tenth of its steps would seem to have a
        tenth of its loss.
        """
        earlier = self._trainer.state.global_step - self.step_log.begin - num_steps
        return self._sums.until_last_log / earlier if earlier > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return all sums and counts of the log; synchronizes with the device."""
        return {
            "loss_since_last_log": self._sums.since_last_log.item(),
            "loss_until_last_log": self._sums.until_last_log,
            "last_logged": self._sums.last_logged,
            "step_log": self.step_log.state_dict(),
        }

    def begin(self, state: dict[str, Any] | None) -> None:
        """Begin a training at the trainer's current step.

        Args:
            state: State that `state_dict` returned, to continue in the middle of a logging
                interval; ``None`` to count from this step on.
        """
        self.step_log.begin = self._trainer.state.global_step
        if state is not None:
            self._sums.since_last_log.fill_(state["loss_since_last_log"])
            self._sums.until_last_log = state["loss_until_last_log"]
            self._sums.last_logged = state["last_logged"]
            self.step_log.load_state_dict(state["step_log"])


def with_outputs(
    args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return a call of ``compute_loss`` that returns the model's output, too.

    Args:
        args: Positional arguments of the call: the model, its inputs, perhaps whether to return the
            model's output, too, and the number of targets.
        keywords: Keyword arguments of the call.

    Returns:
        The arguments, the keywords, and whether the call itself asks for the output.
    """
    if len(args) > _OUTPUTS_AT:
        return (*args[:_OUTPUTS_AT], True, *args[_OUTPUTS_AT + 1 :]), keywords, args[_OUTPUTS_AT]
    return args, keywords | {"return_outputs": True}, keywords.get("return_outputs", False)


def check_log(state: Mapping[str, Any]) -> None:
    """Check the state of a log that was read from a file.

    Raises:
        KeyError: If a number is missing.
        TypeError: If a value is not a number.
        ValueError: If a loss that was reported by name has not a sum and a number.
    """
    of_steps = state["step_log"]
    numbers = [
        state[name] for name in ("loss_since_last_log", "loss_until_last_log", "last_logged")
    ]
    counts = StepLog(torch.device("cpu")).state_dict().keys() - {"named"}
    numbers += [of_steps[name] for name in counts]
    for total, number in of_steps.get("named", {}).values():
        numbers += [total, number]
    for number in numbers:
        if type(number) not in {int, float}:
            msg = f"expected a number, got {number!r:.80}"
            raise TypeError(msg)


# Number of losses that are kept until they are counted together: a few kilobytes.
_MAX_PENDING = 64


@final
class StepLog:
    """Count steps, overflows and non-finite losses on the device.

    A micro-batch costs one kernel (``nan_to_num``). Its loss is kept, and all kept losses are
    counted together when a count is needed. On a CPU, where reading a loss costs nothing, only
    non-finite losses are kept.

    Args:
        device: The training device.
        filters: Whether to replace non-finite losses by 0.
    """

    def __init__(self, device: torch.device, *, filters: bool = True) -> None:
        self._device = device
        # Whether losses are read on the host as soon as they are there.
        self._reads_at_once = DeferredReads(device).are_free
        self.filters = filters
        """Whether non-finite losses are replaced by 0."""
        self.begin = 0
        """Step after which the Trainer's sum of losses begins."""
        self.num_steps = 0
        """Updates since the last log."""
        self._num_losses = 0
        # Losses that are not counted yet, each with its weight in the loss of its update.
        self._pending: list[tuple[Tensor, Tensor | float]] = []
        # Since the last log: the number of filtered losses, and the sum of their weights.
        self._left_out = self._zero()
        self._left_share = self._zero().double()
        # Since the last log, by name: the sum of a loss beside the step's, and the number of terms.
        self._named: dict[str, tuple[Tensor, Tensor]] = {}
        # Since the start of the training: the numbers of non-finite losses and of overflows.
        self._non_finite_losses = self._zero()
        self._overflows = self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def filtered(self, loss: Tensor, share: Callable[[], Tensor | float]) -> Tensor:
        """Return the loss of a micro-batch, or 0 if it is non-finite and `filters` is true.

        Does not synchronize with the device.

        Args:
            loss: Loss of the micro-batch, shape ``()``.
            share: Returns the weight of the micro-batch in the loss of its update. On a CPU it is
                called only if the loss is non-finite.
        """
        self._num_losses += 1
        if self._reads_at_once and math.isfinite(loss.item()):
            return loss
        self._pending.append((loss, share()))
        if len(self._pending) == _MAX_PENDING:
            self._settle()
        return loss.nan_to_num(0.0, 0.0, 0.0) if self.filters else loss

    def _settle(self) -> None:
        """Count the pending losses."""
        if not self._pending:
            return
        losses, shares = zip(*self._pending, strict=True)
        self._pending = []
        bad = ~torch.stack(losses).isfinite()
        self._non_finite_losses = self._non_finite_losses + bad.sum()
        if self.filters:
            self._left_out = self._left_out + bad.sum()
            # `torch.full` fills on the device. `torch.tensor` would synchronize with the device, to
            # copy the number from the host.
            weights = [
                share
                if isinstance(share, Tensor)
                else torch.full((), share, dtype=torch.float64, device=self._device)
                for share in shares
            ]
            self._left_share = self._left_share + (bad * torch.stack(weights).double()).sum()

    def count(self, report: StepReport) -> None:
        """Count an update."""
        self.num_steps += 1
        self._overflows = self._overflows + report.output.overflow
        for name, loss in report.losses.items():
            total, number = self._named.get(name, (torch.zeros_like(loss), self._zero()))
            is_counted = loss.isfinite() | (not self.filters)
            kept = torch.where(is_counted, loss, 0.0)
            self._named[name] = (total + kept, number + is_counted)

    @property
    def has_left_out_all(self) -> bool:
        """Whether all losses since the last log were filtered; synchronizes with the device."""
        self._settle()
        return 0 < self._num_losses == int(self._left_out)

    def completed_sum(self, losses: Tensor) -> Tensor:
        """Scale up a sum of losses, as if each filtered loss were the mean of all other losses.

        Args:
            losses: Sum of the losses since the last log, with 0 for filtered losses, shape ``()``.
        """
        self._settle()
        kept = self.num_steps - self._left_share
        return torch.where(kept > 0, losses * (self.num_steps / kept), losses).to(losses.dtype)

    def completed(
        self, logs: dict[str, float], report: StepReport
    ) -> tuple[dict[str, float], float]:
        """Add the step's values to the Trainer's log entry, and correct the mean loss in it.

        Losses that are reported by name are means of the steps since the last log, too.

        Synchronizes with the device once. The counts since the last log start again at 0. The
        counts since the start of the training (overflows, non-finite losses) continue.

        Args:
            logs: The Trainer's log entry, with the mean loss of the steps since the last log.
            report: Report of the last of these steps.

        Returns:
            The new log entry, and the change of the mean loss. ``loss`` in the entry is the mean of
            the losses that were not filtered; it is removed if all losses were filtered. The change
            is this mean (0 if it was removed) minus the Trainer's mean.
        """
        self._settle()
        output = report.output
        scalars = {
            "loss_scale": output.loss_scale,
            "applied_updates": report.applied_updates,
            "skipped_updates": report.skipped_updates,
            "overflows": self._overflows,
            "non_finite_losses": self._non_finite_losses,
        }
        counts = list(scalars)[1:]
        named, self._named = self._named, {}
        scalars |= {f"losses/{name}": total / number for name, (total, number) in named.items()}
        names = report.local_norm_names if isinstance(output, LocalNormStepOutput) else ()
        vectors = [output.local_norm] if isinstance(output, LocalNormStepOutput) else []
        if report.learning_rate_names:
            vectors.append(report.learning_rates)
        left_out, left_share, *values = _read(
            [self._left_out, self._left_share, *scalars.values()], vectors
        )
        keys = [*scalars, *(f"local_norm/{name}" for name in names)]
        keys += [f"learning_rate/{name}" for name in report.learning_rate_names]
        logs = logs | dict(zip(keys, values, strict=True))
        for name in counts:
            logs[name] = int(logs[name])
        before = logs["loss"]
        # A `training_step` of the user's own may count no losses here.
        if left_out < self._num_losses or left_out == 0:
            logs["loss"] = before * (self.num_steps / (self.num_steps - left_share))
        else:
            del logs["loss"]
        self.num_steps = self._num_losses = 0
        self._left_out, self._left_share = self._zero(), self._zero().double()
        return logs, logs.get("loss", 0.0) - before

    def state_dict(self) -> dict[str, Any]:
        """Return all counts and sums; synchronizes with the device."""
        self._settle()
        return {
            "begin": self.begin,
            "num_steps": self.num_steps,
            "num_losses": self._num_losses,
            "left_out": int(self._left_out),
            "left_share": float(self._left_share),
            "non_finite_losses": int(self._non_finite_losses),
            "overflows": int(self._overflows),
            "named": {
                name: [total.item(), number.item()] for name, (total, number) in self._named.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._pending = []
        self.begin = state["begin"]
        self.num_steps, self._num_losses = state["num_steps"], state["num_losses"]
        self._left_out = self._zero() + state["left_out"]
        self._left_share = self._zero().double() + state["left_share"]
        self._non_finite_losses = self._zero() + state["non_finite_losses"]
        self._overflows = self._zero() + state["overflows"]
        # Checkpoints of former versions lack them.
        self._named = {
            name: (torch.tensor(total, device=self._device), self._zero() + number)
            for name, (total, number) in state.get("named", {}).items()
        }


def _read(scalars: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[float]:
    """Return all values as Python numbers, with one synchronization."""
    values = torch.stack([scalar.double() for scalar in scalars])
    read: list[float] = torch.cat([values, *(vector.double() for vector in vectors)]).tolist()
    return read
