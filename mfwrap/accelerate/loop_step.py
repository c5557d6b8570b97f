"""The step of a loop with one or several optimizers, which share a loss scale and an average.

The loop scales each loss (`LoopStep.scaled`), runs backward, may clip through an optimizer's window
(`mfwrap.accelerate.gradients`), and lets each optimizer do its update (`LoopStep.update`).
accelerate is not known here: its calls arrive by way of `mfwrap.accelerate.classes`.

Several optimizers make two things harder. The loss scale may not change while the gradients of
another optimizer wait, since they were made with the present scale (`SharedLossScale`). An average
must follow once the weights of all its optimizers are updated, not after each (`SharedAverage`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, final

from torch import Tensor
from torch.optim import Optimizer

from mfwrap.accelerate.gradients import OptimizerWindow
from mfwrap.arguments import described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import LossScale
from mfwrap.outputs import StepReport
from mfwrap.step.local_norms import LocalSquares
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.ranks import RankAgreement
from mfwrap.step.state import check, check_keys, restore
from mfwrap.step.update import StepUpdate
from mfwrap.tensors.shards import on_device


class PendingSchedule(Protocol):
    """A schedule whose steps are postponed until it is known whether the update was applied."""

    def resolve(self) -> None:
        """Do the postponed steps if the last update was applied; drop them if it was skipped."""


@final
class LoopStep:
    """Updates of one or several optimizers that share a loss scale and an average.

    Args:
        config: Settings of the step.
        loss_scale: Live loss scale.
    """

    def __init__(self, config: StepConfig, loss_scale: LossScale) -> None:
        self.loss_scale = loss_scale
        self.last_report: StepReport | None = None
        """Report of the last update, by whichever optimizer; ``None`` before the first."""
        self.schedules: list[PendingSchedule] = []
        """Schedules that are resolved before each update and by `flush`."""
        self.windows: dict[Optimizer, OptimizerWindow] = {}
        """Window of each optimizer, in the order in which they were added."""
        self._config = config
        self._ema: ExponentialMovingAverage | None = None
        self._average: SharedAverage | None = None
        self._stepping: OptimizerWindow | None = None
        self._shared_scale = SharedLossScale(loss_scale, self._others_are_used)

    def follow(self, ema: ExponentialMovingAverage) -> None:
        """Let an average follow the updates of all optimizers that are added from now on."""
        self._ema = ema
        self._average = SharedAverage(ema)

    def add(
        self,
        optimizer: Optimizer,
        parameters: TrainedParameters,
        *,
        local_squares: LocalSquares | None = None,
        agreement: RankAgreement | None = None,
    ) -> None:
        """Add an optimizer, or replace the parameters that it updates.

        Args:
            optimizer: Optimizer without accelerate's wrapper.
            parameters: Parameters that it updates.
            local_squares: As in `StepUpdate`.
            agreement: As in `StepUpdate`.
        """
        window = self.windows.get(optimizer)
        if window is not None:
            window.update.parameters = parameters
            window.update.local_squares = local_squares
            window.update.agreement = agreement
            return
        follows = self._ema is not None and self._ema.follows(parameters.tensors)
        update = StepUpdate(
            parameters,
            optimizer,
            self._config,
            self._shared_scale,
            ema=self._average.part() if self._average is not None and follows else None,
            reported=True,
            local_squares=local_squares,
            agreement=agreement,
        )
        self.windows[optimizer] = OptimizerWindow(update, self.loss_scale.value)

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
        self.schedules.clear()
        self._shared_scale.discard()
        self._ema = self._average = None

    def scaled(self, loss: Tensor, micro_batch: int = 0) -> Tensor:
        """Return the loss times the loss scale, in float32 or better; call it before backward.

        Args:
            loss: Loss of a micro-batch, as it is differentiated.
            micro_batch: Number of the micro-batch within its update.

        Raises:
            TypeError: If `loss` is not a tensor.
        """
        if not isinstance(loss, Tensor):
            msg = f"`loss` must be a tensor, got {described(loss)}"
            raise TypeError(msg)
        self._shared_scale.settle()
        detached = loss.detach() if loss.dim() == 0 else loss.detach().float().mean()
        for window in self.windows.values():
            window.before_backward(detached, micro_batch)
        if self.loss_scale.is_one:
            return loss
        return loss * on_device(self.loss_scale.value, loss.device)

    def update(self, optimizer: Optimizer, accumulation_steps: int = 1) -> StepReport:
        """Do the update of one optimizer.

        Args:
            optimizer: Optimizer without accelerate's wrapper.
            accumulation_steps: Number by which the loop has divided each loss.

        Raises:
            RuntimeError: If its gradients come from a loss that was not scaled, they have changed
                since they were clipped, or too many updates in a row were skipped.
        """
        window = self.windows[optimizer]
        unscaled = not window.has_backward and window.has_unused_gradients()
        if unscaled and not self.loss_scale.is_one:
            msg = (
                "`optimizer.step` found gradients that do not come from "
                "`accelerator.backward(loss)`: they would be divided by the loss scale without "
                "having been multiplied by it; call `accelerator.backward` instead of "
                "`loss.backward`"
            )
            raise RuntimeError(msg)
        window.measured()
        # Not before this update's own gradients are measured: the device has that work queued
        # while the host reads the result of the update before.
        self.flush()
        self._stepping = window
        try:
            self.last_report = window.apply(accumulation_steps)
        finally:
            self._stepping = None
        return self.last_report

    def _others_are_used(self) -> bool:
        others = (w for w in self.windows.values() if w is not self._stepping)
        return not any(window.has_unused_gradients() for window in others)

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's last update was skipped. Synchronizes with the device."""
        if optimizer not in self.windows:
            return False
        counts = self.windows[optimizer].update.counts
        counts.flush()
        return counts.last_was_skipped

    def flush(self) -> None:
        """Read the results of the last updates, and advance the schedules accordingly.

        Synchronizes with the device.

        Raises:
            RuntimeError: If too many updates in a row were skipped.
        """
        try:
            for window in self.windows.values():
                window.update.flush()
        finally:
            for schedule in self.schedules:
                schedule.resolve()

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale, counters and average, after a flush.

        The average's tensors are not copies.
        """
        self.flush()
        counts = [window.update.counts for window in self.windows.values()]
        state: dict[str, Any] = {
            "loss_scale": self.loss_scale.state_dict(),
            "updates": {str(index): each.state_dict() for index, each in enumerate(counts)},
        }
        if self._ema is not None:
            state["ema"] = self._ema.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is changed if any part does not fit.

        Results that have not been read yet are dropped.

        Raises:
            KeyError: If a key is missing or unknown.
            RuntimeError: If the averages are swapped in.
            TypeError: If a value has the wrong type.
            ValueError: If a value has the wrong shape or range.
        """
        restore(*self._owners(state_dict))
        self._shared_scale.discard()
        if self._average is not None:
            self._average.discard()
        for window in self.windows.values():
            window.open()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would raise; change nothing."""
        check(*self._owners(state_dict))

    def _owners(self, state_dict: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return loss scale, counts and average, each with its state."""
        expected = {"loss_scale", "updates"} | (set() if self._ema is None else {"ema"})
        check_keys(state_dict, expected, "loop")
        updates = state_dict["updates"]
        numbers = {str(index) for index in range(len(self.windows))}
        check_keys(updates, numbers, "loop's optimizers")
        counts = [
            (window.update.counts, updates[str(index)])
            for index, window in enumerate(self.windows.values())
        ]
        average = None if self._ema is None else (self._ema, state_dict["ema"])
        return (self.loss_scale, state_dict["loss_scale"]), counts, average


@final
class SharedLossScale:
    """The loss scale as each of several optimizers' updates sees it.

    Gradients that wait for another optimizer were made with the present scale, so the scale must
    not change before they are used. Overflows are therefore collected. The scale changes once, for
    all of them, when no optimizer has unused gradients left.

    Args:
        loss_scale: Live loss scale.
        gradients_are_used: Returns whether no optimizer except the one that is being updated has
            unused gradients.
    """

    def __init__(self, loss_scale: LossScale, gradients_are_used: Callable[[], bool]) -> None:
        self._loss_scale = loss_scale
        self._gradients_are_used = gradients_are_used
        self._overflow: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """Loss scale, shape ``()``, float32, changed in place."""
        return self._loss_scale.value

    @property
    def is_one(self) -> bool:
        """Whether the scale is known to be 1 without asking the device."""
        return self._loss_scale.is_one

    def update(self, overflow: Tensor) -> Tensor:
        """Collect the overflow flag of an update, and return it."""
        self._overflow = overflow if self._overflow is None else self._overflow | overflow
        self.settle()
        return overflow

    def settle(self) -> None:
        """Update the scale with the collected flags, unless gradients are still unused."""
        if self._overflow is not None and self._gradients_are_used():
            self._loss_scale.update(self._overflow)
            self._overflow = None

    def discard(self) -> None:
        """Forget the collected flags."""
        self._overflow = None


@final
class SharedAverage:
    """An average whose weights several optimizers update.

    It follows the weights when each optimizer has done its update, or when one of them does its
    next update before the others.

    Args:
        ema: Average of the weights.
    """

    def __init__(self, ema: ExponentialMovingAverage) -> None:
        self._ema = ema
        self._num_parts = 0
        self._applied: dict[int, Tensor] = {}

    def part(self) -> "AveragePart":
        """Return the average as one more optimizer's update sees it."""
        self._num_parts += 1
        return AveragePart(self, self._num_parts - 1)

    @property
    def has_parts(self) -> bool:
        """Whether the average follows the updates of any optimizer."""
        return self._num_parts > 0

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are swapped into the parameters."""
        self._ema.refuse_inside_swap(method)

    def gather(self, part: int, applied: Tensor) -> None:
        """Note an update of one optimizer; follow the weights when all have done theirs.

        Args:
            part: Number of the optimizer.
            applied: Whether its update was applied, shape ``()``, bool.
        """
        if part in self._applied:
            self._follow()
        self._applied[part] = applied
        if len(self._applied) == self._num_parts:
            self._follow()

    def _follow(self) -> None:
        first, *others = self._applied.values()
        self._applied = {}
        for applied in others:
            first = first | applied
        self._ema.update(first)

    def discard(self) -> None:
        """Forget the updates that were noted."""
        self._applied = {}


@final
class AveragePart:
    """A `SharedAverage` as one optimizer's update sees it."""

    def __init__(self, average: SharedAverage, part: int) -> None:
        self._average = average
        self._part = part

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are swapped into the parameters."""
        self._average.refuse_inside_swap(method)

    def update(self, applied: Tensor) -> None:
        """Note an update of this optimizer."""
        self._average.gather(self._part, applied)
