"""Loss scales that live on the device, and the rules that change them."""

from mfwrap.loss_scale.adaptive import AdaptiveLossScaleUpdateCell
from mfwrap.loss_scale.cells import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)
from mfwrap.loss_scale.names import UPDATE_CELLS

__all__ = [
    "UPDATE_CELLS",
    "AdaptiveLossScaleUpdateCell",
    "DynamicLossScaleUpdateCell",
    "FixedLossScaleUpdateCell",
    "LossScaleUpdateCell",
]
