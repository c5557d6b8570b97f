"""Results of a training step: detached tensors on the training device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StepOutput(NamedTuple):
    """Result of one update, MindFormers' 5-tuple.

    Reading a value on the host synchronizes with the device.

    Source: MindFormers, ``MFTrainOneStepCell``.

    Attributes:
        loss: Shape ``()``, float32. Unscaled loss of this update on this rank: the mean over its
            micro-batches, or its numerators over its denominators.
        overflow: Shape ``()``, bool. Whether the gradients of this update were not finite on any
            rank.
        loss_scale: Shape ``()``, float32. Loss scale that the next step uses; a copy.
        learning_rate: Shape ``()``, float32. Rate of the first parameter group in this update.
        global_norm: Shape ``()``, float32. L2 norm of all unscaled, reduced gradients before
            clipping; ``None`` unless ``use_clip_grad``.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor
    learning_rate: Tensor
    global_norm: Tensor | None


class LocalNormStepOutput(NamedTuple):
    """Result of one update with local norms, MindFormers' 7-tuple.

    Source: MindFormers, ``MFTrainOneStepCell(local_norm=True)``, which returns sums of squares
    under this name; here it is the norm.

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
    """Result of MindSpore's plain step with a loss scale, a 3-tuple.

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
    """Shape ``()``, bool. Whether weights, optimizer, schedule and average were left as they
    were."""

    applied_updates: Tensor
    """Shape ``()``, int64. Updates applied so far, this one included."""

    skipped_updates: Tensor
    """Shape ``()``, int64. Updates skipped so far, this one included."""

    consecutive_skips: Tensor
    """Shape ``()``, int64. Skipped updates in a row up to this one; 0 if it was applied."""

    learning_rates: Tensor
    """Shape ``(number of parameter groups,)``, float32. Rates used by this update."""

    local_norm_names: tuple[str, ...]
    """Names of the groups of ``output.local_norm``, in its order."""


def named_output(outputs: Any) -> Any:
    """Return a training cell's plain tuple as a named tuple; return anything else unchanged.

    A plain tuple has 3, 4, 5 or 7 values in MindFormers' order: loss, overflow, loss scale,
    learning rate, global norm. The first three must be a tensor, a flag and a number. The last two
    of 7 values are left out: in a cell that was written for MindFormers, local norms are sums of
    squares. Does not synchronize with the device.

    Args:
        outputs: Result of a training cell.

    Source: MindFormers, ``MFLossMonitor``, which takes any second value for the flag.

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
    """Return a number, or a tensor of one element, with shape ``()``; ``None`` for all else."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 else None
    if isinstance(value, (bool, int, float)):
        kind = torch.bool if isinstance(value, bool) else torch.float32
        # Filled on the device: a copy from the host would synchronize with it.
        return torch.full((), value, dtype=kind, device=device)
    return None
