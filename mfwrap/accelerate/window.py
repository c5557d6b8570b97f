"""Follow the gradients of one optimizer between two of its steps.

A cell does backward, clipping and update in one call. A loop makes a separate call for each, in an
order that it chooses, and may leave some out. An `OptimizerWindow` follows one optimizer through
these calls, from the end of one optimizer step to the end of the next. In between, the gradients
have one of four forms:

- `Form.SCALED`: as backward has left them, multiplied by the loss scale.
- `Form.FOLDED`: the same, but the step will multiply them by a clip factor in its own pass.
- `Form.CLIPPED`: clipped in place, and still multiplied by the loss scale.
- `Form.UNSCALED`: divided by the loss scale in place, and perhaps clipped in place.

===================  ==========  ==========  ==========  ==========
call                 SCALED      FOLDED      CLIPPED     UNSCALED
===================  ==========  ==========  ==========  ==========
`before_backward`    SCALED      SCALED (1)  SCALED      SCALED (2)
`fold_clip`          FOLDED                  FOLDED
`settle_clip`        SCALED      CLIPPED     CLIPPED     UNSCALED
`accept_clipped`     CLIPPED                 CLIPPED     UNSCALED
`unscale`            UNSCALED    UNSCALED    UNSCALED    UNSCALED
`apply`              SCALED      SCALED      SCALED      SCALED
===================  ==========  ==========  ==========  ==========

1. The clip is first applied in place, because backward adds gradients that are not clipped.
2. The gradients are first scaled again, because backward adds scaled gradients.

A maintainer must keep these properties:

- The reported norms are from before any clipping, even if a loop clips several times
  (`Gradients.first`).
- The overflow flag is recorded before any change that could hide the overflow (`note_overflow`).
  Clamping turns inf into a finite number. If the norm is infinite, the clip factor is 0 and turns
  finite gradients into zeros.
- Gradients are unscaled at most once, and a folded clip is applied at most once. Between a folded
  clip and the step the gradients must not change.
- With a loss scale, gradients that the last step has used are not used again
  (`holds_used_gradients`). That step has divided them by the scale, unless it was skipped, which
  the host does not know.
- Nothing here synchronizes with the device. Whether gradients have changed is read from torch's
  version counters, which are on the host.
"""

import itertools
import operator
import weakref
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple, final

import torch
from torch import Tensor

from mfwrap.compatibility.torch import version_of
from mfwrap.outputs import StepReport
from mfwrap.step.update import Measurement, StepUpdate
from mfwrap.tensors.shards import local_tensors, multiply_in_place, on_device


@final
class SeenGradients:
    """Remember which gradients there were, and how often each had been written to.

    An ``id`` cannot identify a gradient: a new one often gets the address of a released one. A weak
    reference can, and does not keep the gradient's memory. The references are only compared: torch
    may have given up the Python object of a tensor that is otherwise alive.

    Args:
        gradients: Gradients that are present.
    """

    def __init__(self, gradients: Sequence[Tensor] = ()) -> None:
        self._references = list(map(weakref.ref, gradients))
        self._versions = _versions(gradients)

    def __bool__(self) -> bool:
        return bool(self._references)

    def are(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether `gradients` are the same tensors, and nothing has written to them."""
        return (
            len(gradients) == len(self._references)
            and all(map(operator.is_, gradients, [seen() for seen in self._references]))
            and self._versions == _versions(gradients)
        )


def _versions(gradients: Sequence[Tensor]) -> list[int]:
    # A write to a DTensor's shard does not increase the DTensor's version, so take the versions of
    # the shards.
    return [version_of(local) for local in local_tensors(gradients)]


class Form(Enum):
    """What has been done to gradients since the last backward; see the module."""

    SCALED = auto()
    FOLDED = auto()
    CLIPPED = auto()
    UNSCALED = auto()


class Gradients(NamedTuple):
    """What is known about an optimizer's gradients since the last backward."""

    form: Form = Form.SCALED

    measured: Measurement | None = None
    """Last read; ``None`` if nothing was read, or if a clip has made it obsolete."""

    seen: SeenGradients = SeenGradients()
    """The gradients that `measured` belongs to."""

    first: Measurement | None = None
    """First read, before any clipping. The report of the update contains its norms."""

    coefficient: Tensor | None = None
    """Factor of a folded clip, shape ``()``, float32; ``None`` unless the form is FOLDED."""

    clipped_by: Tensor | None = None
    """Product of the factors by which all gradients were clipped in place, shape ``()``."""


@final
class OptimizerWindow:
    """Track what a loop does with an optimizer's gradients between two steps of the optimizer.

    Args:
        update: Update of the optimizer, which `apply` runs.
        loss_scale: Live loss scale, shape ``()``, float32.
    """

    def __init__(self, update: StepUpdate, loss_scale: Tensor) -> None:
        self.update = update
        self._loss_scale = loss_scale
        self.restart()

    def restart(self) -> None:
        """Start a new window, and treat the gradients that exist now as used."""
        self._gradients = Gradients()
        # Losses of the micro-batches, each with the number of its micro-batch.
        self._losses: list[tuple[Tensor, int | None]] = []
        # Overflow found before the gradients were changed in place.
        self._overflow: Tensor | None = None
        # Whether the loop has clipped gradients in place, maybe before the last backward.
        self._loop_has_clipped = False
        # The gradients that the last step has used, as they are after the last backward, which may
        # have added to them. None if there are none, because the loop has zeroed them.
        self._kept: SeenGradients | None = None
        self.update.forget_local_squares()
        self._used = self._see()

    def _see(self) -> SeenGradients:
        return SeenGradients(self._present())

    def _present(self) -> Sequence[Tensor]:
        return self.update.parameters.present_gradients()

    @property
    def form(self) -> Form:
        """Form of the gradients."""
        return self._gradients.form

    @property
    def num_backward(self) -> int:
        """Number of losses that were scaled in this window, and may contribute to its update."""
        return len(self._losses)

    def has_unused_gradients(self) -> bool:
        """Return whether there are gradients that the optimizer's last step has not used."""
        present = self._present()
        return bool(present) and not self._used.are(present)

    def holds_used_gradients(self) -> bool:
        """Return whether the gradients contain those that the optimizer's last step has used."""
        return self._kept is not None and self.update.parameters.have_gradients

    def before_backward(self, loss: Tensor, micro_batch: int | None) -> None:
        """Note the loss of the next backward, and prepare present gradients for accumulation.

        Args:
            loss: Unscaled loss, detached, shape ``()``.
            micro_batch: Number of the micro-batch; consecutive calls with the same number count
                as one micro-batch. ``None`` if the loop does not number its micro-batches.
        """
        if self._kept is not None and not self._kept.are(self._present()):
            # The loop has zeroed the gradients without `AttachedOptimizer.zero_grad`.
            self._kept = None
        self.settle_clip()
        self._scale_again()
        self._gradients = Gradients()
        if self._losses and not self._waits_for_gradients():
            # The loop has zeroed the gradients by `network.zero_grad`, so the earlier losses do
            # not contribute to the update.
            self._losses = []
        self._losses.append((loss, micro_batch))

    def after_backward(self) -> None:
        """Note that backward has added to the gradients."""
        if self._kept is not None:
            self._kept = self._see()

    def _scale_again(self) -> None:
        if self.form is Form.UNSCALED:
            multiply_in_place(self._present(), self._loss_scale)
            self._gradients = Gradients()

    def _waits_for_gradients(self) -> bool:
        """Return whether the losses noted so far may still contribute to the update."""
        parameters = self.update.parameters
        # With FSDP2 a shard has no gradient before the last micro-batch. Until then torch keeps
        # the whole gradients in private attributes, so assume here that gradients exist.
        return parameters.reduction is not None or parameters.have_gradients

    def measured(self) -> Measurement:
        """Return norms and overflow; read the gradients only if they changed since the last read.

        Raises:
            RuntimeError: If the gradients changed after a clip was folded into the step.
        """
        known = self._gradients
        last = known.measured
        if last is not None and known.seen.are(self._present()):
            return last
        if known.form is Form.FOLDED:
            msg = (
                "gradients must not change between `clip_grad_norm_` and the optimizer's step, "
                "because the step does the clipping; to change gradients after a clip, call "
                "`unscale_gradients` before `clip_grad_norm_`: the clip is then done in place"
            )
            raise RuntimeError(msg)
        fresh = self.update.measure(may_be_absent=True)
        if known.form is Form.UNSCALED and last is not None:
            fresh = _of_unscaled(fresh)
            fresh = fresh._replace(overflow=last.overflow | fresh.overflow)
        first = fresh if known.first is None else known.first
        self._gradients = known._replace(measured=fresh, seen=self._see(), first=first)
        return fresh

    def may_fold_clip_of(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether a first clip of `parameters` may be folded, if this is the only window.

        This is a quick answer for the usual loop, which clips all parameters of its optimizer once,
        in the network's order. ``False`` says nothing.
        """
        if self.form is not Form.SCALED or self._loop_has_clipped:
            return False
        own = self.update.parameters.tensors
        return (
            len(parameters) == len(own)
            and all(map(operator.is_, parameters, own))
            and any(parameter.grad is not None for parameter in own)
        )

    def fold_clip(self, measured: Measurement, coefficient: Tensor) -> None:
        """Fold a clip into the step: the step will multiply the gradients by `coefficient`.

        Args:
            measured: Result of `measured` for the present gradients. Its norm and its overflow may
                have been replaced by those of all gradients that are clipped together.
            coefficient: Clip factor, shape ``()``, float32.
        """
        # A second clip keeps the norm from before the first one.
        first = self._gradients.first if self._loop_has_clipped else measured
        self._gradients = self._gradients._replace(
            form=Form.FOLDED, measured=measured, first=first, coefficient=coefficient
        )

    def settle_clip(self) -> None:
        """Apply a folded clip to the gradients in place, so that they can be clipped again."""
        coefficient = self._gradients.coefficient
        if coefficient is not None:
            self.note_overflow()
            multiply_in_place(self._present(), coefficient)
            self.accept_clipped(coefficient)
        if self.form is Form.CLIPPED:
            # The last read was before the clip. A second clip needs the norm after the first one.
            self._gradients = self._gradients._replace(measured=None)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, in place, once."""
        if self.form is Form.UNSCALED:
            return
        self.settle_clip()
        measured = self.measured()
        if measured.divisor is not None:
            multiply_in_place(self._present(), measured.divisor.reciprocal())
        self._gradients = self._gradients._replace(
            form=Form.UNSCALED, measured=measured._replace(divisor=None), seen=self._see()
        )

    def hand_back(self, *, scaled: bool) -> None:
        """Make the gradients usable for a loop without this window: apply a folded clip, unscale.

        Args:
            scaled: Whether the loop expects scaled gradients. If so, gradients that the loop has
                unscaled already are scaled again; otherwise, scaled gradients are unscaled.
        """
        if not self.num_backward:
            return
        self.settle_clip()
        if scaled:
            self._scale_again()
        else:
            self.unscale()

    def note_overflow(self) -> None:
        """Remember an overflow that clipping in place might hide."""
        overflow = self.measured().overflow
        self._overflow = overflow if self._overflow is None else self._overflow | overflow

    def accept_clipped(self, factor: Tensor | None = None) -> None:
        """Note that the gradients were clipped in place; keep the norms from before the clip.

        Args:
            factor: Factor by which all of them were multiplied, shape ``()``; ``None`` if some were
                clipped, or elements were clamped.
        """
        form = Form.UNSCALED if self.form is Form.UNSCALED else Form.CLIPPED
        before = self._gradients.clipped_by
        self._gradients = self._gradients._replace(
            form=form,
            seen=self._see(),
            coefficient=None,
            clipped_by=before if factor is None else factor * (1.0 if before is None else before),
        )
        self._loop_has_clipped = True

    def apply(
        self,
        measured: Measurement,
        accumulation_steps: int,
        losses: Mapping[str, Tensor] | None = None,
    ) -> StepReport:
        """Do the update, and start a new window.

        Args:
            measured: Result of `measured`; the gradients must not have changed since.
            accumulation_steps: Number by which the loop has divided each loss.
            losses: Named losses to report, as in `StepReport`.
        """
        if self._overflow is not None:
            measured = measured._replace(overflow=measured.overflow | self._overflow)
        coefficient, first = self._gradients.coefficient, self._gradients.first
        if coefficient is None and self._loop_has_clipped:
            # The gradients are clipped already, so pass a factor of 1. With None the update would
            # clip by the configured norm, if any, or leave the norm out of the report.
            coefficient = torch.ones_like(measured.global_norm)
        elif coefficient is None:
            coefficient = self.update.configured_coefficient(measured)
        if first is not None:
            measured = measured._replace(
                global_norm=first.global_norm,
                own_squares=first.own_squares,
                own_divisor=first.own_divisor,
                reduction_norms=first.reduction_norms,
                groups=first.groups,
            )
        loss = self._loss(accumulation_steps, measured.global_norm.device)
        clipped_by = self._gradients.clipped_by
        report = self.update.apply(loss, measured, coefficient, losses, clipped_by=clipped_by)
        self.restart()
        self._kept = self._used or None
        return report

    def _loss(self, accumulation_steps: int, device: torch.device) -> Tensor:
        if not self._losses:
            return torch.full((), float("nan"), dtype=torch.float32, device=device)
        total = torch.stack([on_device(loss, device).float() for loss, _ in self._losses]).sum()
        numbers = [number for number, _ in itertools.groupby(number for _, number in self._losses)]
        if accumulation_steps == 1 or None in numbers:
            # Without numbers, the micro-batches of the update cannot be counted. The sum is the
            # loss of an update of `accumulation_steps` micro-batches.
            return total
        # Each loss was divided by `accumulation_steps`, but the last update of an epoch may have
        # fewer micro-batches.
        return total * (accumulation_steps / len(numbers))


def _of_unscaled(measured: Measurement) -> Measurement:
    """Correct norms that were divided by the loss scale although the gradients were unscaled."""
    if measured.divisor is None:
        return measured
    norms = measured.reduction_norms
    return measured._replace(
        divisor=None,
        reduction_norms=None if norms is None else norms * measured.divisor,
        global_norm=measured.global_norm * measured.divisor,
        own_divisor=None,
    )
