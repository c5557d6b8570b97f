"""The second half of a training step, after backward: read the gradients, decide, update.

Everything happens on the device, in a fixed order:

1. **Read the gradients** (`StepUpdate.measure`). One pass gives the sum of squares of each
   parameter's gradient. Local norms, the global norm and the overflow flag are computed from these
   sums. If gradients differ between ranks, the ranks average their sums here.
2. **Read the results of the previous update** (`StepUpdate.flush`). Only here may the host wait for
   the device. This step's forward and backward are already queued, so the device has work while
   the host waits. The schedule advances here, so this must come before the learning rate is used.
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

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.average.ema import Average
from mfwrap.collectives import Section, section_clock
from mfwrap.config import StepConfig
from mfwrap.loss_scale.live import LiveLossScale
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.clipping import clip_coefficient
from mfwrap.step.counts import UpdateCounts
from mfwrap.step.forward import Normalizer
from mfwrap.step.local_norms import LocalSquares
from mfwrap.step.measurement import Measurement, measure
from mfwrap.step.optimizers import (
    SkippableOptimizer,
    group_names,
    has_bad_rate,
    learning_rates,
)
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.ranks import RankAgreement, StageTotals
from mfwrap.step.schedules import Schedule
from mfwrap.step.spikes import SpikeVerdict, spike_policy
from mfwrap.step.state import StateOwner
from mfwrap.tensors.norms import NormReader


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
        local_squares: Source of the norms of this rank's own gradients; ``None`` if the gradients
            are this rank's own.
        agreement: Agreement of ranks whose gradients differ after their reduction; ``None`` if
            there are no such ranks.
        stages: Sum over the ranks that hold other stages of a pipeline; ``None`` without a
            pipeline.

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
        loss_scale: LiveLossScale,
        *,
        lr_scheduler: Schedule | None = None,
        ema: Average | None = None,
        reported: bool = False,
        local_squares: LocalSquares | None = None,
        agreement: RankAgreement | None = None,
        stages: StageTotals | None = None,
    ) -> None:
        self._config = config
        self._in_float32 = config.accumulate_allreduce_grads_in_fp32
        self._optimizer = SkippableOptimizer(optimizer, rounds=self._in_float32)
        self.parameters = parameters
        self.local_squares = local_squares
        self.agreement = agreement
        self.stages = stages
        self.before_update: list[Callable[[], None]] = []
        """Functions to call once the gradients are measured and before they are used."""
        self._device = parameters.device
        self._norms = NormReader(self._device)
        self._spikes = spike_policy(config, self._device)
        self._loss_scale = loss_scale
        self._ema = ema
        self.counts = UpdateCounts(
            self._device,
            config.max_consecutive_skips,
            on_applied=None if lr_scheduler is None else lr_scheduler.step,
            reported=reported,
        )

    def __call__(
        self,
        loss: Tensor,
        normalizer: Normalizer | None = None,
        losses: Mapping[str, Tensor] | None = None,
        num_added: int = 1,
    ) -> StepReport:
        """Do one update from the present gradients, and then set the gradients to ``None``.

        Args:
            loss: Loss to report, shape ``()``, float32, detached.
            normalizer: Divisor of the gradients besides the loss scale; ``None`` if there is none.
            losses: Named losses to report, as in `StepReport`.
            num_added: As in `Accumulated`.

        Raises:
            RuntimeError: If no parameter has a gradient, the optimizer's parameters have changed
                since construction, the averages are swapped in, or too many updates in a row were
                skipped.
            TypeError: If a gradient is sparse.
            ValueError: If a learning rate is a non-finite number.
        """
        try:
            # All ranks of a pipeline must measure, even one whose stages are frozen. With the norm
            # they send whether a rate of this update is bad, and the flush sets this rate.
            is_pipeline = self.stages is not None
            if is_pipeline:
                self.flush()
            measured = self.measure(
                normalizer, loss=loss, may_be_absent=is_pipeline, num_added=num_added
            )
            if measured.loss is not None:
                loss = measured.loss
            return self.apply(loss, measured, losses=losses)
        finally:
            self.release_gradients()

    def replace_parameters(
        self,
        parameters: TrainedParameters,
        local_squares: LocalSquares | None,
        agreement: RankAgreement | None,
    ) -> None:
        """Update other parameters of the same optimizer from now on; arguments as of the class."""
        self.parameters = parameters
        self.local_squares = local_squares
        self.agreement = agreement
        self._norms = NormReader(self._device)
        self._optimizer.see_parameters()

    def release_gradients(self) -> None:
        """Set all gradients to ``None``; forget this rank's own norms, and logits for `QKClip`."""
        self.parameters.release_gradients()
        self.forget_local_squares()
        self._optimizer.discard_logits()

    def forget_local_squares(self) -> None:
        """Forget the norms of this rank's own gradients, which were taken before a reduction."""
        if self.local_squares is not None:
            self.local_squares.reset()

    def measure(
        self,
        normalizer: Normalizer | None = None,
        *,
        loss: Tensor | None = None,
        may_be_absent: bool = False,
        num_added: int = 1,
    ) -> Measurement:
        """Compute norms and the overflow flag in one read of the present gradients.

        Does not synchronize with the device.

        Args:
            normalizer: Divisor of the gradients besides the loss scale; ``None`` if there is none.
            loss: Loss to report, shape ``()``, float32; needed in a pipeline.
            may_be_absent: Whether to treat all gradients as zeros if no parameter has one, instead
                of raising.
            num_added: As in `Accumulated`.

        Raises:
            RuntimeError: If no parameter has a gradient, the optimizer's parameters have changed
                since construction, or the averages are swapped in.
            TypeError: If a gradient is sparse.
        """
        if self._ema is not None:
            self._ema.begin_update()
        optimizer = self._optimizer.optimizer
        groups = self.parameters.groups()
        gradients = self.parameters.gradients(may_be_absent=may_be_absent)
        # Disable a caller's autocast, which would multiply norms in half precision.
        no_autocast = torch.autocast(self._device.type, enabled=False)
        with section_clock.within(Section.UPDATE), torch.no_grad(), no_autocast:
            return measure(
                gradients,
                groups,
                self._loss_scale.value,
                normalizer,
                local_squares=self.local_squares,
                agreement=self.agreement,
                reduction=self.parameters.reduction,
                loss=loss,
                stages=self.stages,
                has_bad_rate=None if self.stages is None else has_bad_rate(optimizer, self._device),
                rounded_for=self.parameters.tensors if self._in_float32 else None,
                num_added=num_added,
                norms=self._norms,
                scale_is_one=self._loss_scale.is_one,
            )

    def apply(
        self,
        loss: Tensor,
        measured: Measurement,
        coefficient: Tensor | None = None,
        losses: Mapping[str, Tensor] | None = None,
    ) -> StepReport:
        """Decide whether to skip, and update weights, loss scale, average and counts.

        Args:
            loss: Loss to report, shape ``()``, float32, detached.
            measured: Result of `measure` for the present gradients.
            coefficient: Factor that clips the gradients, shape ``()``, float32; ``None`` to clip
                as configured.
            losses: Named losses to report, as in `StepReport`.

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
        report, read = self.decide(loss, measured, coefficient, losses)
        self.counts.submit(report, measured.local_norm, skipped=read)
        return report

    def decide(
        self,
        loss: Tensor,
        measured: Measurement,
        coefficient: Tensor | None = None,
        losses: Mapping[str, Tensor] | None = None,
    ) -> tuple[StepReport, bool | None]:
        """Do `apply` without what the host needs of this update and of the previous one.

        Args:
            loss: As in `apply`, like the other arguments.
            measured: See `loss`.
            coefficient: See `loss`.
            losses: See `loss`.

        Returns:
            The report, and whether the update was skipped; ``None`` if only the device knows.
        """
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            # The ranks of a pipeline have agreed to skip: an error on one rank would stop the rest.
            rates = learning_rates(
                self._optimizer.optimizer, self._device, may_be_bad=self.stages is not None
            )
            spike = None if self._spikes is None else self._spikes.judge(measured.global_norm)
            skipped = self._skips(measured, spike)
            applied = ~skipped
            divisor = self._clipped_divisor(measured, coefficient, spike)
            read = self._optimizer.step(divisor, skipped, measured.num_added)
            # Update the scale after all calls that may raise: an error must leave it unchanged.
            self._loss_scale.update(measured.overflow)
            if self._ema is not None:
                self._ema.update(applied)
            self.counts.count(applied, skipped)
            if self._spikes is not None and spike is not None:
                self._spikes.count(spike, applied)
            is_asked_for = coefficient is not None or spike is not None
            report = self._report(
                loss, measured, skipped, rates, losses, spike, norm_is_asked_for=is_asked_for
            )
        return report, read

    def flush(self) -> None:
        """Step the schedule if the last update was applied, and check for too many skips in a row.

        Synchronizes with the device if results are pending.

        Raises:
            RuntimeError: If the last update was the ``max_consecutive_skips``-th skip in a row.
        """
        self.counts.flush()

    def state_owners(self) -> tuple[StateOwner, ...]:
        """Return the objects whose states belong into a checkpoint; their names are distinct."""
        return (self.counts,) if self._spikes is None else (self.counts, self._spikes)

    def replaced(self) -> list[tuple[object, str]]:
        """Return the attributes that an update sets to new tensors: owners and names."""
        return [place for owner in self.state_owners() for place in owner.replaced()]

    @property
    def is_fused(self) -> bool:
        """Whether fused kernels do the optimizer's whole step, so that a graph can hold it."""
        return self._optimizer.is_fused

    def _skips(self, measured: Measurement, spike: SpikeVerdict | None) -> Tensor:
        skips = measured.overflow if spike is None else measured.overflow | spike.skips
        if self._config.use_skip_data_by_global_norm:
            # Do not write `norm >= threshold`: it is False for a nan norm, but an update with a nan
            # norm must be skipped, too.
            skips = skips | ~(measured.global_norm < self._config.global_norm_spike_threshold)
        if measured.has_targets is not None:
            skips = skips | ~measured.has_targets
        is_bad = measured.has_bad_rate
        if is_bad is None:
            is_bad = has_bad_rate(self._optimizer.optimizer, self._device)
        return skips if is_bad is None else skips | is_bad

    def configured_coefficient(self, measured: Measurement) -> Tensor | None:
        """Return the clipping factor for the configured norm limit; ``None`` if clipping is off."""
        if not self._config.use_clip_grad:
            return None
        return clip_coefficient(measured.global_norm, self._config.max_grad_norm)

    def _clipped_divisor(
        self, measured: Measurement, coefficient: Tensor | None, spike: SpikeVerdict | None
    ) -> Tensor | None:
        if coefficient is None:
            coefficient = self.configured_coefficient(measured)
        if spike is not None:
            coefficient = spike.clipped(coefficient)
        if coefficient is None:
            return measured.divisor
        if measured.divisor is None:
            return coefficient.reciprocal()
        return measured.divisor / coefficient

    def _report(
        self,
        loss: Tensor,
        measured: Measurement,
        skipped: Tensor,
        rates: Tensor,
        losses: Mapping[str, Tensor] | None,
        spike: SpikeVerdict | None,
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
                **output._asdict(), local_norm=measured.local_norm(), size=groups.sizes
            )
        return StepReport(
            output=output,
            skipped=skipped,
            learning_rates=rates,
            learning_rate_names=group_names(self._optimizer.optimizer),
            local_norm_names=groups.names,
            losses=losses or {},
            reduction_norms=measured.reduction_norms,
            spike_score=None if spike is None else spike.score,
            sections=section_clock.end_step(self._device),
            applied_updates=self.counts.applied_updates,
            skipped_updates=self.counts.skipped_updates,
            consecutive_skips=self.counts.consecutive_skips,
        )
