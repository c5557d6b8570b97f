"""MindFormers' training step for PyTorch, accelerate and the Hugging Face Trainer."""

from typing import TYPE_CHECKING

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.loss_scale import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)
from mfwrap.mindspore.functional import GradOperation, grad, value_and_grad
from mfwrap.mindspore.managers import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from mfwrap.mindspore.scalers import DynamicLossScaler, LossScaler, StaticLossScaler, all_finite
from mfwrap.names import ABSENT_NAMES, package_getattr
from mfwrap.optimizers import AdamWeightDecay, ChainedOptimizer
from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
from mfwrap.step.cell import MFTrainOneStepCell
from mfwrap.step.clipping import clip_by_global_norm, clip_by_value
from mfwrap.step.mindspore_cells import (
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
)
from mfwrap.step.pipeline import pipeline_stages
from mfwrap.tensors.deferred import DeferredReads

if TYPE_CHECKING:
    from mfwrap.model.model import Model

__version__ = "0.1.0"

__all__ = [
    "AdamWeightDecay",
    "AdaptiveLossScaleUpdateCell",
    "ChainedOptimizer",
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
    "pipeline_stages",
    "value_and_grad",
]


__getattr__ = package_getattr(__name__, {"Model": "mfwrap.model.model"}, ABSENT_NAMES)
