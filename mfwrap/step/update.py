"""The half of a training step after backward, in one fixed order."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.arguments import described, needed_arguments
from mfwrap.config import StepConfig
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.clipping import clip_coefficient
from mfwrap.step.counts import UpdateCounts
from mfwrap.step.forward import Normalizer
from mfwrap.step.local_norms import LocalSquares
from mfwrap.step.optimizers import SkippableOptimizer, learning_rates
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.ranks import RankAgreement
from mfwrap.tensors.norm_groups import NormGroups
from mfwrap.tensors.norms import sum_of_squares, sums_by_group
from mfwrap.tensors.sharded_norms import SquareReduction
from mfwrap.tensors.shards import local_tensors

__all__ = [
    "Average",
    "LiveLossScale",
    "Measurement",
    "Schedule",
    "StepUpdate",
    "checked_schedule",
    "measure",
]


class Measurement(NamedTuple):
    """One read of the gradients; tensors on the training device."""

    overflow: Tensor
    """Shape ``()``, bool: the gradients are not finite, scaled or unscaled, or what they are
    divided by is no positive, finite number."""

    divisor: Tensor | None
    """Shape ``()``, float32: what makes the gradients unscaled, a copy; ``None`` if nothing has
    to."""

    global_norm: Tensor
    """Shape ``()``, float32: L2 norm of all unscaled gradients, the same on all ranks."""

    local_norm: Tensor
    """Shape ``(G,)``, float32: L2 norm by group of this rank's own unscaled gradients."""

    groups: NormGroups
    """The ``G`` groups."""

    has_targets: Tensor | None
    """Shape ``()``, bool: whether there is anything to learn from; ``None`` for yes."""


def measure(
    gradients: Sequence[Tensor | None],
    groups: NormGroups,
    loss_scale: Tensor,
    normalizer: Normalizer | None = None,
    *,
    local_squares: LocalSquares | None = None,
    agreement: RankAgreement | None = None,
    reduction: SquareReduction | None = None,
) -> Measurement:
    """Read the gradients once. Does not wait for the device.

    Args:
        gradients: Scaled, one for each parameter of `groups`; ``None`` counts as zeros.
        groups: Groups of local norms.
        loss_scale: Shape ``()``, float32, on the training device.
        normalizer: What the gradients are divided by beside the loss scale; ``None`` for 1.
        local_squares: This rank's own gradients; ``None`` if those that are read are its own.
        agreement: With ranks whose gradients differ after their reduction; ``None`` for none.
        reduction: With ranks that share the gradients, of all parameters; ``None`` for none. It
            agrees, too, and takes a partial `normalizer` along.

    Returns:
        Norms of the unscaled gradients, and whether they are finite.
    """
    squares = sum_of_squares(local_tensors(gradients), loss_scale.device)
    own_squares = None if local_squares is None else local_squares.squares(squares)
    if reduction is not None:
        squares, total = reduction(squares, None if normalizer is None else normalizer.reduced)
        if normalizer is not None and normalizer.is_partial:
            normalizer = Normalizer(total, normalizer.local)
    square = squares.sum() if agreement is None else agreement.mean(squares.sum())
    if normalizer is None:
        divisor = local_divisor = loss_scale.clone()
    else:
        divisor = loss_scale * _nonzero(normalizer.reduced)
        local_divisor = loss_scale * _nonzero(normalizer.local)
    if own_squares is None:
        own_squares = squares
    global_norm = square.sqrt() / divisor
    return Measurement(
        # A scale of 0 or below may have been set, and a denominator that is nan or infinite
        # returned, without anyone reading it.
        overflow=~(torch.isfinite(global_norm) & torch.isfinite(divisor) & (divisor > 0)),
        divisor=divisor,
        global_norm=global_norm,
        local_norm=sums_by_group(own_squares, groups.members).sqrt() / local_divisor,
        groups=groups,
        has_targets=None if normalizer is None else normalizer.reduced != 0,
    )


def _nonzero(divisor: Tensor) -> Tensor:
    # A batch without targets has gradients of zero; dividing them by zero would report nan.
    return torch.where(divisor == 0, 1.0, divisor)


class Schedule(Protocol):
    """A learning-rate schedule that is stepped once per applied update."""

    def step(self) -> None:
        """Set the rates of the next update."""


def checked_schedule(lr_scheduler: Any, optimizer: Optimizer) -> Schedule | None:
    """Return `lr_scheduler` if the step can advance it.

    Args:
        lr_scheduler: Of torch, or in accelerate's wrapper, or ``None``.
        optimizer: The optimizer itself.

    Raises:
        TypeError: If it has no ``step``, or one that needs an argument, such as a metric.
        ValueError: If it belongs to another optimizer.
    """
    if lr_scheduler is None:
        return None
    if not callable(getattr(lr_scheduler, "step", None)):
        msg = f"`lr_scheduler` must be a learning-rate scheduler, got {described(lr_scheduler)}"
        raise TypeError(msg)
    inner = getattr(lr_scheduler, "scheduler", lr_scheduler)
    needed = needed_arguments(inner, "step")
    if needed:
        msg = (
            f"`lr_scheduler` must advance by itself, got {type(inner).__name__}, whose step needs "
            f"{', '.join(needed)}; step one that follows a metric where you have evaluated"
        )
        raise TypeError(msg)
    if getattr(inner, "optimizer", optimizer) is not optimizer:
        msg = "`lr_scheduler` must be one of the cell's optimizer, got one of another optimizer"
        raise ValueError(msg)
    schedule: Schedule = lr_scheduler
    return schedule


class LiveLossScale(Protocol):
    """The loss scale as an update sees it; `LossScale` is one."""

    @property
    def value(self) -> Tensor:
        """Shape ``()``, float32, changed in place."""

    @property
    def is_one(self) -> bool:
        """Whether the scale is known to be 1 without asking the device."""

    def update(self, overflow: Tensor) -> Tensor:
        """Learn whether an update's gradients overflowed."""


class Average(Protocol):
    """The average of weights as an update sees it; `ExponentialMovingAverage` is one."""

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are in the parameters."""

    def update(self, applied: Tensor) -> None:
        """Follow the weights, if the update was applied."""


@final
class StepUpdate:
    """Measure, decide, update: everything that follows the backward of the last micro-batch.

    Called, it does one whole update. Where others ask for norms before the optimizer runs,
    `measure` and `apply` are the same in two calls.

    Args:
        parameters: What is updated.
        optimizer: The optimizer itself, no wrapper around it.
        config: Settings of the step.
        loss_scale: The live loss scale, on the parameters' device.
        lr_scheduler: Stepped once per applied update, before the next one; ``None`` for none.
        ema: Follows applied updates; ``None`` for none.
        reported: Whether `last_was_skipped` is asked for on the host.
        local_squares: Where the norms of this rank's own gradients come from; ``None`` if the
            gradients that are updated from are its own.
        agreement: With ranks whose gradients differ after their reduction; ``None`` for none.

    Raises:
        ValueError: If `optimizer` is of a kind that is not supported.
    """

    def __init__(
        self,
        parameters: TrainedParameters,
        optimizer: Optimizer,
        config: StepConfig,
        loss_scale: LiveLossScale,
        *,
        lr_scheduler: Schedule | None = None,
        ema: Average | None = None,
        reported: bool = False,
        local_squares: LocalSquares | None = None,
        agreement: RankAgreement | None = None,
    ) -> None:
        self._config = config
        self._optimizer = SkippableOptimizer(optimizer)
        self.parameters = parameters
        self.local_squares = local_squares
        self.agreement = agreement
        self._device = parameters.device
        self._loss_scale = loss_scale
        self._ema = ema
        self.counts = UpdateCounts(
            self._device,
            config.max_consecutive_skips,
            on_applied=None if lr_scheduler is None else lr_scheduler.step,
            reported=reported,
        )

    def __call__(self, loss: Tensor, normalizer: Normalizer | None = None) -> StepReport:
        """Do one update from the gradients as they are, and release them.

        Args:
            loss: Shape ``()``, float32, detached: reported.
            normalizer: What the gradients are divided by beside the loss scale; ``None`` for 1.

        Raises:
            RuntimeError: If no parameter has a gradient, the optimizer's parameters are others
                than at construction, the averages are swapped in, or the last step was one skip
                too many.
            TypeError: If a gradient is sparse.
        """
        try:
            return self.apply(loss, self.measure(normalizer))
        finally:
            self.release_gradients()

    def release_gradients(self) -> None:
        """Set all gradients to ``None``, and forget what was seen of them."""
        self.parameters.release_gradients()
        self.forget_local_squares()

    def forget_local_squares(self) -> None:
        """Forget what was seen of this rank's own gradients."""
        if self.local_squares is not None:
            self.local_squares.reset()

    def measure(
        self, normalizer: Normalizer | None = None, *, may_be_absent: bool = False
    ) -> Measurement:
        """Read the gradients once. Does not wait for the device.

        Args:
            normalizer: What the gradients are divided by beside the loss scale; ``None`` for 1.
            may_be_absent: Take no gradient at all for zeros instead of raising.

        Raises:
            RuntimeError: As a call.
            TypeError: If a gradient is sparse.
        """
        if self._ema is not None:
            self._ema.refuse_inside_swap("update")
        groups = self.parameters.groups()
        gradients = self.parameters.gradients(may_be_absent=may_be_absent)
        # Inside a caller's autocast, products of norms would be taken in half precision.
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            measured = measure(
                gradients,
                groups,
                self._loss_scale.value,
                normalizer,
                local_squares=self.local_squares,
                agreement=self.agreement,
                reduction=self.parameters.reduction,
            )
        if normalizer is None and self._loss_scale.is_one:
            return measured._replace(divisor=None)
        return measured

    def apply(
        self,
        loss: Tensor,
        measured: Measurement,
        coefficient: Tensor | None = None,
    ) -> StepReport:
        """Decide, and update weights, loss scale, average and counts.

        Args:
            loss: Shape ``()``, float32, detached: reported.
            measured: Of the gradients as they are.
            coefficient: Shape ``()``, float32: what gradients are multiplied by to clip them;
                ``None`` to clip as configured.

        Raises:
            RuntimeError: If the averages are swapped in, or the last step was one skip too many.
        """
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            # As late as it can be: this step's backward is queued, so the device is busy
            # meanwhile, and still in time for this update's learning rate.
            self.flush()
            applied = ~self._skips(measured)
            divisor = self._clipped_divisor(measured, coefficient)
            rates = learning_rates(self._optimizer.optimizer, self._device)
            self._optimizer.step(divisor, ~applied)
            # After what may raise: an error must leave the scale as it was.
            self._loss_scale.update(measured.overflow)
            if self._ema is not None:
                self._ema.update(applied)
            self.counts.count(applied)
            report = self._report(
                loss, measured, applied, rates, norm_is_asked_for=coefficient is not None
            )
            self.counts.submit(report, measured.local_norm)
        return report

    def flush(self) -> None:
        """Wait for what is pending of the last update and act on it.

        Raises:
            RuntimeError: If the last update was the ``max_consecutive_skips``-th skip in a row.
        """
        self.counts.flush()

    def _skips(self, measured: Measurement) -> Tensor:
        skips = measured.overflow
        if self._config.use_skip_data_by_global_norm:
            # Not `>=`: a norm that is nan is skipped, too.
            skips = skips | ~(measured.global_norm < self._config.global_norm_spike_threshold)
        if measured.has_targets is not None:
            skips = skips | ~measured.has_targets
        return skips

    def configured_coefficient(self, measured: Measurement) -> Tensor | None:
        """Return what the configuration clips gradients by; ``None`` if it does not clip."""
        if not self._config.use_clip_grad:
            return None
        return clip_coefficient(measured.global_norm, self._config.max_grad_norm)

    def _clipped_divisor(self, measured: Measurement, coefficient: Tensor | None) -> Tensor | None:
        if coefficient is None:
            coefficient = self.configured_coefficient(measured)
        if coefficient is None:
            return measured.divisor
        if measured.divisor is None:
            return coefficient.reciprocal()
        return measured.divisor / coefficient

    def _report(
        self,
        loss: Tensor,
        measured: Measurement,
        applied: Tensor,
        rates: Tensor,
        *,
        norm_is_asked_for: bool,
    ) -> StepReport:
        groups = measured.groups
        reports_norm = norm_is_asked_for or self._config.use_clip_grad
        output: StepOutput | LocalNormStepOutput = StepOutput(
            loss=loss,
            overflow=measured.overflow,
            loss_scale=self._loss_scale.value.clone(),
            learning_rate=rates[0],
            global_norm=measured.global_norm if reports_norm else None,
        )
        if self._config.local_norm:
            output = LocalNormStepOutput(
                **output._asdict(), local_norm=measured.local_norm, size=groups.sizes
            )
        return StepReport(
            output=output,
            skipped=~applied,
            learning_rates=rates,
            local_norm_names=groups.names,
            **self.counts.tensors(),
        )
