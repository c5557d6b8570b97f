"""What the sections of a run are measured on."""

import gc
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Setup:
    """Device and sizes.

    Args:
        kind: ``"cuda"`` or ``"cpu"``.
        small: Whether to use tiny sizes, only to show that everything runs.
    """

    kind: str
    small: bool

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return torch.device("cuda", 0) if self.on_cuda else torch.device("cpu")

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.kind == "cuda"

    def size(self, usual: Any, small: Any) -> Any:
        """Return the usual size, or the small one."""
        return small if self.small else usual

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory that is no longer used back to the device."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()
