"""The training state monitor: metrics of each step, and a judgment on it."""

from mfwrap.callbacks.training_state.monitor import TrainingStateMonitor
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.callbacks.training_state.stable_rank import StableRankSettings

__all__ = ["StableRankSettings", "TrainingStateMonitor", "TrainingStateSettings"]
