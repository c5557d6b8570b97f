"""A step's state as files: tensors in safetensors, and a record that a person can read."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mfwrap.checkpoints.folders import whole_file
from mfwrap.tensors.shards import is_distributed

__all__ = [
    "has_step_files",
    "load_tensors",
    "read_step_files",
    "read_step_parts",
    "save_tensors",
    "stored_tensors",
    "write_step_files",
]


_TENSORS = "mfwrap_step.safetensors"
_SHARDS = "mfwrap_step_shards"
_RECORD = "mfwrap_step.json"
_FORMAT_VERSION = 1


def write_step_files(
    folder: Path, state: Mapping[str, Any], record: Mapping[str, Any], *, is_writer: bool = True
) -> None:
    """Write a state beside what else a checkpoint holds; every rank calls it.

    Args:
        folder: An existing one; where tensors are distributed, one that all ranks share.
        state: Tensors in nested mappings; names below the second level may hold anything. Of
            distributed ones each rank writes its own shards.
        record: Numbers and names for whoever reads the JSON file.
        is_writer: Whether this rank writes what all have.
    """
    tensors = {name: tensor.detach() for name, tensor in _flat(state)}
    distributed = {name: tensor for name, tensor in tensors.items() if is_distributed(tensor)}
    if is_writer:
        # Other ranks write once they have heard from the first one.
        shutil.rmtree(folder / _SHARDS, ignore_errors=True)
    if distributed:
        # torch's checkpoints take a second to import.
        from mfwrap.checkpoints.step_files import save_tensors  # noqa: PLC0415

        save_tensors(folder / _SHARDS, distributed)
    if not is_writer:
        return
    whole = {name: t.contiguous() for name, t in tensors.items() if name not in distributed}
    with whole_file(folder / _TENSORS) as partial:
        save_file(whole, partial)
    content = {"format_version": _FORMAT_VERSION, "parts": sorted(state), **record}
    with whole_file(folder / _RECORD) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def has_step_files(folder: Path) -> bool:
    """Return whether `folder` holds what `write_step_files` writes."""
    return (folder / _RECORD).exists() or (folder / _TENSORS).exists()


def read_step_parts(folder: Path) -> list[str]:
    """Return the names of the parts of the state that `write_step_files` wrote, and no tensor.

    Raises:
        FileNotFoundError: If the record is missing.
        ValueError: If it is damaged, or of a format that is not known here.
    """
    record = _read(folder / _RECORD, lambda path: json.loads(path.read_text(encoding="utf-8")))
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != _FORMAT_VERSION:
        msg = f"`{_RECORD}` must have format_version {_FORMAT_VERSION}, got {version!r}"
        raise ValueError(msg)
    parts = record.get("parts")
    if not isinstance(parts, list):
        msg = f"`{_RECORD}` must name the parts of the state, got {parts!r}"
        raise ValueError(msg)  # noqa: TRY004  (a file's content is a value)
    return parts


def read_step_files(folder: Path, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state that `write_step_files` wrote. Nothing is unpickled.

    Every rank calls it. Tensors are on the CPU, and whole, but for those that were distributed when
    they were written and are so in `like`.

    Args:
        folder: Where they lie.
        like: A state of the same form, not changed; without one all tensors are whole.

    Raises:
        FileNotFoundError: If one of the two files is missing.
        ValueError: If a file is damaged, or of a format that is not known here.
    """
    parts = read_step_parts(folder)
    state: dict[str, Any] = {"loss_scale": {"update_cell": {}}, "updates": {}}
    if "ema" in parts:
        state["ema"] = {"averages": {}, "buffers": {}, "counters": {}}
    tensors = _read(folder / _TENSORS, load_file)
    if (folder / _SHARDS).is_dir():
        from mfwrap.checkpoints.step_files import read_shards  # noqa: PLC0415  (slow to import)

        tensors |= read_shards(folder / _SHARDS, dict(_flat(like or {})))
    for path, tensor in tensors.items():
        *outer, name = path.split("/", 2)
        part = state
        for key in outer:
            part = part.setdefault(key, {})
        part[name] = tensor
    return state


def _read(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (SafetensorError, ValueError) as error:
        msg = f"`{path.name}` must be whole, got a file that cannot be read: {error}"
        raise ValueError(msg) from error


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


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
