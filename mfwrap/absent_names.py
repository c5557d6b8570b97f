"""Names of MindSpore and MindFormers that have no place here, and what to write instead."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["INSTEAD", "absent_name_message"]

_ACCUMULATION = "`MFTrainOneStepCell(..., gradient_accumulation_steps=micro_size)`"
_PIPELINE = (
    f"{_ACCUMULATION}, which runs the micro-batches one after the other; stages on several devices "
    "are those of `torch.distributed.pipelining`"
)
_TWO_OUTPUTS = "`calculate_per_token_loss=True` for a network that returns two outputs"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "ClipGradNorm": "`MFTrainOneStepCell(..., use_clip_grad=True, max_grad_norm=...)`, or "
        "`mfwrap.clip_by_global_norm` for gradients of one's own",
        "DataOrderWrapperCell": "`cell(**batch)`, which passes a batch by keyword in any order",
        "DistributedGradReducer": "`torch.nn.parallel.DistributedDataParallel`, which averages "
        "gradients in backward, or `accelerator.reduce(gradients, 'mean')` for those of "
        "`mfwrap.grad`",
        "ForwardValueAndGrad": "`mfwrap.value_and_grad(network, None, network.parameters())`",
        "GetNextSingleOp": "a loop over a `torch.utils.data.DataLoader`",
        "GradAccumulationCell": _ACCUMULATION,
        "GradAccumulationCellWithMultiOutputs": _ACCUMULATION,
        "GradAccumulationCellWithTwoOutput": f"{_ACCUMULATION}, with {_TWO_OUTPUTS}",
        "LearningRateWiseLayer": "a parameter group of its own, `{'params': ..., 'lr': lr_scale * "
        "learning_rate}`: each schedule of `mfwrap.schedules` starts from the group's rate",
        "LocalNorm": "`MFTrainOneStepCell(..., local_norm=True)`",
        "MFPipelineWithLossScaleCell": "`MFTrainOneStepCell(..., use_clip_grad=True, "
        "gradient_accumulation_steps=micro_batch_num)`",
        "MicroBatchInterleaved": _ACCUMULATION,
        "ParameterTuple": "`tuple(network.parameters())`",
        "PipelineCell": _PIPELINE,
        "PipelineCellWithMultiOutputs": _PIPELINE,
        "PipelineCellWithTwoOutput": f"{_PIPELINE}; with {_TWO_OUTPUTS}",
        "WithEvalCell": "`with torch.no_grad():` around the network and its loss function",
    }
)
"""What stands for each name."""


def absent_name_message(name: str) -> str | None:
    """Return the error of a name that is absent on purpose; ``None`` for any other name."""
    if name not in INSTEAD:
        return None
    return f"mfwrap has no `{name}`, which torch has no use for; write {INSTEAD[name]}"
