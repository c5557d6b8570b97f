"""Run the training step in an unchanged accelerate loop."""

from mfwrap.accelerate.attached_step import AttachedStep, attach

__all__ = ["AttachedStep", "attach"]
