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
        "Accuracy": "`metrics={'accuracy'}` of `mfwrap.Model`, or a metric of `torchmetrics`",
        "Cell": "`torch.nn.Module`, and `forward` for `construct`",
        "ClipGradNorm": "`MFTrainOneStepCell(..., use_clip_grad=True, max_grad_norm=...)`, or "
        "`mfwrap.clip_by_global_norm` for gradients of one's own",
        "DataOrderWrapperCell": "`cell(**batch)`, which passes a batch by keyword in any order",
        "Dense": "`torch.nn.Linear`",
        "DistributedGradReducer": "`torch.nn.parallel.DistributedDataParallel`, which averages "
        "gradients in backward, or `accelerator.reduce(gradients, 'mean')` for those of "
        "`mfwrap.grad`",
        "ForwardValueAndGrad": "`mfwrap.value_and_grad(network, None, network.parameters())`",
        "GRAPH_MODE": "nothing, or `torch.compile` around the network",
        "GeneratorDataset": "`torch.utils.data.DataLoader`",
        "GetNextSingleOp": "a loop over a `torch.utils.data.DataLoader`",
        "GradAccumulationCell": _ACCUMULATION,
        "GradAccumulationCellWithMultiOutputs": _ACCUMULATION,
        "GradAccumulationCellWithTwoOutput": f"{_ACCUMULATION}, with {_TWO_OUTPUTS}",
        "LearningRateWiseLayer": "a parameter group of its own, `{'params': ..., 'lr': lr_scale * "
        "learning_rate}`: each schedule of `mfwrap.schedules` starts from the group's rate",
        "LocalNorm": "`MFTrainOneStepCell(..., local_norm=True)`",
        "MFPipelineWithLossScaleCell": "`MFTrainOneStepCell(..., use_clip_grad=True, "
        "gradient_accumulation_steps=micro_batch_num)`",
        "MSELoss": "`torch.nn.MSELoss`",
        "MatMul": "`torch.matmul`",
        "MicroBatchInterleaved": _ACCUMULATION,
        "Momentum": "`torch.optim.SGD`, which has an argument `momentum`",
        "PYNATIVE_MODE": "nothing: torch runs statements as they come",
        "ParallelMode": "`accelerate launch` in front of the script, which makes "
        "`mfwrap.Model` data-parallel",
        "Parameter": "`torch.nn.Parameter`",
        "ParameterTuple": "`tuple(network.parameters())`",
        "PipelineCell": _PIPELINE,
        "PipelineCellWithMultiOutputs": _PIPELINE,
        "PipelineCellWithTwoOutput": f"{_PIPELINE}; with {_TWO_OUTPUTS}",
        "SoftmaxCrossEntropyWithLogits": "`torch.nn.CrossEntropyLoss`, which is sparse and a mean "
        "by default",
        "Tensor": "`torch.tensor`",
        "WithEvalCell": "`with torch.no_grad():` around the network and its loss function",
        "WithGradCell": "`mfwrap.GradOperation`",
        "build_train_network": "`mfwrap.Model`, and its `train_network`",
        "build_wrapper": "`mfwrap.MFTrainOneStepCell`, or a recipe that `mfwrap train` runs",
        "get_grad": "`dict(gradients)[identifier]`: with `return_ids` each gradient stands beside "
        "its id",
        "load_checkpoint": "`torch.load` with `weights_only`",
        "load_param_into_net": "`network.load_state_dict(...)`",
        "save_checkpoint": "`torch.save`, or `mfwrap.callbacks.ModelCheckpoint`",
        "set_auto_parallel_context": "`accelerate launch` in front of the script",
        "set_context": "`Accelerator(cpu=True)` in front of everything to stay on the CPU; "
        "accelerate finds other devices by itself",
    }
)
"""What stands for each name.

No function of torch has one of these names: pickle looks a function without a module up in all
modules, and expects nothing but an AttributeError.
"""


def absent_name_message(name: str) -> str | None:
    """Return the error of a name that is absent on purpose; ``None`` for any other name."""
    if name not in INSTEAD:
        return None
    return f"mfwrap has no `{name}`; write {INSTEAD[name]}"
