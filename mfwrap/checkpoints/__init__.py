"""Write checkpoints that are complete or absent, and store the step's state in them."""

from mfwrap.checkpoints.resumption import newest_checkpoint

__all__ = ["newest_checkpoint"]
