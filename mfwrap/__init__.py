"""MindFormers' training step for PyTorch, accelerate and the Hugging Face Trainer."""

from mfwrap.adaptive_loss_scale import AdaptiveLossScaleUpdateCell
from mfwrap.base_cells import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mfwrap.cell import MFTrainOneStepCell
from mfwrap.config import StepConfig
from mfwrap.deferred import DeferredReads
from mfwrap.ema import ExponentialMovingAverage
from mfwrap.gradients import clip_by_global_norm, clip_by_value
from mfwrap.loss_scale import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport

__version__ = "0.1.0"

__all__ = [
    "AdaptiveLossScaleUpdateCell",
    "DeferredReads",
    "DynamicLossScaleUpdateCell",
    "ExponentialMovingAverage",
    "FixedLossScaleUpdateCell",
    "LocalNormStepOutput",
    "LossScaleUpdateCell",
    "MFTrainOneStepCell",
    "StepConfig",
    "StepOutput",
    "StepReport",
    "TrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
    "WithLossCell",
    "clip_by_global_norm",
    "clip_by_value",
]
