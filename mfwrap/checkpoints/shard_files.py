"""Distributed tensors in safetensors files, which any number of ranks can read."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["load_tensors", "read_shards", "save_tensors", "stored_tensors"]


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, each rank what it holds of them; every rank calls it.

    Args:
        folder: One that all ranks share; made here if it is missing.
        tensors: By name, the same names on every rank.
    """
    with _maybe_alone():
        save(
            dict(tensors),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return what a folder holds: torch's ``TensorStorageMetadata`` by name. No tensor is read."""
    reader = HuggingFaceStorageReader(str(folder))
    return dict(reader.read_metadata().state_dict_metadata)


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors with what `save_tensors` wrote under their names; every rank calls it.

    How they are distributed over ranks may be another than when they were written. Nothing is
    unpickled.
    """
    with _maybe_alone():
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def read_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all that a folder holds; every rank calls it.

    Args:
        folder: Where `save_tensors` wrote.
        like: By name, how tensors are to be distributed; what has no name here, or another shape,
            is returned whole, on the CPU.
    """
    found: dict[str, Tensor] = {}
    for name, stored in stored_tensors(folder).items():
        own = like.get(name)
        dtype = stored.properties.dtype
        found[name] = (
            torch.zeros(stored.size, dtype=dtype)
            if own is None or own.shape != stored.size
            else torch.zeros_like(own, dtype=dtype)
        )
    load_tensors(folder, found)
    return found


@contextlib.contextmanager
def _maybe_alone() -> Iterator[None]:
    """Let torch do without a process group; it warns that it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
