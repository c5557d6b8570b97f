"""The training state monitor: report metrics of each step, and find the cause of a bad step."""

from mfwrap.callbacks.training_state.monitor import TrainingStateMonitor
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.callbacks.training_state.stable_rank import StableRankSettings

__all__ = ["StableRankSettings", "TrainingStateMonitor", "TrainingStateSettings"]
