"""Tell from the losses of micro-batches whether data or weights have changed."""

import math
import statistics
from collections.abc import Sequence

import torch

from mfwrap.callbacks.culprit.replay.recorder import RecordedCall, StepRecorder, loss_of
from mfwrap.callbacks.culprit.replay.replay import attempted


def losses_of(calls: Sequence[RecordedCall]) -> tuple[float, ...]:
    """Return the loss that the network returned for each micro-batch of a step.

    Synchronizes with the device.

    Returns:
        Empty unless the network returned each loss.
    """
    found = [call.loss for call in calls]
    known = [loss.item() for loss in found if loss is not None]
    return tuple(known) if len(known) == len(found) else ()


def factor_change(now: Sequence[float], before: Sequence[float]) -> float | None:
    """Return the ratio of the mean factor of a step to that of the step before; see `factors_of`.

    Returns:
        ``None`` if the factors of a step are unknown, or if those of the step before are 0.
    """
    usual = statistics.fmean(map(abs, before)) if before else 0.0
    return statistics.fmean(map(abs, now)) / usual if now and usual > 0 else None


def factors_of(calls: Sequence[RecordedCall]) -> tuple[float, ...]:
    """Return the gradient that a step's backward passed to each micro-batch's loss.

    This is the loss scale with all factors of the loop, such as one over the number of
    micro-batches. Synchronizes with the device.

    Returns:
        Empty unless the network returned each loss, and the backward reached it.
    """
    found = [call.loss_gradient for call in calls]
    known = [gradient.float().sum().item() for gradient in found if gradient is not None]
    return tuple(known) if len(known) == len(found) else ()


def losses_again(
    recorder: StepRecorder, calls: Sequence[RecordedCall]
) -> tuple[tuple[float, float], ...]:
    """Compute the losses of a step again, with the present weights.

    If a step went wrong, and the step before has its losses again, then weights and program are as
    they were. If the step itself does not have its losses again, neither are its data at fault.
    Inputs and random numbers are those of that step; random states and buffers are restored.
    Synchronizes with the device.

    Args:
        recorder: Recorder of the network.
        calls: Calls of one of its steps.

    Returns:
        Loss of each micro-batch then and with the present weights; empty if the network returned no
        loss, or if a call raises an error, such as out of memory.
    """
    then = losses_of(calls)
    if not then:
        return ()

    def again() -> tuple[tuple[float, float], ...]:
        with torch.no_grad():
            losses = [loss_of(call.run(recorder)) for call in calls]
        known = [math.nan if loss is None else loss.item() for loss in losses]
        return tuple(zip(then, known, strict=True))

    return attempted(recorder, again, ())
