"""The Hugging Face Trainer with MindFormers' training step."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.trainer.events import MonitorCallback
    from mfwrap.trainer.mixin import MFTrainerMixin
    from mfwrap.trainer.trainer import MFTrainer

__all__ = ["MFTrainer", "MFTrainerMixin", "MonitorCallback"]

# Import the Trainer on first use. `Model` and the callbacks need only MonitorCallback; if it came
# with the Trainer, their import would be about a tenth slower.
__getattr__ = package_getattr(
    __name__,
    {
        "MFTrainer": "mfwrap.trainer.trainer",
        "MFTrainerMixin": "mfwrap.trainer.mixin",
        "MonitorCallback": "mfwrap.trainer.events",
    },
)
