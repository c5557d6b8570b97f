"""The Hugging Face Trainer with MindFormers' training step."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.trainer.mixin import MFTrainer, MFTrainerMixin

__all__ = [
    "MFTrainer",
    "MFTrainerMixin",
]

__getattr__ = package_getattr(
    __name__,
    {
        "MFTrainer": "mfwrap.trainer.mixin",
        "MFTrainerMixin": "mfwrap.trainer.mixin",
    },
)
