"""The step of a hand-written loop: backward, clipping and optimizer come as calls of their own."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, final

from torch import Tensor
from torch.optim import Optimizer

from mfwrap.accelerate.clipping import clip_grad_norm, clip_grad_value
from mfwrap.accelerate.optimizer_window import OptimizerWindow
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

__all__ = [
    "Loop",
    "LoopStep",
    "PendingSchedule",
    "SharedAverage",
    "SharedLossScale",
]


class Loop(Protocol):
    """What a step asks its loop; accelerate's ``Accelerator`` is one."""

    @property
    def sync_gradients(self) -> bool:
        """Whether this is the last micro-batch of an update."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """What each loss is divided by before its backward."""

    @property
    def step(self) -> int:
        """Number of the micro-batch within its update."""


class PendingSchedule(Protocol):
    """A schedule that waits to learn whether the last update was applied."""

    def resolve(self) -> None:
        """Advance, or not, as the last update asks for."""


@final
class LoopStep:
    """Updates of one or several optimizers that share loss scale and average.

    Args:
        config: Settings of the step.
        loss_scale: The live loss scale.
        loop: The loop that calls.
    """

    def __init__(self, config: StepConfig, loss_scale: LossScale, loop: Loop) -> None:
        self.loss_scale = loss_scale
        self.last_report: StepReport | None = None
        """Of the optimizer that did the last update; ``None`` before the first."""
        self.schedules: list[PendingSchedule] = []
        """Resolved before each update and by `flush`."""
        self._config = config
        self._loop = loop
        self._ema: ExponentialMovingAverage | None = None
        self._average: SharedAverage | None = None
        self._windows: dict[Optimizer, OptimizerWindow] = {}
        self._stepping: OptimizerWindow | None = None
        self._shared_scale = SharedLossScale(loss_scale, self._others_are_used)

    @property
    def windows(self) -> Mapping[Optimizer, OptimizerWindow]:
        """The windows of all optimizers, in the order in which they were added."""
        return self._windows

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
        """Add an optimizer, or replace what it updates.

        Args:
            optimizer: The optimizer itself, no wrapper around it.
            parameters: What it updates.
            local_squares: As in `StepUpdate`.
            agreement: As in `StepUpdate`.
        """
        window = self._windows.get(optimizer)
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
        self._windows[optimizer] = OptimizerWindow(update, self.loss_scale.value)

    def check_average(self) -> None:
        """Raise ``ValueError`` if the average is of nothing that an optimizer holds."""
        if self._average is not None and self._windows and not self._average.has_parts:
            msg = "`ema` must average parameters of a prepared optimizer, got an average of others"
            raise ValueError(msg)

    def clear(self) -> None:
        """Forget all optimizers and schedules, and what the average follows."""
        self._windows.clear()
        self.schedules.clear()
        self._shared_scale.discard()
        self._ema = self._average = None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, in float32 or better.

        Args:
            loss: As it is differentiated.

        Raises:
            TypeError: If it is not a tensor.
        """
        if not isinstance(loss, Tensor):
            msg = f"`loss` must be a tensor, got {described(loss)}"
            raise TypeError(msg)
        self._shared_scale.settle()
        detached = loss.detach() if loss.dim() == 0 else loss.detach().float().mean()
        for window in self._windows.values():
            window.before_backward(detached, self._loop.step)
        if self.loss_scale.is_one:
            return loss
        return loss * on_device(self.loss_scale.value, loss.device)

    def clip_grad_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip unscaled gradients by their norm; see `clip_grad_norm` of the clipping room."""
        return clip_grad_norm(
            list(self._windows.values()),
            parameters,
            self.loss_scale.value,
            max_norm=max_norm,
            norm_type=norm_type,
            may_fold=self._loop.sync_gradients,
        )

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp the elements of unscaled gradients; see `clip_grad_value` of the clipping room."""
        clip_grad_value(list(self._windows.values()), parameters, clip_value)

    def unscale(self, optimizers: Iterable[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale, in place, once.

        Args:
            optimizers: Whose; ``None`` for all.
        """
        for optimizer in self._windows if optimizers is None else optimizers:
            self._windows[optimizer].unscale()

    def give_up(self, optimizer: Optimizer) -> None:
        """Forget what is known of gradients that have been zeroed."""
        self._windows[optimizer].open()

    def update(self, optimizer: Optimizer) -> StepReport:
        """Do the update of one optimizer.

        Raises:
            RuntimeError: If its gradients come from no scaled loss, have changed since they were
                clipped, or the last update was one skip too many.
        """
        window = self._windows[optimizer]
        unscaled = not window.has_backward and window.has_unused_gradients()
        if unscaled and not self.loss_scale.is_one:
            msg = (
                "gradients must come from a scaled loss, got some with a loss scale other than 1 "
                "and no `accelerator.backward(loss)` since the last step"
            )
            raise RuntimeError(msg)
        window.measured()
        # After this update's own gradients were measured, so that the device is busy meanwhile.
        self.flush()
        self._stepping = window
        try:
            self.last_report = window.apply(self._loop.gradient_accumulation_steps)
        finally:
            self._stepping = None
        return self.last_report

    def _others_are_used(self) -> bool:
        others = (w for w in self._windows.values() if w is not self._stepping)
        return not any(window.has_unused_gradients() for window in others)

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's last update was skipped; waits for it."""
        if optimizer not in self._windows:
            return False
        counts = self._windows[optimizer].update.counts
        counts.flush()
        return counts.last_was_skipped

    def flush(self) -> None:
        """Wait for what is pending of the last updates, and advance schedules.

        Raises:
            RuntimeError: If an update was one skip too many.
        """
        try:
            for window in self._windows.values():
                window.update.flush()
        finally:
            for schedule in self.schedules:
                schedule.resolve()

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale, counters and average, after a flush; the average's are no copies."""
        self.flush()
        counts = [window.update.counts for window in self._windows.values()]
        state: dict[str, Any] = {
            "loss_scale": self.loss_scale.state_dict(),
            "updates": {str(index): each.state_dict() for index, each in enumerate(counts)},
        }
        if self._ema is not None:
            state["ema"] = self._ema.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is changed if anything does not fit.

        What is pending and what has gathered is dropped.

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
        for window in self._windows.values():
            window.open()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would raise, and change nothing."""
        check(*self._owners(state_dict))

    def _owners(self, state_dict: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return loss scale, counts and average, each with its state."""
        expected = {"loss_scale", "updates"} | (set() if self._ema is None else {"ema"})
        check_keys(state_dict, expected, "loop")
        updates = state_dict["updates"]
        numbers = {str(index) for index in range(len(self._windows))}
        check_keys(updates, numbers, "loop's optimizers")
        counts = [
            (window.update.counts, updates[str(index)])
            for index, window in enumerate(self._windows.values())
        ]
        average = None if self._ema is None else (self._ema, state_dict["ema"])
        return (self.loss_scale, state_dict["loss_scale"]), counts, average


@final
class SharedLossScale:
    """The loss scale as each of several optimizers' updates sees it.

    Gradients that wait for another optimizer were made with the scale as it is. It therefore
    changes when no gradient is left unused, and then once, for the overflow of any.

    Args:
        loss_scale: The live loss scale.
        gradients_are_used: Whether no optimizer but the one being updated has unused gradients.
    """

    def __init__(self, loss_scale: LossScale, gradients_are_used: Callable[[], bool]) -> None:
        self._loss_scale = loss_scale
        self._gradients_are_used = gradients_are_used
        self._overflow: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """Shape ``()``, float32, changed in place."""
        return self._loss_scale.value

    @property
    def is_one(self) -> bool:
        """Whether the scale is known to be 1 without asking the device."""
        return self._loss_scale.is_one

    def update(self, overflow: Tensor) -> Tensor:
        """Learn whether an update's gradients overflowed; return the flag."""
        self._overflow = overflow if self._overflow is None else self._overflow | overflow
        self.settle()
        return overflow

    def settle(self) -> None:
        """Let the update cell see what has gathered, unless gradients wait."""
        if self._overflow is not None and self._gradients_are_used():
            self._loss_scale.update(self._overflow)
            self._overflow = None

    def discard(self) -> None:
        """Forget what has gathered."""
        self._overflow = None


@final
class SharedAverage:
    """An average whose weights several optimizers update.

    It follows when each of them has done its update, or when one does its next.

    Args:
        ema: The average.
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
        """Whether any optimizer's update is followed."""
        return self._num_parts > 0

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are in the parameters."""
        self._ema.refuse_inside_swap(method)

    def gather(self, part: int, applied: Tensor) -> None:
        """Note an update of one optimizer; follow the weights when all have done theirs."""
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
        """Forget what has gathered."""
        self._applied = {}


@final
class AveragePart:
    """A `SharedAverage` as one optimizer's update sees it."""

    def __init__(self, average: SharedAverage, part: int) -> None:
        self._average = average
        self._part = part

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are in the parameters."""
        self._average.refuse_inside_swap(method)

    def update(self, applied: Tensor) -> None:
        """Note this optimizer's update."""
        self._average.gather(self._part, applied)
