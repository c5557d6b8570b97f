"""Keep loss scales on the device, and change them by the rules of MindSpore and MindFormers."""

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
