"""Replay a bad step as often as needed to say whether it fails again."""

import math
from typing import Literal, NamedTuple

import torch

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.replay import (
    Origin,
    origin_in_others,
    origin_outside,
    replay_step,
    unscaled_norm,
)

TOO_LARGE = "finite gradients whose norm is too large for float32"
"""`Verdict.detail` of a step without a non-finite value."""

_LARGEST_NORM = 2.0**64
"""Its square is infinite in float32."""


class Verdict(NamedTuple):
    """Result of the replays of one step on one rank."""

    result: Literal["reproduced", "not_reproduced", "not_covered", "failed"]
    """``"reproduced"``: a replay found the fault. ``"not_reproduced"``: a replay that covers the
    step found all values finite. ``"not_covered"``: so did a replay of only a part of the step.
    ``"failed"``: the replay raised an error."""

    detail: str = ""
    """What differs between the replays, what is outside of the replay, or the error; or that all
    values are finite, and the norm of the gradients is not."""

    origin: Origin | None = None
    """Place of the first non-finite value, if there is one and the fault was reproduced, or if it
    is outside of the network: see `origin_outside`."""

    num_clean: int = 0
    """Number of replays in which all values were finite."""

    unscaled_norm: float | None = None
    """Bound of the norm of this rank's gradients in a replay without the loss scale, if only the
    gradients were non-finite; ``None`` without such a replay."""

    def norm_without_scale(self, *, in_float16: bool) -> float | None:
        """Return a bound of the norm of the gradients without the loss scale.

        Args:
            in_float16: Whether the network computes in float16, so that single elements overflow.
                In float32 it may be the norm alone, which a replay does not compute.

        Returns:
            ``None`` if it is unknown. Infinite if the scale is not at fault: exact replays with it
            were finite, or something else than a gradient was the first non-finite value.
        """
        is_transient = in_float16 and self.detail == "transient"
        if is_transient or (self.result == "reproduced" and self.unscaled_norm is None):
            return math.inf
        return self.unscaled_norm


def verdict_of(
    recorder: StepRecorder, loss_scale: float, *, loss_is_finite: bool, is_exact: bool
) -> Verdict:
    """Replay the last step, and say whether it fails again.

    If an exact replay that covers the step is clean, the step is replayed a second time, and a
    third time with deterministic kernels. Synchronizes with the device. Never raises an error of
    the network: other ranks wait for the verdict.

    Args:
        recorder: Recorder that holds the step.
        loss_scale: Loss scale of the step.
        loss_is_finite: Whether the loss of the step was finite on this rank.
        is_exact: Whether the weights are those of the step.
    """
    try:
        origin = replay_step(recorder, loss_scale)
        if origin is not None:
            if origin.where == "loss":
                origin = origin_in_others(recorder) or origin
            asks_scale = origin.where == "gradient" and loss_is_finite and loss_scale > 1
            norm = unscaled_norm(recorder, loss_scale) if asks_scale else None
            return Verdict("reproduced", "", origin, unscaled_norm=norm)
        outside = outside_of_replay(recorder, loss_is_finite=loss_is_finite)
        if outside is not None:
            return Verdict("not_covered", outside, origin_outside(recorder), num_clean=1)
        if not is_exact:
            return Verdict("not_reproduced", "later weights", num_clean=1)
        if loss_is_finite and unscaled_norm(recorder, 1.0) >= _LARGEST_NORM:
            norm = unscaled_norm(recorder, loss_scale) if loss_scale > 1 else None
            return Verdict("reproduced", TOO_LARGE, unscaled_norm=norm)
        return _repeated(recorder, loss_scale)
    # A replay runs code of the network and of its hooks, which may raise any error. The error must
    # not end the training, nor leave the other ranks in a collective.
    except Exception as error:  # noqa: BLE001  (see above)
        is_memory = isinstance(error, torch.OutOfMemoryError)
        kind = "out of memory" if is_memory else type(error).__name__
        return Verdict("failed", f"{kind}: {str(error).partition(chr(10))[0]}")


def _repeated(recorder: StepRecorder, loss_scale: float) -> Verdict:
    """Replay a step, whose first replay was clean, as before and with deterministic kernels."""
    origin = replay_step(recorder, loss_scale)
    if origin is not None:
        return Verdict("reproduced", "only by the second of two replays", origin, num_clean=1)
    origin = _replay_deterministically(recorder, loss_scale)
    if origin is not None:
        return Verdict("reproduced", "only with deterministic kernels", origin, num_clean=2)
    return Verdict("not_reproduced", "transient", num_clean=3)


def _replay_deterministically(recorder: StepRecorder, loss_scale: float) -> Origin | None:
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # Some operations have no deterministic kernel. They run as usual, with a warning.
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        return replay_step(recorder, loss_scale)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def outside_of_replay(recorder: StepRecorder, *, loss_is_finite: bool) -> str | None:
    """Tell what part of the last step a replay of its calls cannot repeat.

    Synchronizes with the device.

    Args:
        recorder: Recorder that holds the calls.
        loss_is_finite: Whether the loss of the step was finite on this rank.

    Returns:
        A clause for the log; ``None`` if the replay covers the step from inputs to gradients.
    """
    calls = recorder.last_step
    if not calls:
        return "no call of the network in training mode was recorded"
    losses = [call.loss for call in calls if call.loss is not None]
    if len(losses) < len(calls):
        return "the loss is computed outside of the network"
    if all(loss.isfinite() for loss in losses) and not loss_is_finite:
        return "the network's loss was finite, the loss became non-finite outside of the network"
    gradients = [call.loss_gradient for call in calls]
    if any(gradient is not None and not gradient.isfinite().all() for gradient in gradients):
        return "the network's loss got a non-finite gradient from outside of the network"
    if loss_is_finite and any(gradient is None for gradient in gradients):
        return "the backward did not start from the network's loss"
    return None
