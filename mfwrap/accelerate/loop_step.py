"""Do the updates of a loop whose optimizers share one loss scale and one average.

The loop scales each loss (`LoopStep.scaled`), runs backward, may clip through an optimizer's window
(`mfwrap.accelerate.window`), and lets each optimizer do its update (`LoopStep.update`). Nothing
here calls accelerate; `mfwrap.accelerate.classes` translates accelerate's calls.

Several optimizers need two extra rules. The loss scale must not change while another optimizer
still has unused gradients, because they were computed with the present scale (`SharedLossScale`).
The average must be updated when all optimizers have done their update, not after each of them
(`SharedAverage`).
"""

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.accelerate.window import OptimizerWindow
from mfwrap.arguments import described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import LossScale
from mfwrap.outputs import StepReport
from mfwrap.step.accumulation import mean_by_name
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.ranks.agreement import Agreement
from mfwrap.step.ranks.local_norms import LocalSquares
from mfwrap.step.rates import lowered_rates
from mfwrap.step.state import OwnedStates, StepState, state_of
from mfwrap.step.update import StepUpdate
from mfwrap.tensors.saved_state import check_keys
from mfwrap.tensors.shards import on_device

_USED_AGAIN = (
    "`optimizer.step` uses the gradients of its last call once more, because nothing has zeroed "
    "them; call `optimizer.zero_grad` after each `optimizer.step`"
)


class PendingSchedule(Protocol):
    """A schedule that postpones its steps until the host knows if the update was applied."""

    def resolve(self) -> None:
        """Do the postponed steps if the last update was applied; drop them if it was skipped."""


@final
class LoopStep:
    """Do the updates of one or several optimizers that share a loss scale and an average.

    Args:
        config: Settings of the step.
        loss_scale: Live loss scale.
    """

    def __init__(self, config: StepConfig, loss_scale: LossScale) -> None:
        self.loss_scale = loss_scale
        self.last_report: StepReport | None = None
        """Report of the last update of any optimizer; ``None`` before the first update."""
        self.last_reports: dict[Optimizer, StepReport] = {}
        """Report of each optimizer's last update; without optimizers that have done none."""
        self.windows: dict[Optimizer, OptimizerWindow] = {}
        """Window of each optimizer, in the order in which they were added; see `arrange`."""
        self.rate_factor = 1.0
        """Factor of all learning rates in the next updates. The groups of the optimizers, and so
        the schedules, keep their own rates."""
        self.before_update: list[Callable[[], None]] = []
        """Functions to call once the gradients are measured and before they are used."""
        self._config = config
        # Schedules that `flush` resolves. Each update flushes first.
        self._schedules: list[PendingSchedule] = []
        self._ema: ExponentialMovingAverage | None = None
        self._average: SharedAverage | None = None
        # Named losses of the micro-batches of this update, and whether a report has them.
        self._losses: list[Mapping[str, Tensor]] = []
        self._are_reported = False
        self._shared_scale = SharedLossScale(loss_scale, self._gradients_are_used)

    def follow(self, ema: ExponentialMovingAverage) -> None:
        """Set the average that follows the updates of all optimizers added from now on."""
        self._ema = ema
        self._average = SharedAverage(ema)

    def add(
        self,
        optimizer: Optimizer,
        parameters: TrainedParameters,
        *,
        local_squares: LocalSquares | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """Add an optimizer, or replace the parameters that it updates.

        Args:
            optimizer: Optimizer without accelerate's wrapper.
            parameters: Parameters that the optimizer updates.
            local_squares: As in `StepUpdate`.
            agreement: As in `StepUpdate`.
        """
        window = self.windows.get(optimizer)
        if window is not None:
            window.update.replace_parameters(parameters, local_squares, agreement)
            return
        follows = self._ema is not None and self._ema.follows(parameters.tensors)
        update = StepUpdate(
            parameters,
            optimizer,
            self._config,
            self.loss_scale,
            ema=self._average.part() if self._average is not None and follows else None,
            reported=True,
            update_scale=functools.partial(self._shared_scale.gather, optimizer),
            local_squares=local_squares,
            agreement=agreement,
        )
        self.windows[optimizer] = OptimizerWindow(update, self.loss_scale.value)

    def arrange(self, optimizers: Iterable[Optimizer]) -> None:
        """Put the windows into the order of `optimizers`, which `state_dict` numbers them by."""
        ordered = {each: self.windows[each] for each in optimizers if each in self.windows}
        self.windows = ordered | self.windows

    def add_schedule(self, schedule: PendingSchedule) -> None:
        """Resolve a schedule with each flush from now on; do nothing if it was added before."""
        if schedule not in self._schedules:
            self._schedules.append(schedule)

    def end_schedules(self) -> list[PendingSchedule]:
        """Forget all schedules, and return them."""
        ended, self._schedules = self._schedules, []
        return ended

    def check_average(self) -> None:
        """Raise ``ValueError`` if no optimizer updates any of the averaged weights."""
        if self._average is not None and self.windows and not self._average.has_parts:
            msg = (
                "`ema` must average parameters of a prepared optimizer, got an average of other "
                "parameters"
            )
            raise ValueError(msg)

    def clear(self) -> None:
        """Forget all optimizers, all schedules and the average."""
        self.windows.clear()
        self.last_reports.clear()
        self._schedules.clear()
        self._shared_scale.discard()
        self._ema = self._average = None

    def first_gradient(self, loss: object) -> Tensor | None:
        """Return the gradient that backward may begin with in place of 1: the loss scale.

        The gradients are those of the loss times the loss scale, to the bit, and neither the loss
        nor its gradient has to be multiplied. ``None`` if the loss must be multiplied, or if the
        loss scale is 1.

        Args:
            loss: Loss of a micro-batch.
        """
        if not isinstance(loss, Tensor) or loss.dim() or loss.dtype != torch.float32:
            # The gradient of a float16 loss is float16, in which the loss scale would overflow.
            return None
        self._shared_scale.settle()
        return None if self.loss_scale.is_one else on_device(self.loss_scale.value, loss.device)

    def scaled(
        self, loss: Tensor, micro_batch: int | None = None, *, multiplies: bool = True
    ) -> Tensor:
        """Return the loss times the loss scale; call it before backward.

        Args:
            loss: Loss of a micro-batch. If it has several elements, reports show their mean.
            micro_batch: Number of the micro-batch within its update; ``None`` if the loop does not
                number its micro-batches.
            multiplies: Whether to multiply the loss; ``False`` if backward begins with
                `first_gradient`.

        Raises:
            TypeError: If `loss` is not a tensor.
        """
        if not isinstance(loss, Tensor):
            msg = f"`loss` must be a tensor, got {described(loss)}"
            raise TypeError(msg)
        self._shared_scale.settle()
        self._forget_reported()
        detached = loss.detach() if loss.dim() == 0 else loss.detach().float().mean()
        for window in self.windows.values():
            window.before_backward(detached, micro_batch)
        if self.loss_scale.is_one or not multiplies:
            return loss
        return loss * on_device(self.loss_scale.value, loss.device)

    def report_losses(self, losses: Mapping[str, Tensor]) -> None:
        """Report named losses of a micro-batch with its update; see `StepReport`.

        Args:
            losses: Tensors of one element by name. Ignored in an evaluation: if gradients are off
                and none of them has one.
        """
        if not torch.is_grad_enabled() and not any(v.requires_grad for v in losses.values()):
            return
        self._forget_reported()
        device = self.loss_scale.value.device
        self._losses.append(
            {name: on_device(v.detach().float().reshape(()), device) for name, v in losses.items()}
        )

    def _forget_reported(self) -> None:
        if self._are_reported:
            self._losses, self._are_reported = [], False

    def update(self, optimizer: Optimizer, accumulation_steps: int = 1) -> StepReport:
        """Do the update of one optimizer.

        Args:
            optimizer: Optimizer without accelerate's wrapper.
            accumulation_steps: Number by which the loop has divided each loss.

        Raises:
            RuntimeError: If the optimizer's gradients come from a loss that was not scaled, if the
                loss scale is not 1 and they contain gradients of its last update, if they have
                changed since they were clipped, if the averages are swapped in, or if
                ``max_consecutive_skips`` updates in a row were skipped.
        """
        window = self.windows[optimizer]
        if self._ema is not None:
            # A clip has perhaps measured the gradients before the block began.
            self._ema.refuse_inside_swap("optimizer.step")
        unscaled = not window.num_backward and window.has_unused_gradients()
        holds_used = not unscaled and window.holds_used_gradients()
        if holds_used and self.loss_scale.is_one:
            warnings.warn(_USED_AGAIN, stacklevel=4)
        elif holds_used:
            msg = (
                "`optimizer.step` found gradients that its last call has already divided by the "
                "loss scale, and would divide them again; call `accelerator.backward` before each "
                "`optimizer.step`, and `optimizer.zero_grad` after it"
            )
            raise RuntimeError(msg)
        if unscaled and not self.loss_scale.is_one:
            msg = (
                "`optimizer.step` found gradients that do not come from "
                "`accelerator.backward(loss)`: they would be divided by the loss scale without "
                "having been multiplied by it; call `accelerator.backward` instead of "
                "`loss.backward`"
            )
            raise RuntimeError(msg)
        measured = window.measured()
        for call in self.before_update:
            call()
        # Flush only after the call that measures this update's gradients. The call has queued work,
        # so the device is busy while the host waits for the result of the previous update.
        self.flush()
        losses = mean_by_name(self._losses) if self._losses else None
        with lowered_rates(optimizer, self.rate_factor):
            report = window.apply(measured, accumulation_steps, losses)
        if self.rate_factor != 1:
            report = dataclasses.replace(report, learning_rate_factor=self.rate_factor)
        self.last_report = self.last_reports[optimizer] = report
        self._are_reported = True
        return report

    def _gradients_are_used(self, but: Optimizer | None) -> bool:
        others = (window for each, window in self.windows.items() if each is not but)
        return not any(window.has_unused_gradients() for window in others)

    def outcome_is_known(self, optimizer: Optimizer) -> bool:
        """Return whether `was_skipped` returns without synchronizing with the device.

        It does if the parameters are on a CPU, if the optimizer's last update read the skip flag on
        the host anyway, or if there has been no update since the last flush.
        """
        window = self.windows.get(optimizer)
        return window is None or window.update.counts.outcome_is_known

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's last update was skipped; False before its first update.

        Synchronizes with the device unless `outcome_is_known`.
        """
        window = self.windows.get(optimizer)
        return window is not None and window.update.counts.was_skipped()

    def flush(self) -> None:
        """Wait for the results of the last updates, and advance the schedules if they were applied.

        Synchronizes with the device.

        Raises:
            RuntimeError: If ``max_consecutive_skips`` updates in a row were skipped.
        """
        try:
            for window in self.windows.values():
                window.update.flush()
        finally:
            self.resolve_schedules()

    def resolve_schedules(self) -> None:
        """Do the postponed steps of all schedules. Synchronizes with the device if there are any.

        Too many skips in a row raise no error here, see `UpdateCounts.was_skipped`.
        """
        for schedule in self._schedules:
            schedule.resolve()

    def state_dict(self) -> dict[str, Any]:
        """Flush, then return loss scale, counters, earlier norms and average.

        The tensors of the average are the live ones, not copies.
        """
        self.flush()
        for window in self.windows.values():
            window.update.parameters.warn_of_replaced()
        updates = {
            str(index): state_of(window.update.state_owners())
            for index, window in enumerate(self.windows.values())
        }
        return self._state().state_dict({"updates": updates})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; change nothing if a part does not fit.

        Pending results of earlier updates are dropped.

        Raises:
            KeyError: If a key is missing or unknown.
            RuntimeError: If the averages are swapped in.
            TypeError: If a value has the wrong type.
            ValueError: If a value has the wrong shape or range.
        """
        self._state().load_state_dict(state_dict, self._owners(state_dict))
        self._shared_scale.discard()
        if self._average is not None:
            self._average.discard()
        for window in self.windows.values():
            window.restart()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the errors of `load_state_dict` without changing anything."""
        self._state().check(state_dict, self._owners(state_dict))

    def _state(self) -> StepState:
        return StepState(self.loss_scale, self._ema)

    def _owners(self, state_dict: Mapping[str, Any]) -> OwnedStates:
        """Return the owners of the updates' states, each with its entry of `state_dict`."""
        check_keys(state_dict, self._state().keys("updates"), "loop")
        updates = state_dict["updates"]
        numbers = {str(index) for index in range(len(self.windows))}
        check_keys(updates, numbers, "loop's optimizers")
        return [
            (owner, updates[str(index)])
            for index, window in enumerate(self.windows.values())
            for owner in window.update.state_owners()
        ]


@final
class SharedLossScale:
    """Share one loss scale among the updates of several optimizers.

    While one optimizer does its update, another optimizer may still have unused gradients. These
    gradients were computed with the present scale, so the scale must not change before that
    optimizer has used them. The overflow flags of the updates are therefore collected. When all
    optimizers have used their gradients, the scale is updated once. This update counts as an
    overflow if any of the flags is set.

    Args:
        loss_scale: Live loss scale.
        gradients_are_used: Function that returns whether all optimizers but a given one have used
            their gradients.
    """

    def __init__(
        self, loss_scale: LossScale, gradients_are_used: Callable[[Optimizer | None], bool]
    ) -> None:
        self._loss_scale = loss_scale
        self._gradients_are_used = gradients_are_used
        self._overflow: Tensor | None = None

    def gather(self, optimizer: Optimizer, overflow: Tensor) -> None:
        """Collect the overflow flag of an update of an optimizer."""
        self._overflow = overflow if self._overflow is None else self._overflow | overflow
        self.settle(but=optimizer)

    def settle(self, *, but: Optimizer | None = None) -> None:
        """Update the scale with the collected flags if all optimizers have used their gradients.

        Args:
            but: Optimizer whose update is running, and uses its gradients.
        """
        if self._overflow is not None and self._gradients_are_used(but):
            self._loss_scale.update(self._overflow)
            self._overflow = None

    def discard(self) -> None:
        """Forget the collected flags."""
        self._overflow = None


@final
class SharedAverage:
    """Update an average whose weights belong to several optimizers.

    The average is updated when every optimizer has done one update. If an optimizer does a second
    update before the others have done their first, the average is updated just before that second
    update is noted.

    Args:
        ema: Average of the weights.
    """

    def __init__(self, ema: ExponentialMovingAverage) -> None:
        self._ema = ema
        self._num_parts = 0
        self._applied: dict[int, Tensor] = {}

    def part(self) -> "AveragePart":
        """Register one more optimizer; return what its update takes for the average."""
        number, self._num_parts = self._num_parts, self._num_parts + 1
        return AveragePart(self._ema.begin_update, functools.partial(self._gather, number))

    @property
    def has_parts(self) -> bool:
        """Whether the average follows the updates of any optimizer."""
        return self._num_parts > 0

    def _gather(self, part: int, applied: Tensor) -> None:
        if part in self._applied:
            self._follow()
        self._applied[part] = applied
        if len(self._applied) == self._num_parts:
            self._follow()

    def _follow(self) -> None:
        applied = functools.reduce(operator.or_, self._applied.values())
        self._applied = {}
        self._ema.update(applied)

    def discard(self) -> None:
        """Forget the updates that were noted."""
        self._applied = {}


class AveragePart(NamedTuple):
    """A `SharedAverage` as one of its optimizers sees it."""

    begin_update: Callable[[], None]
    """Prepares the average for an update; see `ExponentialMovingAverage.begin_update`."""

    update: Callable[[Tensor], None]
    """Notes whether an update of the optimizer was applied."""
