"""Moves between devices."""

import torch
from torch import Tensor

__all__ = ["on_device"]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, itself if it is there.

    Waits for the tensor's device when it goes to the CPU, and not otherwise.
    """
    # `to` alone would do the same, but looks like a read to who counts moves to the CPU.
    if tensor.device == device:
        return tensor
    # Pageable memory on the CPU may be read before a copy that was not awaited has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")
