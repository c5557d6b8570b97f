"""Store a step's state in files: tensors as safetensors, and a JSON record for people."""

import contextlib
import json
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mfwrap.checkpoints import hashed_files
from mfwrap.checkpoints.checksums import Extent
from mfwrap.checkpoints.file_formats import DamagedFileError, json_content
from mfwrap.checkpoints.manifest import HAS_MANIFEST
from mfwrap.checkpoints.whole import whole_file
from mfwrap.tensors.shards import is_distributed, local_tensor

_TENSORS = "mfwrap_step.safetensors"
_SHARDS = "mfwrap_step_shards"
_RECORD = "mfwrap_step.json"
_FORMAT_VERSION = 1


def write_step_files(
    folder: Path,
    state: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    is_writer: bool = True,
    checksums: dict[Extent, str] | None = None,
) -> None:
    """Write a step's state into the folder of a checkpoint. Call it on every rank.

    The checkpoint is complete only after `mfwrap.checkpoints.manifest.write_manifest`.

    Args:
        folder: Existing folder; if any tensor is distributed, all ranks must share it.
        state: Tensors in nested mappings. Names in the first two levels must not contain ``/``.
            Each rank writes its own shards of distributed tensors.
        record: Extra entries of the JSON file, for people who read the file.
        is_writer: Whether this rank writes the JSON file and the tensors that are not distributed.
        checksums: Gets the checksums of the file of tensors, for `write_manifest`; they are
            computed while it is written. ``None`` computes none.
    """
    tensors = flat_tensors(state)
    distributed = {name: tensor for name, tensor in tensors.items() if is_distributed(tensor)}
    if is_writer:
        # Delete the shards of an earlier save. No rank writes new shards yet: in `save` all ranks
        # first agree on what each one writes.
        shutil.rmtree(folder / _SHARDS, ignore_errors=True)
    if distributed:
        save_tensors(folder / _SHARDS, distributed)
    if not is_writer:
        return
    whole = {name: t.contiguous() for name, t in tensors.items() if name not in distributed}
    with whole_file(folder / _TENSORS) as partial:
        if checksums is None:
            save_file(whole, partial)
        else:
            for extent, checksum in hashed_files.save_tensors(whole, partial).items():
                checksums[extent._replace(path=folder / _TENSORS)] = checksum
    content = {
        "format_version": _FORMAT_VERSION,
        "parts": sorted(state),
        HAS_MANIFEST: True,
        **record,
    }
    with whole_file(folder / _RECORD) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def has_step_files(folder: Path) -> bool:
    """Return whether a folder has any file that `write_step_files` writes."""
    return (folder / _RECORD).exists() or (folder / _TENSORS).exists()


def read_step_parts(folder: Path) -> list[str]:
    """Return the names of the parts of a stored state, such as ``ema``, without reading tensors.

    Raises:
        FileNotFoundError: If the record is missing.
        ValueError: If the record is damaged or has an unknown format version.
    """
    record = json_content(folder / _RECORD)
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != _FORMAT_VERSION:
        msg = f"{folder / _RECORD}: expected format_version {_FORMAT_VERSION}, got {version!r}"
        raise ValueError(msg)
    parts = record.get("parts")
    if not isinstance(parts, list):
        msg = f"{folder / _RECORD}: expected a list `parts`, got {parts!r}"
        raise ValueError(msg)  # noqa: TRY004  (the content of a file, not the type of an argument)
    return parts


def read_step_files(folder: Path, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state that `write_step_files` wrote. Call it on every rank.

    Tensors are returned whole, on the CPU. There is one exception: a tensor that was distributed
    when it was written, and is distributed in `like`, is returned distributed as in `like`. Nothing
    is unpickled.

    Args:
        folder: Folder of the checkpoint.
        like: State with the same names, which is not changed; ``None`` to return all tensors whole.

    Raises:
        FileNotFoundError: If the record or the file of tensors is missing.
        ValueError: If a file is damaged or has an unknown format version.
    """
    parts = read_step_parts(folder)
    state: dict[str, Any] = {"loss_scale": {"update_cell": {}}, "updates": {}}
    if "ema" in parts:
        state["ema"] = {"averages": {}, "buffers": {}, "counters": {}}
    try:
        tensors = load_file(folder / _TENSORS)
    except SafetensorError as error:
        raise DamagedFileError(folder / _TENSORS, f"is damaged ({error})") from error
    if (folder / _SHARDS).is_dir():
        tensors |= _read_shards(folder / _SHARDS, flat_tensors(like or {}))
    for path, tensor in tensors.items():
        *outer, name = path.split("/", 2)
        part = state
        for key in outer:
            part = part.setdefault(key, {})
        part[name] = tensor
    return state


def flat_tensors(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested mappings by path, such as ``ema/averages/weight``, detached."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            found |= flat_tensors(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value.detach()
    return found


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> None:
    """Write tensors; each rank writes its own shards. Call it on every rank.

    Args:
        folder: Folder that all ranks share; created if it is missing.
        tensors: Tensors by name, with the same names on every rank.
        group: Group of all ranks that sends their messages; ``None`` for the group of the training.

    Raises:
        Exception: On all ranks, the error of the lowest rank that failed.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _without_process_group_warning():
            save(apart(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        raise cause from None


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which no two share memory, as safetensors needs them: tied ones are copied.

    A copy is contiguous, too.
    """
    found, storages = {}, set()
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        storage = local.untyped_storage().data_ptr()
        is_shared = storage in storages and local.numel() > 0
        storages.add(storage)
        copies = is_shared or not local.is_contiguous()
        found[name] = tensor.clone(memory_format=torch.contiguous_format) if copies else tensor
    return found


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Return torch's ``TensorStorageMetadata`` by tensor name, without reading the tensors."""
    reader = HuggingFaceStorageReader(str(folder))
    return dict(reader.read_metadata().state_dict_metadata)


def tensor_folders(folder: Path) -> list[Path]:
    """Return the folders of a checkpoint that `stored_tensors` and `load_tensors` can read."""
    return [each for each in (folder, folder / _SHARDS) if each.is_dir()]


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors with the values that `save_tensors` wrote. Call it on every rank.

    The tensors may be distributed differently than when they were written. Nothing is unpickled.
    """
    with _without_process_group_warning():
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def _read_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors that `save_tensors` wrote to a folder.

    A tensor is returned distributed like the tensor of the same name and shape in `like`. If `like`
    has no such tensor, the tensor is returned whole, on the CPU.
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
def _without_process_group_warning() -> Iterator[None]:
    """Silence torch's warning that a single process has no process group.

    Not in a thread: Python's filters belong to the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
