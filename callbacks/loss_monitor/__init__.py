"""The loss monitor: a record of each step in the log and in TensorBoard."""

from mfwrap.callbacks.loss_monitor.monitor import MFLossMonitor
from mfwrap.callbacks.loss_monitor.settings import LossMonitorSettings

__all__ = ["LossMonitorSettings", "MFLossMonitor"]
