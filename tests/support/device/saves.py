"""Files that are written from tensors on the simulated device."""

import tempfile
from pathlib import Path

import torch

from mfwrap.checkpoints.hashed_files import save_tensors
from support.device.device import Device

__all__ = ["as_on_the_cpu"]


def as_on_the_cpu() -> bool:
    """Return whether tensors on the device are written as their copies on the CPU are."""
    device = Device().device
    tensors = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(3)}
    with tempfile.TemporaryDirectory() as name:
        own, other = Path(name, "own.safetensors"), Path(name, "other.safetensors")
        save_tensors({key: tensor.to(device) for key, tensor in tensors.items()}, own)
        save_tensors(tensors, other)
        return own.read_bytes() == other.read_bytes()
