"""The Hugging Face Trainer with MindFormers' training step."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.trainer.events import MonitorCallback
    from mfwrap.trainer.mixin import MFTrainer, MFTrainerMixin

__all__ = ["MFTrainer", "MFTrainerMixin", "MonitorCallback"]

# Loaded late: `Model` and the callbacks need MonitorCallback only, and importing the Trainer takes
# as long as a tenth of all that they import.
__getattr__ = package_getattr(
    __name__,
    {
        "MFTrainer": "mfwrap.trainer.mixin",
        "MFTrainerMixin": "mfwrap.trainer.mixin",
        "MonitorCallback": "mfwrap.trainer.events",
    },
)
