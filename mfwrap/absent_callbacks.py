"""Callbacks of MindSpore and MindFormers that have no place here, and what to write instead."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["INSTEAD", "absent_callback_message"]

_SIGTERM = (
    "`mfwrap.trainer.MFTrainer`, which saves when it is asked to end by SIGTERM, or "
    "`ModelCheckpoint` with `CheckpointConfig(exception_save=True)`"
)
_TENSORBOARD = "`MFLossMonitor`, which writes to TensorBoard"
_RESUME = (
    "`mfwrap.trainer.MFTrainer` and its `train(resume_from_checkpoint=True)`, started again by "
    "`torchrun --max-restarts`"
)
_EXPERTS = "a `Callback` of one's own; balancing experts belongs to the model"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "BackupAndRestore": _RESUME,
        "CheckpointCallback": "`CheckpointMonitor`",
        "ClusterMonitor": "`TimeMonitor`, or the launcher's own log",
        "ColdHotExpertMonitor": _EXPERTS,
        "EvalCallBack": "`EvalCallback`",
        "ExpertMigrateCallback": _EXPERTS,
        "FlopsUtilizationCollector": "`MFLossMonitor`, whose line has the throughput and the share "
        "of the device's peak rate",
        "LossCallback": "`MFLossMonitor`",
        "MaxLogitsMonitor": "`TrainingStateMonitor`",
        "MoEDropRateCallback": _EXPERTS,
        "OnRequestExit": _SIGTERM,
        "SDCMonitor": "`ReplicaCheck`, which compares ranks that must be equal",
        "StressDetectCallBack": "`ReplicaCheck`, which compares ranks that must be equal",
        "StressTestModelMonitor": "`ReplicaCheck`, which compares ranks that must be equal",
        "SummaryCollector": _TENSORBOARD,
        "SummaryMonitor": _TENSORBOARD,
        "TopkBiasBalanceCallback": _EXPERTS,
        "TrainCallBack": "`LambdaCallback` that calls `request_stop` at a step",
        "TrainFaultTolerance": _RESUME,
    }
)
"""What stands for each name."""


def absent_callback_message(name: str) -> str | None:
    """Return the error of a name that is absent on purpose; ``None`` for any other name."""
    if name not in INSTEAD:
        return None
    return f"mfwrap.callbacks has no `{name}`; write {INSTEAD[name]}"
