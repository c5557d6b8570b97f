"""Callbacks that monitor a training run.

MindFormers' monitors are transformers callbacks: use them with a Trainer or with `Model`.
MindSpore's monitors are `Callback`s: use them with `Model`, or convert them with
`as_trainer_callback` for a Trainer. Callbacks of MindFormers' PyNative trainer are converted with
`adapt_pynative`.
"""

from mfwrap.callbacks.average.ema_callback import EMACallback
from mfwrap.callbacks.checkpoint_health import newest_healthy_checkpoint
from mfwrap.callbacks.checkpoint_monitor import CheckpointMonitor
from mfwrap.callbacks.eval_callback import EvalCallback
from mfwrap.callbacks.local_norm_monitor import LocalNormMonitor
from mfwrap.callbacks.loop.monitor import LoopMonitor
from mfwrap.callbacks.loss_monitor.monitor import MFLossMonitor
from mfwrap.callbacks.memory.monitor import MemoryMonitor
from mfwrap.callbacks.metrics_recorder import MetricsRecorder
from mfwrap.callbacks.mindspore.checkpoint_config import CheckpointConfig
from mfwrap.callbacks.mindspore.early_stopping import EarlyStopping
from mfwrap.callbacks.mindspore.history import History
from mfwrap.callbacks.mindspore.lambda_callback import LambdaCallback
from mfwrap.callbacks.mindspore.learning_rate_scheduler import LearningRateScheduler
from mfwrap.callbacks.mindspore.loss_monitor import LossMonitor
from mfwrap.callbacks.mindspore.model_checkpoint import ModelCheckpoint
from mfwrap.callbacks.mindspore.reduce_lr_on_plateau import ReduceLROnPlateau
from mfwrap.callbacks.mindspore.time_monitor import TimeMonitor
from mfwrap.callbacks.profile_monitor import ProfileMonitor
from mfwrap.callbacks.pynative.adapter import (
    PyNativeCallback,
    adapt_pynative,
    is_pynative_callback,
)
from mfwrap.callbacks.rank_clock import RankClock
from mfwrap.callbacks.recompute_check import RecomputeCheck
from mfwrap.callbacks.replica_check import ReplicaCheck
from mfwrap.callbacks.samples.monitor import SampleMonitor
from mfwrap.callbacks.training_state.monitor import TrainingStateMonitor
from mfwrap.model import Callback, RunContext, as_trainer_callback
from mfwrap.names import package_getattr

__all__ = [
    "Callback",
    "CheckpointConfig",
    "CheckpointMonitor",
    "EMACallback",
    "EarlyStopping",
    "EvalCallback",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "LocalNormMonitor",
    "LoopMonitor",
    "LossMonitor",
    "MFLossMonitor",
    "MemoryMonitor",
    "MetricsRecorder",
    "ModelCheckpoint",
    "ProfileMonitor",
    "PyNativeCallback",
    "RankClock",
    "RecomputeCheck",
    "ReduceLROnPlateau",
    "ReplicaCheck",
    "RunContext",
    "SampleMonitor",
    "TimeMonitor",
    "TrainingStateMonitor",
    "adapt_pynative",
    "as_trainer_callback",
    "is_pynative_callback",
    "newest_healthy_checkpoint",
]


__getattr__ = package_getattr(__name__, explains=True)
