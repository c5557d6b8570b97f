"""MindFormers' training step for PyTorch, accelerate and the Hugging Face Trainer."""

from typing import TYPE_CHECKING, Any

from mfwrap.absent_names import absent_name_message
from mfwrap.adaptive_loss_scale import AdaptiveLossScaleUpdateCell
from mfwrap.amp import DynamicLossScaler, LossScaler, StaticLossScaler, all_finite
from mfwrap.base_cells import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mfwrap.cell import MFTrainOneStepCell
from mfwrap.config import StepConfig
from mfwrap.deferred import DeferredReads
from mfwrap.ema import ExponentialMovingAverage
from mfwrap.functional import GradOperation, grad, value_and_grad
from mfwrap.gradients import clip_by_global_norm, clip_by_value
from mfwrap.loss_scale import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)
from mfwrap.loss_scale_managers import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport

if TYPE_CHECKING:
    from mfwrap.model import Model

__version__ = "0.1.0"

__all__ = [
    "AdaptiveLossScaleUpdateCell",
    "DeferredReads",
    "DynamicLossScaleManager",
    "DynamicLossScaleUpdateCell",
    "DynamicLossScaler",
    "ExponentialMovingAverage",
    "FixedLossScaleManager",
    "FixedLossScaleUpdateCell",
    "GradOperation",
    "LocalNormStepOutput",
    "LossScaleManager",
    "LossScaleUpdateCell",
    "LossScaler",
    "MFTrainOneStepCell",
    "Model",
    "StaticLossScaler",
    "StepConfig",
    "StepOutput",
    "StepReport",
    "TrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
    "WithLossCell",
    "all_finite",
    "clip_by_global_norm",
    "clip_by_value",
    "grad",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name == "Model":
        # Late, because it loads transformers.
        from mfwrap.model import Model  # noqa: PLC0415

        return Model
    if (absent := absent_name_message(name)) is not None:
        # `from mfwrap import ...` would replace an AttributeError by one that says nothing.
        raise ImportError(absent, name=__name__)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
