"""Loss scales that live on the device and change by rules."""

from mfwrap.loss_scale.adaptive import (
    AdaptiveLossScaleUpdateCell,
)
from mfwrap.loss_scale.cells import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)

__all__ = [
    "AdaptiveLossScaleUpdateCell",
    "DynamicLossScaleUpdateCell",
    "FixedLossScaleUpdateCell",
    "LossScaleUpdateCell",
]
