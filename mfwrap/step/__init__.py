"""One training step: from micro-batches to the updated weights."""

from mfwrap.step.cell import (
    MFTrainOneStepCell,
)
from mfwrap.step.clipping import (
    clip_by_global_norm,
    clip_by_value,
)
from mfwrap.step.mindspore_cells import (
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
)

__all__ = [
    "MFTrainOneStepCell",
    "TrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
    "WithLossCell",
    "clip_by_global_norm",
    "clip_by_value",
]
