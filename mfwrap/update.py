"""The half of a training step after backward, in one fixed order."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mfwrap.arguments import described
from mfwrap.config import StepConfig
from mfwrap.deferred import DeferredReads
from mfwrap.ema import ExponentialMovingAverage
from mfwrap.gradients import NormGroups, clip_coefficient, sum_of_squares
from mfwrap.losses import Normalizer
from mfwrap.optimizers import SkippableOptimizer, learning_rates
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.parameters import TrainedParameters
from mfwrap.scale_sense import LossScale, ScaleSense

__all__ = ["Schedule", "StepUpdate", "checked_schedule"]

_COUNTERS = ("applied_updates", "skipped_updates", "consecutive_skips")


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
        TypeError: If it has no ``step``, or is stepped with a metric.
        ValueError: If it belongs to another optimizer.
    """
    if lr_scheduler is None:
        return None
    if not callable(getattr(lr_scheduler, "step", None)):
        msg = f"`lr_scheduler` must be a learning-rate scheduler, got {described(lr_scheduler)}"
        raise TypeError(msg)
    inner = getattr(lr_scheduler, "scheduler", lr_scheduler)
    if isinstance(inner, ReduceLROnPlateau):
        msg = (
            "`lr_scheduler` must advance by itself, got ReduceLROnPlateau; step it with its "
            "metric where you have evaluated"
        )
        raise TypeError(msg)
    if getattr(inner, "optimizer", optimizer) is not optimizer:
        msg = "`lr_scheduler` must be one of the cell's optimizer, got one of another optimizer"
        raise ValueError(msg)
    schedule: Schedule = lr_scheduler
    return schedule


class _Measurement(NamedTuple):
    """One read of the gradients."""

    overflow: Tensor
    divisor: Tensor
    """Shape ``()``, float32: what makes the gradients unscaled, a copy."""
    global_norm: Tensor
    local_norm: Tensor


class _Counters(NamedTuple):
    """Shape ``()``, int64 each; replaced at every step, so that reports keep their values."""

    applied_updates: Tensor
    skipped_updates: Tensor
    consecutive_skips: Tensor

    def after(self, applied: Tensor) -> "_Counters":
        skipped = ~applied
        return _Counters(
            self.applied_updates + applied,
            self.skipped_updates + skipped,
            (self.consecutive_skips + 1) * skipped,
        )


class _Arrival(NamedTuple):
    """What the host needs of a step: scalar tensors as they leave, numbers as they arrive."""

    skipped: Any
    consecutive_skips: Any
    loss_scale: Any
    step: Any


@final
class StepUpdate:
    """Measure, decide, update: everything that follows the backward of the last micro-batch.

    Args:
        network: Its parameters that `optimizer` holds are updated; a trainable parameter that
            it does not hold is named in one warning.
        optimizer: The optimizer itself, no wrapper around it.
        config: Settings of the step.
        scale_sense: The loss scale: a number, a tensor or an update cell.
        lr_scheduler: Stepped once per applied update, before the next one; ``None`` for none.
        ema: Follows applied updates; ``None`` for none.

    Raises:
        TypeError: If `scale_sense` is none of these.
        ValueError: If `optimizer` holds no parameter of `network` or is of a kind that is not
            supported, or `scale_sense` is not > 0 and finite or has another shape.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer,
        config: StepConfig,
        scale_sense: ScaleSense,
        *,
        lr_scheduler: Schedule | None = None,
        ema: ExponentialMovingAverage | None = None,
    ) -> None:
        self._config = config
        self._optimizer = SkippableOptimizer(optimizer)
        self._parameters = TrainedParameters(network, optimizer, config.local_norm_groups)
        self._device = self._parameters.device
        self.loss_scale = LossScale(scale_sense, self._device)
        self._lr_scheduler = lr_scheduler
        self._ema = ema
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        self._counters = _Counters(zero, zero, zero)
        self._reads = DeferredReads(self._device)
        self._reads.reserve(len(_Arrival._fields))

    @property
    def local_norm_names(self) -> tuple[str, ...]:
        """Names of the groups of local norms."""
        return self._parameters.groups().names

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
        # Inside a caller's autocast, products of norms would be taken in half precision.
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            try:
                return self._update(loss, normalizer)
            finally:
                self.release_gradients()

    def _update(self, loss: Tensor, normalizer: Normalizer | None) -> StepReport:
        if self._ema is not None:
            self._ema.refuse_inside_swap("update")
        groups = self._parameters.groups()
        measured = self._measure(self._parameters.gradients(), groups, normalizer)
        # As late as it can be: this step's backward is queued, so the device is busy meanwhile,
        # and still in time for this update's learning rate.
        self.flush()
        applied = ~self._skips(measured, normalizer)
        divisor = self._clipped_divisor(measured, normalizer)
        self.loss_scale.update(measured.overflow)
        rates = learning_rates(self._optimizer.optimizer, self._device)
        self._optimizer.step(divisor, ~applied)
        if self._ema is not None:
            self._ema.update(applied)
        self._counters = self._counters.after(applied)
        report = self._report(loss, measured, groups, applied, rates)
        self._submit(report, measured.local_norm)
        return report

    def flush(self) -> None:
        """Wait for what is pending of the last step and act on it.

        Raises:
            RuntimeError: If the last step was the ``max_consecutive_skips``-th skip in a row.
        """
        self._reads.flush()

    def release_gradients(self) -> None:
        """Set all gradients to ``None``, also of parameters that are in no optimizer."""
        self._parameters.release_gradients()

    def _measure(
        self,
        gradients: Sequence[Tensor | None],
        groups: NormGroups,
        normalizer: Normalizer | None,
    ) -> _Measurement:
        squares = sum_of_squares(gradients, self._device)
        square = squares.sum()
        scale = self.loss_scale.value
        if normalizer is None:
            divisor = local_divisor = scale.clone()
        else:
            divisor = scale * _nonzero(normalizer.reduced)
            local_divisor = scale * _nonzero(normalizer.local)
        return _Measurement(
            # A scale of 0 or below may have been set without anyone reading it.
            overflow=~(torch.isfinite(square) & (scale > 0)),
            divisor=divisor,
            global_norm=square.sqrt() / divisor,
            local_norm=groups.sums(squares).sqrt() / local_divisor,
        )

    def _skips(self, measured: _Measurement, normalizer: Normalizer | None) -> Tensor:
        skips = measured.overflow
        if self._config.use_skip_data_by_global_norm:
            # Not `>=`: a norm that is nan is skipped, too.
            skips = skips | ~(measured.global_norm < self._config.global_norm_spike_threshold)
        if normalizer is not None:
            skips = skips | (normalizer.reduced == 0)
        return skips

    def _clipped_divisor(
        self, measured: _Measurement, normalizer: Normalizer | None
    ) -> Tensor | None:
        if self._config.use_clip_grad:
            return measured.divisor / clip_coefficient(
                measured.global_norm, self._config.max_grad_norm
            )
        if normalizer is None and self.loss_scale.is_one:
            return None
        return measured.divisor

    def _report(
        self,
        loss: Tensor,
        measured: _Measurement,
        groups: NormGroups,
        applied: Tensor,
        rates: Tensor,
    ) -> StepReport:
        output: StepOutput | LocalNormStepOutput = StepOutput(
            loss=loss,
            overflow=measured.overflow,
            loss_scale=self.loss_scale.value.clone(),
            learning_rate=rates[0],
            global_norm=measured.global_norm if self._config.use_clip_grad else None,
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
            **self._counters._asdict(),
        )

    def _submit(self, report: StepReport, local_norm: Tensor) -> None:
        if self._lr_scheduler is None and self._config.max_consecutive_skips is None:
            return
        values = _Arrival(
            skipped=report.skipped,
            consecutive_skips=report.consecutive_skips,
            loss_scale=report.output.loss_scale,
            step=report.applied_updates + report.skipped_updates,
        )
        self._reads.submit(
            torch.stack([value.float() for value in values]),
            functools.partial(self._receive, local_norm=local_norm, names=report.local_norm_names),
        )

    def _receive(
        self, values: Sequence[float], *, local_norm: Tensor, names: tuple[str, ...]
    ) -> None:
        arrival = _Arrival(*values)
        if not arrival.skipped and self._lr_scheduler is not None:
            self._lr_scheduler.step()
        limit = self._config.max_consecutive_skips
        if limit is not None and arrival.consecutive_skips >= limit:
            finite = local_norm.isfinite().tolist()
            bad = [name for name, fine in zip(names, finite, strict=True) if not fine]
            msg = (
                f"{arrival.consecutive_skips:.0f} updates in a row were skipped, the last one at "
                f"step {arrival.step:.0f} with loss scale {arrival.loss_scale:g}; "
                f"groups whose gradient norm is not finite: {bad}"
            )
            raise RuntimeError(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale, counters and average, after a flush.

        Returns:
            A nested dict of tensors and numbers; tensors are copies but for the average's.
        """
        self.flush()
        counters = {name: value.clone() for name, value in self._counters._asdict().items()}
        state = {"loss_scale": self.loss_scale.state_dict(), **counters}
        if self._ema is not None:
            state["ema"] = self._ema.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is changed if anything does not fit.

        What is pending of the last step is dropped.

        Raises:
            KeyError: If a key is missing or unknown.
            TypeError: If a value has the wrong type.
            ValueError: If a value has the wrong shape or range.
        """
        expected = {"loss_scale", *_COUNTERS} | (set() if self._ema is None else {"ema"})
        if not isinstance(state_dict, Mapping):
            msg = f"`state_dict` must be a mapping, got {described(state_dict)}"
            raise TypeError(msg)
        if set(state_dict) != expected:
            msg = (
                f"`state_dict` of this cell must have the keys {sorted(expected)}, "
                f"got {sorted(state_dict)}"
            )
            raise KeyError(msg)
        counters = {name: _checked_counter(name, state_dict[name]) for name in _COUNTERS}
        before = self.loss_scale.state_dict()
        self.loss_scale.load_state_dict(state_dict["loss_scale"])
        if self._ema is not None:
            try:
                self._ema.load_state_dict(state_dict["ema"])
            except BaseException:
                self.loss_scale.load_state_dict(before)
                raise
        self._counters = _Counters(
            **{name: value.detach().clone().to(self._device) for name, value in counters.items()}
        )
        self._reads.discard()


def _nonzero(divisor: Tensor) -> Tensor:
    # A batch without targets has gradients of zero; dividing them by zero would report nan.
    return torch.where(divisor == 0, 1.0, divisor)


def _checked_counter(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != () or value.dtype != torch.int64:
        kind = (
            f"shape {tuple(value.shape)} and {value.dtype}"
            if isinstance(value, Tensor)
            else described(value)
        )
        msg = f"`state_dict[{name!r}]` must be a tensor of shape () and dtype int64, got {kind}"
        raise (ValueError if isinstance(value, Tensor) else TypeError)(msg)
    return value
