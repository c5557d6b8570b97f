"""Monitors of a training run.

Those of MindFormers are transformers' callbacks, for a Trainer and for `Model`. Those of MindSpore
are `Callback`s, for `Model`; `as_trainer_callback` makes one fit a Trainer.
"""

from typing import Any

from mfwrap.callbacks.absent_callbacks import absent_callback_message
from mfwrap.callbacks.checkpoint_config import CheckpointConfig
from mfwrap.callbacks.checkpoint_health import newest_healthy_checkpoint
from mfwrap.callbacks.checkpoint_monitor import CheckpointMonitor
from mfwrap.callbacks.early_stopping import EarlyStopping
from mfwrap.callbacks.ema_callback import EMACallback
from mfwrap.callbacks.eval_callback import EvalCallback
from mfwrap.callbacks.history import History
from mfwrap.callbacks.lambda_callback import LambdaCallback
from mfwrap.callbacks.learning_rate_scheduler import LearningRateScheduler
from mfwrap.callbacks.local_norm_monitor import LocalNormMonitor
from mfwrap.callbacks.loss_monitor import MFLossMonitor
from mfwrap.callbacks.model_checkpoint import ModelCheckpoint
from mfwrap.callbacks.plain_loss_monitor import LossMonitor
from mfwrap.callbacks.profile_monitor import ProfileMonitor
from mfwrap.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from mfwrap.callbacks.replica_check import ReplicaCheck
from mfwrap.callbacks.time_monitor import TimeMonitor
from mfwrap.callbacks.training_state_monitor import TrainingStateMonitor
from mfwrap.model import Callback, RunContext, as_trainer_callback

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
    "LossMonitor",
    "MFLossMonitor",
    "ModelCheckpoint",
    "ProfileMonitor",
    "ReduceLROnPlateau",
    "ReplicaCheck",
    "RunContext",
    "TimeMonitor",
    "TrainingStateMonitor",
    "as_trainer_callback",
    "newest_healthy_checkpoint",
]


def __getattr__(name: str) -> Any:
    if (absent := absent_callback_message(name)) is not None:
        # `from mfwrap.callbacks import ...` would replace an AttributeError by one that says less.
        raise ImportError(absent, name=__name__)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
