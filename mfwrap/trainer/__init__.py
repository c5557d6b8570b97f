"""The Hugging Face Trainer with MindFormers' training step."""

from mfwrap.trainer.mixin import MFTrainer, MFTrainerMixin

__all__ = ["MFTrainer", "MFTrainerMixin"]
