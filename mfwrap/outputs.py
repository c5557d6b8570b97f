"""Results of a training step: detached tensors on the training device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mfwrap.collectives.clock import StepSections


class StepOutput(NamedTuple):
    """Result of one update: MindFormers' 5-tuple.

    Reading a value on the host synchronizes with the device.

    Source: MindFormers, ``MFTrainOneStepCell``.

    Attributes:
        loss: Shape ``()``, float32. Unscaled loss of this update on this rank: the mean over the
            micro-batches or, for a loss per token, the sum of numerators divided by the sum of
            denominators.
        overflow: Shape ``()``, bool. Whether at least one rank had non-finite gradients in this
            update.
        loss_scale: Shape ``()``, float32. Loss scale that the next step uses; a copy.
        learning_rate: Shape ``()``, float32. Rate of the first parameter group in this update.
        global_norm: Shape ``()``, float32. L2 norm of all unscaled, reduced gradients before
            clipping; ``None`` without ``use_clip_grad`` or a ``spike_policy`` that judges it.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor
    learning_rate: Tensor
    global_norm: Tensor | None


class LocalNormStepOutput(NamedTuple):
    """Result of one update with local norms: MindFormers' 7-tuple.

    Source: MindFormers, ``MFTrainOneStepCell(local_norm=True)``. There ``local_norm`` is the sum of
    squares; here it is the norm.

    Attributes:
        loss: As in `StepOutput`.
        overflow: As in `StepOutput`.
        loss_scale: As in `StepOutput`.
        learning_rate: As in `StepOutput`.
        global_norm: As in `StepOutput`.
        local_norm: Shape ``(G,)``, float32. L2 norm per group of the unscaled gradients of this
            rank's own loss, before they are reduced over ranks.
        size: Shape ``(G,)``, int64. Number of gradient elements per group.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor
    learning_rate: Tensor
    global_norm: Tensor | None
    local_norm: Tensor
    size: Tensor


class LossScaleStepOutput(NamedTuple):
    """Result of MindSpore's plain step with a loss scale: a 3-tuple.

    Source: MindSpore, ``nn.TrainOneStepWithLossScaleCell``.

    Attributes:
        loss: As in `StepOutput`.
        overflow: As in `StepOutput`.
        loss_scale: As in `StepOutput`.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Report of one update; callbacks get it as ``step_report``."""

    output: StepOutput | LocalNormStepOutput
    """Result that the cell returned."""

    skipped: Tensor
    """Shape ``()``, bool. Whether the update was skipped, so that weights, optimizer, schedule and
    average did not change."""

    applied_updates: Tensor
    """Shape ``()``, int64. Number of updates applied so far, including this update."""

    skipped_updates: Tensor
    """Shape ``()``, int64. Number of updates skipped so far, including this update."""

    consecutive_skips: Tensor
    """Shape ``()``, int64. Number of skipped updates in a row, including this update; 0 if this
    update was applied."""

    learning_rates: Tensor
    """Shape ``(number of parameter groups,)``, float32. Rates used by this update."""

    local_norm_names: tuple[str, ...]
    """Names of the groups of ``output.local_norm``, in its order."""

    losses: Mapping[str, Tensor] = field(default_factory=dict)
    """Losses that the network has reported beside the loss of the update, such as ``lm_loss`` and
    ``mtp_loss``, by name. Shape ``()``, float32; the mean over this rank's micro-batches. See
    `mfwrap.step.losses.named_losses`."""

    learning_rate_names: tuple[str, ...] = ()
    """Names of the parameter groups of `learning_rates`, in its order: the entry ``name`` of each
    group. Empty unless each group has a name."""

    spike_score: Tensor | None = None
    """Shape ``()``, float32. Distance of the logarithm of the global norm above the expected one,
    in deviations; NaN if the norm is 0 or non-finite, and in the first update. ``None`` with
    ``spike_policy="record"``."""

    reduction_norms: Tensor | None = None
    """Shape ``(2,)``, float32. L2 norms of all unscaled gradients of the optimizer: of this rank's
    own gradients before their reduction over ranks, and of the reduced ones. ``None`` without
    ``local_norm``, if no gradients are reduced, if the ranks reduce only some of them, and in a
    pipeline."""

    learning_rate_factor: float = 1.0
    """Factor by which the rates of the groups were multiplied for this update. `learning_rates` are
    the products. Less than 1 only for a while after a rollback; see `mfwrap.trainer.Rollback`."""

    sections: "StepSections | None" = None
    """Times of data loading, forward and backward, reduction, update and waiting on this rank,
    since the previous update. ``None`` unless a monitor such as `RankClock` reads them."""


def named_output(outputs: Any) -> Any:
    """Return a training cell's plain tuple as a named tuple; return anything else unchanged.

    A plain tuple has 3, 4, 5 or 7 values in MindFormers' order: loss, overflow, loss scale,
    learning rate, global norm. The first three must be a tensor, a flag and a number. The last two
    of 7 values, the local norms and sizes, are left out, because a cell written for MindFormers
    returns sums of squares as local norms. Does not synchronize with the device.

    Args:
        outputs: Result of a training cell.

    Source: MindFormers, ``MFLossMonitor``, which reads the second value as the flag without a
    check.

    Example:
        >>> loss, overflow, scale = torch.tensor(2.0), torch.tensor(True), torch.tensor(8.0)
        >>> named_output((loss, overflow, scale)).overflow
        tensor(True)
    """
    if type(outputs) is not tuple or len(outputs) not in {3, 4, 5, 7}:
        return outputs
    loss, *others = outputs[:5]
    if not isinstance(loss, Tensor):
        return outputs
    # A value that is not one number, such as a rate for each group, becomes None.
    scalars: list[Any] = [_scalar(value, loss.device) for value in others]
    overflow, loss_scale, *rest = scalars
    if overflow is None or overflow.dtype != torch.bool or loss_scale is None:
        return outputs
    if not rest:
        return LossScaleStepOutput(loss, overflow, loss_scale)
    return StepOutput(loss, overflow, loss_scale, *(*rest, None)[:2])


def _scalar(value: Any, device: torch.device) -> Tensor | None:
    """Return a number or a one-element tensor as a tensor of shape ``()``, else ``None``."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 else None
    if isinstance(value, (bool, int, float)):
        kind = torch.bool if isinstance(value, bool) else torch.float32
        # Fill on the device, because a copy from the host would synchronize with the device.
        return torch.full((), value, dtype=kind, device=device)
    return None
