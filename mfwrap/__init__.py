"""MindFormers' training step for PyTorch, accelerate and the Hugging Face Trainer."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.average.ema import ExponentialMovingAverage
    from mfwrap.config import StepConfig
    from mfwrap.loss_scale import (
        AdaptiveLossScaleUpdateCell,
        DynamicLossScaleUpdateCell,
        FixedLossScaleUpdateCell,
        LossScaleUpdateCell,
    )
    from mfwrap.mindspore.cells import (
        TrainOneStepCell,
        TrainOneStepWithLossScaleCell,
        WithLossCell,
    )
    from mfwrap.mindspore.managers import (
        DynamicLossScaleManager,
        FixedLossScaleManager,
        LossScaleManager,
    )
    from mfwrap.mindspore.model import Model
    from mfwrap.mindspore.scalers import (
        DynamicLossScaler,
        LossScaler,
        StaticLossScaler,
        all_finite,
    )
    from mfwrap.optimizers import AdamWeightDecay, ChainedOptimizer
    from mfwrap.outputs import LocalNormStepOutput, StepOutput, StepReport
    from mfwrap.step.cell import MFTrainOneStepCell
    from mfwrap.step.clipping import clip_by_global_norm, clip_by_value
    from mfwrap.step.parts.functional import GradOperation, grad, value_and_grad
    from mfwrap.step.pipeline import pipeline_stages
    from mfwrap.tensors.deferred import DeferredReads

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


# Modules are imported when a name is first used: the command line, for example, shows its help
# without torch.
_HOMES = {
    "AdamWeightDecay": "mfwrap.optimizers",
    "AdaptiveLossScaleUpdateCell": "mfwrap.loss_scale",
    "ChainedOptimizer": "mfwrap.optimizers",
    "DeferredReads": "mfwrap.tensors.deferred",
    "DynamicLossScaleManager": "mfwrap.mindspore.managers",
    "DynamicLossScaleUpdateCell": "mfwrap.loss_scale",
    "DynamicLossScaler": "mfwrap.mindspore.scalers",
    "ExponentialMovingAverage": "mfwrap.average.ema",
    "FixedLossScaleManager": "mfwrap.mindspore.managers",
    "FixedLossScaleUpdateCell": "mfwrap.loss_scale",
    "GradOperation": "mfwrap.step.parts.functional",
    "LocalNormStepOutput": "mfwrap.outputs",
    "LossScaleManager": "mfwrap.mindspore.managers",
    "LossScaleUpdateCell": "mfwrap.loss_scale",
    "LossScaler": "mfwrap.mindspore.scalers",
    "MFTrainOneStepCell": "mfwrap.step.cell",
    "Model": "mfwrap.mindspore.model",
    "StaticLossScaler": "mfwrap.mindspore.scalers",
    "StepConfig": "mfwrap.config",
    "StepOutput": "mfwrap.outputs",
    "StepReport": "mfwrap.outputs",
    "TrainOneStepCell": "mfwrap.mindspore.cells",
    "TrainOneStepWithLossScaleCell": "mfwrap.mindspore.cells",
    "WithLossCell": "mfwrap.mindspore.cells",
    "all_finite": "mfwrap.mindspore.scalers",
    "clip_by_global_norm": "mfwrap.step.clipping",
    "clip_by_value": "mfwrap.step.clipping",
    "grad": "mfwrap.step.parts.functional",
    "pipeline_stages": "mfwrap.step.pipeline",
    "value_and_grad": "mfwrap.step.parts.functional",
}

__getattr__ = package_getattr(__name__, _HOMES, explains=True)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
