"""One optimizer's way from the first backward to its step, in calls that come one by one."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from mfwrap.outputs import StepReport
from mfwrap.step.update import Measurement, StepUpdate
from mfwrap.tensors.shards import local_tensors, on_device

__all__ = ["OptimizerWindow", "multiply_in_place"]

# Which tensors the gradients are, and how often each was written to. Not their ids: a new gradient
# often lies where one that was released has lain.
_Fingerprint = list[tuple[TensorWeakRef, int]]


@final
class OptimizerWindow:
    """What has been done with an optimizer's gradients since its last step.

    Clipping by norm is measured at once and folded into the step. Where it cannot be folded, the
    gradients are changed in place, and the window remembers what is left to be done.

    Args:
        update: The optimizer's update.
        loss_scale: Shape ``()``, float32: the live loss scale.
        device: Where losses are added up.
    """

    def __init__(self, update: StepUpdate, loss_scale: Tensor) -> None:
        self.update = update
        self.last_report: StepReport | None = None
        self._loss_scale = loss_scale
        self._numbers_micro_batches = False
        self._used: _Fingerprint = []
        self.open()

    def open(self) -> None:
        """Begin anew: what there is of gradients has been used or is given up."""
        self._losses: list[Tensor] = []
        self._micro_batches: list[int] = []
        self._measured: Measurement | None = None
        # Of the gradients before any clipping: what is reported.
        self._first: Measurement | None = None
        self._overflow: Tensor | None = None
        self._coefficient: Tensor | None = None
        self._is_clipped = False
        self.is_unscaled = False
        self.update.forget_local_squares()
        self._used = self._seen = self._fingerprint()

    def _fingerprint(self) -> _Fingerprint:
        gradients = self.update.parameters.present_gradients()
        # A sharded gradient is changed by way of its shard, of which it does not know.
        versions = [local._version for local in local_tensors(gradients)]
        return list(zip(map(TensorWeakRef, gradients), versions, strict=True))

    def _are_as_at(self, fingerprint: _Fingerprint) -> bool:
        gradients = self.update.parameters.present_gradients()
        return len(gradients) == len(fingerprint) and all(
            reference() is gradient and version == local._version
            for gradient, local, (reference, version) in zip(
                gradients, local_tensors(gradients), fingerprint, strict=True
            )
        )

    @property
    def has_backward(self) -> bool:
        """Whether a loss was scaled in this window."""
        return bool(self._losses)

    def has_unused_gradients(self) -> bool:
        """Return whether a backward has reached these gradients since the last step."""
        present = self.update.parameters.present_gradients()
        return bool(present) and not self._are_as_at(self._used)

    def before_backward(self, loss: Tensor, micro_batch: int) -> None:
        """Make the gradients ready for more of them, and note the loss.

        Args:
            loss: Shape ``()``, detached, as it is differentiated, unscaled.
            micro_batch: Number of the micro-batch; consecutive calls of one number count once.
        """
        if self._measured is not None:
            self.settle_clip()
            if self.is_unscaled:
                multiply_in_place(self.update.parameters.present_gradients(), self._loss_scale)
                self.is_unscaled = False
            self._measured = self._first = None
        if self._losses and not self._waits_for_gradients():
            # Zeroed by their network: nothing is left of what these losses gave.
            self._losses, self._micro_batches = [], []
        self._losses.append(loss)
        self._numbers_micro_batches |= micro_batch != 0
        if self._micro_batches[-1:] != [micro_batch]:
            self._micro_batches.append(micro_batch)

    def _waits_for_gradients(self) -> bool:
        """Return whether there are gradients that the optimizer has not used."""
        parameters = self.update.parameters
        # Shards get their gradients in the last backward; until then they wait out of reach.
        return parameters.reduction is not None or bool(parameters.present_gradients())

    def measured(self) -> Measurement:
        """Read the gradients, unless they are as they were at the last read.

        Raises:
            RuntimeError: If they changed after their clipping was folded into the step.
        """
        if self._measured is not None and self._are_as_at(self._seen):
            return self._measured
        if self._coefficient is not None:
            msg = (
                "gradients must not change between `clip_grad_norm_` and the optimizer's step, "
                "which does the clipping; call `unscale_gradients` before `clip_grad_norm_` to "
                "have them clipped in place"
            )
            raise RuntimeError(msg)
        fresh = self.update.measure(may_be_absent=True)
        if self.is_unscaled and self._measured is not None:
            fresh = _of_unscaled(fresh)
            fresh = fresh._replace(overflow=self._measured.overflow | fresh.overflow)
        self._measured = fresh
        self._first = self._first or fresh
        self._seen = self._fingerprint()
        return fresh

    def fold_clip(self, global_norm: Tensor, overflow: Tensor, coefficient: Tensor) -> None:
        """Let the step multiply the gradients by `coefficient`.

        Args:
            global_norm: Shape ``()``, float32: what they were clipped by.
            overflow: Shape ``()``, bool: whether it is not finite.
            coefficient: Shape ``()``, float32.
        """
        self._measured = self.measured()._replace(global_norm=global_norm, overflow=overflow)
        if not self._is_clipped:
            self._first = self._measured
        self._coefficient = coefficient

    def settle_clip(self) -> None:
        """Do in place what had been folded into the step, so that more can be done."""
        if self._coefficient is not None:
            self.note_overflow()
            multiply_in_place(self.update.parameters.present_gradients(), self._coefficient)
            self._coefficient = None
            self._is_clipped = True
        if self._is_clipped and not self.is_unscaled:
            # Norms were taken before; whoever clips again needs those of the gradients as they are.
            self._measured = None

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, in place, once."""
        if self.is_unscaled:
            return
        self.settle_clip()
        measured = self.measured()
        if measured.divisor is not None:
            gradients = self.update.parameters.present_gradients()
            multiply_in_place(gradients, measured.divisor.reciprocal())
        self._measured = measured._replace(divisor=None)
        self._seen = self._fingerprint()
        self.is_unscaled = True

    def hand_back(self, *, scaled: bool) -> None:
        """Leave the gradients as a loop without this window expects them.

        Args:
            scaled: With the loss scale still in them.
        """
        if self.has_backward:
            self.settle_clip()
            if not scaled:
                self.unscale()

    def note_overflow(self) -> None:
        """Remember an overflow that clipping in place might hide."""
        overflow = self.measured().overflow
        self._overflow = overflow if self._overflow is None else self._overflow | overflow

    def accept_clipped(self) -> None:
        """Take the gradients as they are after clipping in place; norms stay those before it."""
        self._seen = self._fingerprint()
        self._is_clipped = True

    def apply(self, accumulation_steps: int) -> StepReport:
        """Do the update.

        Args:
            accumulation_steps: What each loss was divided by.
        """
        measured = self.measured()
        if self._overflow is not None:
            measured = measured._replace(overflow=measured.overflow | self._overflow)
        coefficient = self._coefficient
        if coefficient is None and self._is_clipped:
            coefficient = torch.ones_like(measured.global_norm)
        elif coefficient is None:
            coefficient = self.update.configured_coefficient(measured)
        if self._first is not None:
            measured = measured._replace(
                global_norm=self._first.global_norm,
                local_norm=self._first.local_norm,
                groups=self._first.groups,
            )
        loss = self._loss(accumulation_steps, measured.global_norm.device)
        self.last_report = self.update.apply(loss, measured, coefficient)
        self.open()
        return self.last_report

    def _loss(self, accumulation_steps: int, device: torch.device) -> Tensor:
        if not self._losses:
            return torch.full((), float("nan"), dtype=torch.float32, device=device)
        total = torch.stack([on_device(loss, device).float() for loss in self._losses]).sum()
        if accumulation_steps == 1 or not self._numbers_micro_batches:
            # A loop that does not let accelerate count undoes the division by itself.
            return total
        # The last window of an epoch may be shorter than what each loss was divided by.
        return total * (accumulation_steps / len(self._micro_batches))


def _of_unscaled(measured: Measurement) -> Measurement:
    """Return a measurement of gradients that were unscaled, as which it was not taken."""
    if measured.divisor is None:
        return measured
    return measured._replace(
        divisor=None,
        global_norm=measured.global_norm * measured.divisor,
        local_norm=measured.local_norm * measured.divisor,
    )


@torch.no_grad()
def multiply_in_place(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors of any devices by `factor`, shape ``()``, without reading it."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in local_tensors(gradients):
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, members in by_device.items():
        torch._foreach_mul_(members, on_device(factor, device))
