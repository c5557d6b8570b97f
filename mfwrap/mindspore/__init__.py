"""MindSpore's functional gradients, loss scalers and loss scale managers."""

from mfwrap.mindspore.functional import (
    GradOperation,
    grad,
    value_and_grad,
)
from mfwrap.mindspore.managers import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from mfwrap.mindspore.scalers import (
    DynamicLossScaler,
    LossScaler,
    StaticLossScaler,
    all_finite,
)

__all__ = [
    "DynamicLossScaleManager",
    "DynamicLossScaler",
    "FixedLossScaleManager",
    "GradOperation",
    "LossScaleManager",
    "LossScaler",
    "StaticLossScaler",
    "all_finite",
    "grad",
    "value_and_grad",
]
