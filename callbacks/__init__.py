"""Monitors of a training run, each a ``transformers.TrainerCallback``."""

from mfwrap.callbacks.ema_callback import EMACallback
from mfwrap.callbacks.loss_monitor import MFLossMonitor

__all__ = ["EMACallback", "MFLossMonitor"]
