"""The Hugging Face Trainer with MindFormers' training step."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.trainer.events import MonitorCallback
    from mfwrap.trainer.mixin import MFTrainer, MFTrainerMixin

__all__ = ["MFTrainer", "MFTrainerMixin", "MonitorCallback"]

# Import the Trainer only on first use: `Model` and the callbacks need only MonitorCallback, and the
# Trainer takes about a tenth of their import time.
__getattr__ = package_getattr(
    __name__,
    {
        "MFTrainer": "mfwrap.trainer.mixin",
        "MFTrainerMixin": "mfwrap.trainer.mixin",
        "MonitorCallback": "mfwrap.trainer.events",
    },
)
