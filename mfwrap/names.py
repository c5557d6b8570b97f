"""Resolve public names: import them on first use, and explain absent and misspelled names."""

import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.abc import MetaPathFinder
from types import MappingProxyType
from typing import Any, final

_ACCUMULATION = "`MFTrainOneStepCell(..., gradient_accumulation_steps=micro_size)`"
_PIPELINE = (
    f"{_ACCUMULATION}, which runs the micro-batches one after the other; for stages on several "
    "devices pass a schedule of `torch.distributed.pipelining` to the cell"
)
_TWO_OUTPUTS = "`calculate_per_token_loss=True` for a network that returns two outputs"

ABSENT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "Accuracy": "`metrics={'accuracy'}` of `mfwrap.Model`, or a metric of `torchmetrics`",
        "Cell": "`torch.nn.Module`, and `forward` for `construct`",
        "ClipGradNorm": "`MFTrainOneStepCell(..., use_clip_grad=True, max_grad_norm=...)`, or "
        "`mfwrap.clip_by_global_norm` for your own gradients",
        "DataOrderWrapperCell": "`cell(**batch)`, which passes a batch by keyword in any order",
        "Dense": "`torch.nn.Linear`",
        "DistributedGradReducer": "`torch.nn.parallel.DistributedDataParallel`, which averages "
        "gradients in backward, or `grad_reducer` of a training cell for those of `mfwrap.grad`",
        "FP32StateAdamWeightDecay": "`mfwrap.AdamWeightDecay(..., fp32_state=True)`",
        "ForwardValueAndGrad": "`mfwrap.value_and_grad(network, None, network.parameters())`",
        "FusedAdamWeightDecay": "`mfwrap.AdamWeightDecay(..., fp32_state=True)`",
        "GRAPH_MODE": "nothing, or `torch.compile` around the network",
        "GeneratorDataset": "`torch.utils.data.DataLoader`",
        "GetNextSingleOp": "a loop over a `torch.utils.data.DataLoader`",
        "GradAccumulationCell": _ACCUMULATION,
        "GradAccumulationCellWithMultiOutputs": _ACCUMULATION,
        "GradAccumulationCellWithTwoOutput": f"{_ACCUMULATION}, with {_TWO_OUTPUTS}",
        "LearningRateWiseLayer": "a separate parameter group, `{'params': ..., 'lr': lr_scale * "
        "learning_rate}`: each schedule of `mfwrap.schedules` starts from the group's rate",
        "LocalNorm": "`MFTrainOneStepCell(..., local_norm=True)`",
        "MFPipelineWithLossScaleCell": "`MFTrainOneStepCell(..., use_clip_grad=True, "
        "gradient_accumulation_steps=micro_batch_num)`; for stages on several devices pass a "
        "schedule of `torch.distributed.pipelining` to the cell",
        "MSELoss": "`torch.nn.MSELoss`",
        "MatMul": "`torch.matmul`",
        "MicroBatchInterleaved": _ACCUMULATION,
        "Momentum": "`torch.optim.SGD`, which has an argument `momentum`",
        "Muon": "`mfwrap.optimizers.Muon` for the matrices and `torch.optim.AdamW` for all other "
        "weights, in a `mfwrap.ChainedOptimizer`; its `qk_clip_threshold` is "
        "`mfwrap.optimizers.QKClip`",
        "PYNATIVE_MODE": "nothing: torch runs eagerly by default",
        "ParallelMode": "`accelerate launch` in front of the script, which makes "
        "`mfwrap.Model` data-parallel",
        "Parameter": "`torch.nn.Parameter`",
        "ParameterTuple": "`tuple(network.parameters())`",
        "PipelineCell": _PIPELINE,
        "PipelineCellWithMultiOutputs": _PIPELINE,
        "PipelineCellWithTwoOutput": f"{_PIPELINE}; with {_TWO_OUTPUTS}",
        "SoftmaxCrossEntropyWithLogits": "`torch.nn.CrossEntropyLoss`, which takes class indices "
        "and averages by default",
        "Tensor": "`torch.tensor`",
        "WithEvalCell": "`with torch.no_grad():` around the network and its loss function",
        "WithGradCell": "`mfwrap.GradOperation`",
        "amp": "`mfwrap.DynamicLossScaler`, `mfwrap.StaticLossScaler` and `mfwrap.all_finite`, or "
        "`torch.amp`",
        "build_train_network": "`mfwrap.Model`, and its `train_network`",
        "build_wrapper": "`mfwrap.MFTrainOneStepCell`, or a recipe that `mfwrap train` runs",
        "get_grad": "`dict(gradients)[identifier]`: with `return_ids` each gradient comes with its "
        "id",
        "load_checkpoint": "`torch.load` with `weights_only`",
        "load_param_into_net": "`network.load_state_dict(...)`",
        "nn": "`torch.nn`; MindSpore's training cells are names of `mfwrap` itself, such as "
        "`mfwrap.TrainOneStepWithLossScaleCell`",
        "ops": "`torch`, which has these functions itself",
        "save_checkpoint": "`torch.save`, or `mfwrap.callbacks.ModelCheckpoint`",
        "set_auto_parallel_context": "`accelerate launch` in front of the script",
        "set_context": "`Accelerator(cpu=True)` before anything else to stay on the CPU; "
        "accelerate finds other devices by itself",
    }
)
"""Replacement for each MindSpore and MindFormers name that `mfwrap` does not have."""

_SIGTERM = (
    "`mfwrap.trainer.MFTrainer`, which saves a checkpoint on SIGTERM, or "
    "`ModelCheckpoint` with `CheckpointConfig(exception_save=True)`"
)
_TENSORBOARD = "`MFLossMonitor`, which writes to TensorBoard"
_RESUME = (
    '`mfwrap.trainer.MFTrainer` and its `train(resume_from_checkpoint="auto")`, started again by '
    "`torchrun --max-restarts`"
)
_REPLICAS = "`ReplicaCheck`, which compares ranks that must have equal weights"
_EXPERTS = "your own `Callback`; balancing experts is the task of the model"

ABSENT_CALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "BackupAndRestore": _RESUME,
        "CheckpointCallback": "`CheckpointMonitor`",
        "ClusterMonitor": "`RankClock`, which records the step times of all ranks",
        "ColdHotExpertMonitor": _EXPERTS,
        "EvalCallBack": "`EvalCallback`",
        "ExpertMigrateCallback": _EXPERTS,
        "FlopsUtilizationCollector": "`MFLossMonitor`, which logs the throughput and its share of "
        "the device's peak rate",
        "LossCallback": "`MFLossMonitor`",
        "MaxLogitsMonitor": "`TrainingStateMonitor`",
        "MoEDropRateCallback": _EXPERTS,
        "OnRequestExit": _SIGTERM,
        "SDCMonitor": _REPLICAS,
        "StressDetectCallBack": _REPLICAS,
        "StressTestModelMonitor": _REPLICAS,
        "SummaryCollector": _TENSORBOARD,
        "SummaryMonitor": _TENSORBOARD,
        "TopkBiasBalanceCallback": _EXPERTS,
        "TrainCallBack": "`LambdaCallback` that calls `request_stop` at a step",
        "TrainFaultTolerance": _RESUME,
        "TrainerCallback": "`PyNativeCallback`, the base class of callbacks of MindFormers' "
        "PyNative trainer, or `transformers.TrainerCallback`",
    }
)
"""Replacement for each MindSpore and MindFormers name that `mfwrap.callbacks` does not have."""


_MAX_LISTED = 40


def hint(name: object, known: Collection[str]) -> str:
    """Return a suggestion to append to an error message about an unknown name.

    Args:
        name: The unknown name.
        known: The names that are valid in its place.

    Returns:
        ``; did you mean 'x'?`` if a known name is similar. Otherwise ``; known: [...]``, or an
        empty string if more than 40 names are known.

    Example:
        >>> hint("causal_lmm", ["causal_lm", "regression"])
        "; did you mean 'causal_lm'?"
        >>> hint("x", ["causal_lm", "regression"])
        "; known: ['causal_lm', 'regression']"
    """
    similar = difflib.get_close_matches(str(name), list(known), n=1)
    if similar:
        return f"; did you mean {similar[0]!r}?"
    return f"; known: {sorted(known)}" if len(known) <= _MAX_LISTED else ""


_OTHER_HOMES = (
    "mfwrap.callbacks",
    "mfwrap.schedules",
    "mfwrap.optimizers",
    "mfwrap.trainer",
    "mfwrap.accelerate",
)
"""Packages whose public names people look for in `mfwrap` itself, as in ``mindspore``."""


def package_getattr(
    package: str,
    homes: Mapping[str, str] = MappingProxyType({}),
    absent: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, which resolves the package's public names.

    Args:
        package: The package's ``__name__``.
        homes: Maps a public name to the module that defines it. The module is imported when the
            name is first used, so importing the package alone stays quick.
        absent: Maps each name that is absent from the package to a replacement. Looking it up
            raises an AttributeError that states the replacement, and ``from package import name``
            an ImportError that does.
    """
    if absent:
        _finder.add(package, absent)

    def getattribute(name: str) -> Any:
        if name in homes:
            found = getattr(importlib.import_module(homes[name]), name)
            vars(sys.modules[package])[name] = found  # no call the next time
            return found
        advice = _advice(package, name, absent)
        msg = f"module {package!r} has no attribute {name!r}" if advice is None else advice
        raise AttributeError(msg)

    return getattribute


def _advice(package: str, name: str, absent: Mapping[str, str]) -> str | None:
    """Return a sentence about an absent name; ``None`` if it is unknown."""
    replacement = absent.get(name) or _elsewhere(package, name)
    return None if replacement is None else f"{package} has no `{name}`; write {replacement}"


def _elsewhere(package: str, name: str) -> str | None:
    """Return where a public class is that somebody looks for in `mfwrap` itself."""
    # Tools ask for many names, and the packages take seconds to import.
    if package != __package__ or not name[:1].isupper():
        return None
    for home in _OTHER_HOMES:
        with contextlib.suppress(ImportError):
            if name in importlib.import_module(home).__all__:
                return f"`{home}.{name}`"
    return None


@final
class _AbsentNames(MetaPathFinder):
    """Say what to write instead of an absent name that is imported from a package.

    Where a package does not have a name, ``from package import name`` asks for a module of this
    name. The answer comes last, where every import has failed before.
    """

    def __init__(self) -> None:
        self._absent: dict[str, Mapping[str, str]] = {}

    def add(self, package: str, absent: Mapping[str, str]) -> None:
        """Add the absent names of a package."""
        self._absent[package] = absent
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> None:
        """Raise a ModuleNotFoundError if a replacement is known; otherwise, find nothing."""
        package, _, name = fullname.rpartition(".")
        if package in self._absent:
            advice = _advice(package, name, self._absent[package])
            if advice is not None:
                raise ModuleNotFoundError(advice, name=package)


_finder = _AbsentNames()
