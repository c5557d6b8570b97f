"""The second half of a training step, after backward: read the gradients, decide, update.

Everything happens on the device, in a fixed order; only a pipeline does step 2 before step 1, too:

1. **Read the gradients** (`StepUpdate.measure`). One pass gives the sum of squares of each
   parameter's gradient. Local norms, the global norm and the overflow flag are computed from these
   sums. If gradients differ between ranks, the ranks agree on their sums here.
2. **Read the results of the previous update** (`StepUpdate.flush`). Only here may the host wait for
   the device, and in step 4 with an optimizer that cannot skip on the device. This step's forward
   and backward are already queued, so the device has work while the host waits. The schedule
   advances here, so this must come before the learning rate is used.
3. **Decide** whether the update is skipped, and by how much its gradients are clipped. The
   decisions are tensors on the device; the host reads them at the next update.
4. **Update the weights**, or leave them unchanged. One divisor combines loss scale, normalization
   and clipping, and one flag says whether to skip.
5. **Update the loss scale**, from the overflow flag alone: a spike or a batch without targets says
   nothing about the scale. This comes after the optimizer, which may raise: an error must leave
   the scale unchanged.
6. **Update the average** of the weights, from the new weights.
7. **Count, report, and start copying** the results of this update that the host needs.

Do not add anything that reads a tensor on the host (``item``, ``if tensor``, ``float(tensor)``):
tests count such reads.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.average.ema import Average
from mfwrap.collectives import Section, section_clock
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import LossScale
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.clipping import clip_coefficient, clipped_divisor
from mfwrap.step.counts import UpdateCounts
from mfwrap.step.losses import Accumulated, Normalizer
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.ranks.agreement import Agreement, Totals
from mfwrap.step.ranks.float32_gradients import squares_after_rounding
from mfwrap.step.ranks.local_norms import LocalSquares
from mfwrap.step.rates import group_names, has_bad_rate, learning_rates
from mfwrap.step.schedules import Schedule
from mfwrap.step.skipping import SkippableOptimizer
from mfwrap.step.spikes import SpikePolicy, SpikeVerdict, spike_policy
from mfwrap.step.state import StateOwner
from mfwrap.tensors.norm_groups import NormGroups
from mfwrap.tensors.norms import NormReader, sums_by_group


class Measurement(NamedTuple):
    """Result of one read of the gradients; tensors on the training device."""

    overflow: Tensor
    """Whether the norm of the scaled or unscaled gradients is non-finite, or their divisor is not a
    finite number > 0; shape ``()``, bool."""

    divisor: Tensor | None
    """Number that the gradients must be divided by, a copy, shape ``()``, float32; ``None`` for
    1."""

    global_norm: Tensor
    """L2 norm of all unscaled gradients, the same on all ranks, shape ``()``, float32."""

    own_squares: Tensor
    """Sum of squares of this rank's own scaled gradient of each parameter, shape ``(N,)``,
    float32."""

    own_divisor: Tensor | None
    """Divisor of this rank's own gradients, a copy, shape ``()``, float32; ``None`` for 1."""

    groups: NormGroups
    """The ``G`` groups of `local_norm`."""

    totals: Totals
    """What the ranks have agreed on."""

    reduction_norms: Tensor | None = None
    """As in `StepReport`, a copy."""

    num_summed: int = 1
    """As in `Accumulated`."""

    def local_norm(self) -> Tensor:
        """Return the L2 norm by group of this rank's own unscaled gradients.

        Returns:
            Shape ``(G,)``, float32. The norms are computed by this call: most steps without
            ``StepConfig.local_norm`` need none.
        """
        norms = sums_by_group(self.own_squares, self.groups.members).sqrt()
        return _divided(norms, self.own_divisor)


@final
class StepUpdate:
    """Do everything that follows the backward of the last micro-batch.

    A call does one whole update. `measure` and `apply` do the same in two calls, for a loop that
    needs the norm before the optimizer runs.

    Args:
        parameters: Parameters to update.
        optimizer: Optimizer without accelerate's wrapper.
        config: Settings of the step.
        loss_scale: Live loss scale, on the parameters' device.
        lr_scheduler: Schedule that is stepped once for each applied update, just before the next
            update; ``None`` for no schedule.
        ema: Average that follows the weights after applied updates; ``None`` for no average.
        reported: Whether the caller calls ``counts.was_skipped``.
        update_scale: Called with the overflow flag of each update; ``None`` for the ``update`` of
            `loss_scale`.
        local_squares: Source of the norms of this rank's own gradients; ``None`` if the gradients
            are this rank's own.
        agreement: How the ranks come to the same norms; ``None`` if they have the same gradients.

    Raises:
        TypeError: If the step of `optimizer` needs a closure.
        ValueError: If `optimizer` is fused SGD with half-precision weights on the CPU, which torch
            does not update.
    """

    def __init__(
        self,
        parameters: TrainedParameters,
        optimizer: Optimizer,
        config: StepConfig,
        loss_scale: LossScale,
        *,
        lr_scheduler: Schedule | None = None,
        ema: Average | None = None,
        reported: bool = False,
        update_scale: Callable[[Tensor], object] | None = None,
        local_squares: LocalSquares | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._config = config
        in_float32 = config.accumulate_allreduce_grads_in_fp32
        self._optimizer = SkippableOptimizer(optimizer, rounds=in_float32)
        self._rounded = squares_after_rounding if in_float32 else _unrounded
        self.parameters = parameters
        self._local_squares = local_squares
        self._agreement: Agreement = agreement or _SameOnAllRanks()
        self.before_update: list[Callable[[], None]] = []
        """Functions to call once the gradients are measured and before they are used."""
        self._device = parameters.device
        self._norms = NormReader(self._device)
        self._spikes: SpikePolicy | _NoSpikes = spike_policy(config, self._device) or _NoSpikes()
        self._loss_scale = loss_scale
        self._update_scale = update_scale or loss_scale.update
        self._ema: Average = _NoAverage() if ema is None else ema
        self.counts = UpdateCounts(
            self._device,
            config.max_consecutive_skips,
            on_applied=None if lr_scheduler is None else lr_scheduler.step,
            reported=reported,
        )

    def __call__(self, accumulated: Accumulated) -> StepReport:
        """Do one update from the present gradients, and then set the gradients to ``None``.

        Args:
            accumulated: Losses of the update, and how its gradients were added up.

        Raises:
            RuntimeError: If no parameter has a gradient, the optimizer's parameters have changed
                since construction, the averages are swapped in, or too many updates in a row were
                skipped.
            TypeError: If a gradient is sparse.
            ValueError: If a learning rate is a non-finite number, or `QKClip` or `ExpertBias` acts
                on a stage of a pipeline.
        """
        try:
            if self._agreement.is_pipeline:
                self._optimizer.refuse_what_needs_whole_networks()
                # With the norm, the ranks send whether a rate of this update is bad. The flush sets
                # this rate.
                self.flush()
            loss, normalizer, losses, num_summed = accumulated
            measured = self.measure(normalizer, loss, num_summed=num_summed)
            total = measured.totals.loss
            return self.apply(loss if total is None else total, measured, losses=losses)
        finally:
            self.release_gradients()

    def replace_parameters(
        self,
        parameters: TrainedParameters,
        local_squares: LocalSquares | None,
        agreement: Agreement | None,
    ) -> None:
        """Update other parameters of the same optimizer from now on; arguments as of the class."""
        self.parameters = parameters
        self._local_squares = local_squares
        self._agreement = agreement or _SameOnAllRanks()
        self._norms = NormReader(self._device)
        self._optimizer.see_parameters()

    def read_own_gradients(self, local_squares: LocalSquares | None) -> None:
        """Take the norms of this rank's own gradients from a source; as of the class."""
        self._local_squares = local_squares

    def release_gradients(self) -> None:
        """Set all gradients to ``None``; forget this rank's own norms, and the forward passes."""
        self.parameters.release_gradients()
        self.forget_local_squares()
        self._optimizer.discard_forwards()

    def forget_local_squares(self) -> None:
        """Forget the norms of this rank's own gradients, which were taken before a reduction."""
        if self._local_squares is not None:
            self._local_squares.reset()

    def measure(
        self,
        normalizer: Normalizer | None = None,
        loss: Tensor | None = None,
        *,
        may_be_absent: bool = False,
        num_summed: int = 1,
    ) -> Measurement:
        """Compute norms and the overflow flag in one read of the present gradients.

        Does not synchronize with the device.

        Args:
            normalizer: Divisor of the gradients besides the loss scale; ``None`` if there is none.
            loss: Loss to report, shape ``()``, float32; needed in a pipeline.
            may_be_absent: Whether to treat all gradients as zeros if no parameter has one, instead
                of raising. So does a pipeline, in which all ranks must measure.
            num_summed: As in `Accumulated`.

        Raises:
            RuntimeError: If no parameter has a gradient, the optimizer's parameters have changed
                since construction, or the averages are swapped in.
            TypeError: If a gradient is sparse.
        """
        self._ema.begin_update()
        parameters, agreement = self.parameters, self._agreement
        groups = parameters.groups()
        gradients = parameters.collect_gradients(
            may_be_absent=may_be_absent or agreement.is_pipeline
        )
        # Disable a caller's autocast, which would multiply norms in half precision.
        no_autocast = torch.autocast(self._device.type, enabled=False)
        with section_clock.within(Section.UPDATE), torch.no_grad(), no_autocast:
            local = parameters.local(gradients)
            squares = self._norms.squares(local)
            own = None if self._local_squares is None else self._local_squares.squares(squares)
            squares = self._rounded(squares, local, parameters.tensors, num_summed, normalizer)
            squares, normalizer = parameters.over_shards(squares, normalizer)
            has_bad_rate = self._has_bad_rate() if agreement.is_pipeline else None
            totals = agreement(Totals(squares.sum(), loss, normalizer, has_bad_rate))
            if totals.normalizer is None:
                divisor = own_divisor = self._loss_scale.divisor()
            else:
                divisor, own_divisor = totals.normalizer.divisors(self._loss_scale.value)
            norm = _divided(totals.square.sqrt(), divisor)
            overflow = ~_is_sound(norm, divisor)
            reduction_norms = None
            if own is not None and agreement.has_equal_gradients:
                reduction_norms = torch.stack((_divided(own.sum().sqrt(), own_divisor), norm))
        return Measurement(
            overflow=overflow,
            divisor=divisor,
            global_norm=norm,
            own_squares=squares if own is None else own,
            own_divisor=own_divisor,
            groups=groups,
            totals=totals,
            reduction_norms=reduction_norms,
            num_summed=num_summed,
        )

    def apply(
        self,
        loss: Tensor,
        measured: Measurement,
        coefficient: Tensor | None = None,
        losses: Mapping[str, Tensor] | None = None,
        *,
        clipped_by: Tensor | None = None,
    ) -> StepReport:
        """Decide whether to skip, and update weights, loss scale, average and counts.

        Args:
            loss: Loss to report, shape ``()``, float32, detached.
            measured: Result of `measure` for the present gradients.
            coefficient: Factor that clips the gradients, shape ``()``, float32; ``None`` to clip
                as configured.
            losses: Named losses to report, as in `StepReport`.
            clipped_by: Factor by which the gradients were clipped after they were measured, shape
                ``()``; ``None`` if they were not.

        Raises:
            RuntimeError: If the averages are swapped in, or too many updates in a row were skipped.
            ValueError: If a learning rate is a non-finite number.
        """
        section_clock.switch(Section.UPDATE)
        # Flush as late as possible: this step's backward is queued by now, so the device is busy
        # while the host waits. But flush before the optimizer's step, because the flush advances
        # the schedule, which sets the learning rate of this update.
        for call in self.before_update:
            call()
        self.flush()
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            # The ranks of a pipeline have agreed to skip: an error on one rank would stop the rest.
            rates = learning_rates(
                self._optimizer.optimizer, self._device, may_be_bad=self._agreement.is_pipeline
            )
            spike = self._spikes.judge(measured.global_norm)
            skipped = self._skips(measured, spike)
            applied = ~skipped
            if coefficient is None:
                coefficient = self.configured_coefficient(measured)
            coefficient = spike.clipped(coefficient, clipped_by)
            divisor = clipped_divisor(measured.divisor, coefficient)
            read = self._optimizer.step(divisor, skipped, measured.num_summed)
            # After the optimizer, which may raise: an error must leave the scale unchanged.
            self._update_scale(measured.overflow)
            self._ema.update(applied)
            self.counts.count(applied, skipped)
            spike.remember(applied)
            report = self._report(
                loss,
                measured,
                skipped,
                rates,
                losses,
                spike.score,
                reports_norm=coefficient is not None or spike.score is not None,
            )
        self.counts.submit(report, measured.local_norm, skipped=read)
        return report

    def flush(self) -> None:
        """Step the schedule if the last update was applied, and check for too many skips in a row.

        Synchronizes with the device if results are pending.

        Raises:
            RuntimeError: If the last update was the ``max_consecutive_skips``-th skip in a row.
        """
        self.counts.flush()

    def state_owners(self) -> tuple[StateOwner, ...]:
        """Return the objects whose states belong into a checkpoint; their names are distinct."""
        return (self.counts, self._spikes)

    def replaced(self) -> list[tuple[object, str]]:
        """Return the attributes that an update sets to new tensors: owners and names."""
        return [place for owner in self.state_owners() for place in owner.replaced()]

    @property
    def is_fused(self) -> bool:
        """Whether fused kernels do the optimizer's whole step, so that a graph can hold it."""
        return self._optimizer.is_fused

    def _has_bad_rate(self) -> Tensor | None:
        return has_bad_rate(self._optimizer.optimizer, self._device)

    def _skips(self, measured: Measurement, spike: "SpikeVerdict | _NoSpikes") -> Tensor:
        skips = spike.skips_besides(measured.overflow)
        if self._config.use_skip_data_by_global_norm:
            # Do not write `norm >= threshold`: it is False for a nan norm, but an update with a nan
            # norm must be skipped, too.
            skips = skips | ~(measured.global_norm < self._config.global_norm_spike_threshold)
        if measured.totals.normalizer is not None:
            skips = skips | (measured.totals.normalizer.reduced == 0)  # a batch without targets
        is_bad = measured.totals.has_bad_rate
        if is_bad is None:
            is_bad = self._has_bad_rate()
        return skips if is_bad is None else skips | is_bad

    def configured_coefficient(self, measured: Measurement) -> Tensor | None:
        """Return the clipping factor for the configured norm limit; ``None`` if clipping is off."""
        if not self._config.use_clip_grad:
            return None
        return clip_coefficient(measured.global_norm, self._config.max_grad_norm)

    def _report(
        self,
        loss: Tensor,
        measured: Measurement,
        skipped: Tensor,
        rates: Tensor,
        losses: Mapping[str, Tensor] | None,
        score: Tensor | None,
        *,
        reports_norm: bool,
    ) -> StepReport:
        five: dict[str, Any] = {
            "loss": loss,
            "overflow": measured.overflow,
            "loss_scale": self._loss_scale.value.clone(),
            "learning_rate": rates[0],
            "global_norm": measured.global_norm if reports_norm else None,
        }
        groups = measured.groups
        output: StepOutput | LocalNormStepOutput = (
            LocalNormStepOutput(**five, local_norm=measured.local_norm(), size=groups.sizes)
            if self._config.local_norm
            else StepOutput(**five)
        )
        return StepReport(
            output=output,
            skipped=skipped,
            learning_rates=rates,
            learning_rate_names=group_names(self._optimizer.optimizer),
            local_norm_names=groups.names,
            losses=losses or {},
            reduction_norms=measured.reduction_norms,
            spike_score=score,
            sections=section_clock.end_step(self._device),
            applied_updates=self.counts.applied_updates,
            skipped_updates=self.counts.skipped_updates,
            consecutive_skips=self.counts.consecutive_skips,
        )


def _divided(norms: Tensor, divisor: Tensor | None) -> Tensor:
    return norms if divisor is None else norms / divisor


def _is_sound(norm: Tensor, divisor: Tensor | None) -> Tensor:
    is_sound = norm < math.inf  # False for NaN
    if divisor is not None:
        # Check the divisor here, too, because the host never reads it: a loop may set a scale <= 0,
        # and a network may return a denominator that is nan or infinite.
        is_sound &= (divisor > 0) & (divisor < math.inf)
    return is_sound


def _unrounded(squares: Tensor, *_: object) -> Tensor:
    """Leave sums of squares as they are, where gradients have the dtypes of their weights."""
    return squares


@final
class _SameOnAllRanks:
    """The agreement of a single rank, and of ranks whose gradients are all reduced."""

    is_pipeline = False
    has_equal_gradients = True

    def __call__(self, own: Totals) -> Totals:
        return own


@final
class _NoAverage:
    """The average of a step without one."""

    def begin_update(self) -> None:
        """Start nothing."""

    def update(self, applied: Tensor) -> None:
        """Update nothing."""


@final
class _NoSpikes:
    """The spike policy ``record``, and its verdict: it judges no norm, and has no state."""

    score = None

    def judge(self, _global_norm: Tensor) -> "_NoSpikes":
        return self

    def skips_besides(self, skips: Tensor) -> Tensor:
        return skips

    def clipped(self, coefficient: Tensor | None, _by: Tensor | None) -> Tensor | None:
        return coefficient

    def remember(self, applied: Tensor) -> None:
        """Remember nothing."""

    def replaced(self) -> list[tuple[object, str]]:
        return []

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the state of any policy."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Ignore the state of a policy."""
