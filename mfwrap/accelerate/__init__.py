"""The training step behind an unchanged accelerate loop."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.accelerate.attached_step import AttachedStep, attach

__all__ = [
    "AttachedStep",
    "attach",
]

__getattr__ = package_getattr(
    __name__,
    {
        "AttachedStep": "mfwrap.accelerate.attached_step",
        "attach": "mfwrap.accelerate.attached_step",
    },
)
