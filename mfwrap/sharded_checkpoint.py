"""Checkpoints of sharded training that any number of ranks can resume."""

import errno
import itertools
import json
import logging
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from mfwrap.checkpoints.background import BackgroundWriter
from mfwrap.checkpoints.file_formats import json_content
from mfwrap.checkpoints.host_copies import memory_problem, readable_size
from mfwrap.checkpoints.identities import Identity, check_unchanged
from mfwrap.checkpoints.manifest import HAS_MANIFEST, write_manifest
from mfwrap.checkpoints.step_files import flat_tensors, load_tensors, save_tensors, stored_tensors
from mfwrap.checkpoints.verification import check_checkpoint
from mfwrap.checkpoints.whole import whole_file
from mfwrap.collectives import (
    end_group,
    gather_objects,
    is_first_on_node,
    new_host_group,
    num_ranks,
    raising_together,
    this_rank,
)
from mfwrap.compatibility.foreign import is_installed
from mfwrap.step.cell import MFTrainOneStepCell
from mfwrap.step.parameters import network_parameters
from mfwrap.tensors.shards import is_distributed, local_tensors
from mfwrap.tensors.wrappers import PipelineStages, plain_name, reshard, unwrapped_network

__all__ = ["ShardedSaver", "load_sharded", "save_sharded"]

_LOG = logging.getLogger(__name__)

_RECORD = "mfwrap_sharded.json"
_FORMAT_VERSION = 1
_OPTIMIZER = "optimizer"
_PAIRS = "<pairs>"
"""Key of the pairs of a mapping whose keys are no strings."""


def save_sharded(
    folder: str | Path, cell: MFTrainOneStepCell, lr_scheduler: Stateful | None = None
) -> None:
    """Write a checkpoint of sharded training. Call it on every rank; each writes its own shards.

    The safetensors files hold the tensors of the network and the optimizer, and the state of the
    cell: loss scale, counters and, if the cell has an `ema`, the averages. ``mfwrap_sharded.json``
    holds the optimizer's other values, such as its learning rates, and the state of the schedule.
    ``mfwrap_manifest.json`` holds checksums of all files. It is written last: a folder without it
    is an incomplete checkpoint.

    In a pipeline, each rank writes its own stages, and its own settings of optimizer and schedule.

    Args:
        folder: Folder that all ranks share; created if it is missing, otherwise it must be empty.
        cell: Training cell. ``cell.flush()`` is called first, so that the schedule is up to date.
        lr_scheduler: Learning-rate schedule of the training, if it has one.

    Raises:
        FileExistsError: If the folder is not empty.
        TypeError: If a setting of the optimizer or the schedule cannot be written as JSON, or the
            network's ``state_dict`` has values other than tensors.
        ValueError: If the optimizer has parameters that are not in the network, or sharded state
            that differs in shape from its parameter. Also if averages of different stages of a
            pipeline have the same name.

    Source: ``torch.distributed.checkpoint`` with its Hugging Face storage.
    """
    path = Path(folder)
    content = _content(cell, lr_scheduler)
    _check_empty(path)
    save_tensors(path, content.tensors)
    # Every rank returns only after rank 0 has written the manifest, so any rank can load the
    # checkpoint right away.
    with raising_together():
        if this_rank() == 0:
            _complete(path, content.record)


@final
class ShardedSaver:
    """Write checkpoints of `save_sharded` in the background, one after the other.

    `save` copies this rank's shards to host memory, and returns. A thread of each rank writes them,
    and the thread of rank 0 writes the manifest. The threads talk to each other in a process group
    of their own. As a context manager, the object waits for the last checkpoint at the end; after
    an error of the training, it waits for this rank's thread only.

    Create and close it on every rank, before ``destroy_process_group``.

    Args:
        cell: Training cell.
        lr_scheduler: Learning-rate schedule of the training, if it has one.

    Source: ``torch.distributed.checkpoint``, whose ``DefaultStager`` copies the shards.
    """

    def __init__(self, cell: MFTrainOneStepCell, lr_scheduler: Stateful | None = None) -> None:
        self._cell, self._lr_scheduler = cell, lr_scheduler
        self._writer = BackgroundWriter()
        self._stager = _new_stager()
        self._num_copied = 0
        self._rank, self._num_ranks = this_rank(), num_ranks()
        self._group = new_host_group()
        self._is_closed = False

    def save(self, folder: str | Path) -> None:
        """Copy the state, and begin to write a checkpoint. Call it on every rank.

        Waits for the checkpoint before it. Until the manifest is written, the folder is an
        incomplete checkpoint, which `load_sharded` refuses.

        Args:
            folder: Folder that all ranks share; created if it is missing, otherwise it must be
                empty.

        Raises:
            Exception: On all ranks, if the checkpoint before could not be written. Call it again to
                save this one.
            MemoryError: On all ranks, if the host of a rank lacks memory for the copy.
            RuntimeError: If it is closed.
            FileExistsError, TypeError, ValueError: As in `save_sharded`.
        """
        if self._is_closed:
            msg = "this ShardedSaver is closed; make a new one"
            raise RuntimeError(msg)
        self.wait()
        path = Path(folder)
        content = _content(self._cell, self._lr_scheduler)
        _check_empty(path)
        self._check_memory(content.tensors)
        with raising_together():
            if not is_installed("torch", "2.13"):
                # The stager of torch 2.11 raises KeyError if it is used a second time:
                # https://github.com/pytorch/pytorch/issues/183413
                self._stager.close()
                self._stager = _new_stager()
            copy: Any = self._stager.stage(content.tensors)
        self._writer.submit(lambda: self._write(path, copy, content.record))

    def wait(self) -> None:
        """Wait until the checkpoint is written. Call it on every rank.

        Raises:
            Exception: On all ranks, if it could not be written on one of them.
        """
        with raising_together():
            self._writer.wait()

    def close(self) -> None:
        """Wait until the checkpoint is written, and free the memory. Call it on every rank.

        Raises:
            Exception: On all ranks, if the checkpoint could not be written on one of them.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._stager.close()
            if self._group is not None:
                end_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # No collective: the other ranks may not be here.
        self._is_closed = True
        try:
            self._writer.wait()
        except Exception as error:  # noqa: BLE001  (the error of the training goes on)
            _LOG.error("a checkpoint could not be written: %s", error)
        self._stager.close()

    def _check_memory(self, tensors: dict[str, Tensor]) -> None:
        """Check on all ranks that the copies of all ranks of a host fit into its memory."""
        storages = (each.untyped_storage() for each in local_tensors(tensors.values()))
        num_bytes = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        # The stager uses its memory again.
        needed = gather_objects((platform.node(), max(num_bytes - self._num_copied, 0)))
        with raising_together():
            own = sum(number for host, number in needed if host == platform.node())
            problem = memory_problem(own, "use `save_sharded`")
            if problem is not None:
                raise MemoryError(problem)
        if num_bytes > self._num_copied:
            size = readable_size(num_bytes)
            _LOG.info("checkpoints in the background take %s of this host's memory", size)
            self._num_copied = num_bytes

    def _write(self, path: Path, tensors: dict[str, Tensor], record: str) -> None:
        self._check_ranks()
        save_tensors(path, tensors, self._group)
        self._check_ranks()
        if self._rank == 0:
            _complete(path, record)

    def _check_ranks(self) -> None:
        """Refuse to write if the process group has ended: each rank would write alone."""
        if num_ranks() != self._num_ranks:
            msg = (
                f"the ShardedSaver was made on {self._num_ranks} ranks, and the process group has "
                "ended before it has written; close it before `destroy_process_group`"
            )
            raise RuntimeError(msg)


def _new_stager() -> DefaultStager:
    on_cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_cuda,
        )
    )


class _Content(NamedTuple):
    """What a checkpoint holds."""

    tensors: dict[str, Tensor]
    """Tensors by name, distributed as in the training; not copied."""

    record: str
    """Text of the JSON file."""


def _content(cell: MFTrainOneStepCell, lr_scheduler: Stateful | None) -> _Content:
    """Return what a checkpoint holds; call it on every rank."""
    tensors = _own_tensors(cell, cell.state_dict())
    numbers: dict[str, Any] = {}
    for name, value in _optimizer_state(cell).items():
        (tensors if isinstance(value, Tensor) else numbers)[name] = value
    own = {
        "groups": _groups_of(cell),
        "optimizer": numbers,
        "lr_scheduler": None if lr_scheduler is None else _for_json(lr_scheduler.state_dict()),
    }
    record = {
        "format_version": _FORMAT_VERSION,
        HAS_MANIFEST: True,
        **(_of_all_stages(cell, own, tensors) if _stages_of(cell) else own),
    }
    return _Content(tensors, json.dumps(record, indent=2) + "\n")


def _check_empty(path: Path) -> None:
    """Check on all ranks that they name one folder, and that it is missing or empty."""
    with raising_together():
        is_filled = path.exists() and any(path.iterdir())
    found = gather_objects((str(path), is_filled))
    names = list(dict.fromkeys(name for name, _ in found))
    if len(names) > 1:
        msg = f"`folder` must be the same on all ranks, got {names[0]} and {names[1]}"
        raise ValueError(msg)
    if any(filled for _, filled in found):
        msg = f"`folder` must be empty, got {path} with files in it; choose another folder"
        raise FileExistsError(msg)


def _complete(path: Path, record: str) -> None:
    """Write the last files. torch has written and synced the shards of all ranks."""
    with whole_file(path / _RECORD) as partial:
        partial.write_text(record, encoding="utf-8")
    write_manifest(path)


def load_sharded(
    folder: str | Path, cell: MFTrainOneStepCell, lr_scheduler: Stateful | None = None
) -> None:
    """Restore a checkpoint of `save_sharded` bit for bit. Call it on every rank.

    The number of ranks and the sharding may have changed since the checkpoint was saved. In a
    pipeline, each rank must run the same stages as when the checkpoint was saved; the number of
    replicas, and how they are wrapped, may have changed. One rank
    of each node compares all files with their checksums; then each rank reads its own shards.
    Nothing is unpickled. If a file is damaged, or a name or a shape does not fit, an error is
    raised before anything is changed.

    Args:
        folder: Folder of the checkpoint.
        cell: Training cell, built like the one that was saved, with the same parameter groups.
        lr_scheduler: Learning-rate schedule of the training, if it has one.

    Raises:
        FileNotFoundError: If the folder is not a checkpoint of `save_sharded`.
        KeyError: If the names of tensors, the parameter groups or the stages of a pipeline differ
            from the cell's. All ranks raise the same error.
        ValueError: If the checkpoint is damaged or incomplete; all ranks raise the same error. Also
            if a shape differs, the format version is unknown, `lr_scheduler` is given for a
            checkpoint without a schedule, or is missing for a checkpoint with one.
    """
    path = Path(folder)
    verified: dict[str, Identity] = {}
    with raising_together():
        if not (path / _RECORD).is_file():
            raise FileNotFoundError(
                errno.ENOENT, "not a checkpoint of save_sharded", path / _RECORD
            )
        if is_first_on_node():
            verified.update(check_checkpoint(path).identities)
    record = json_content(path / _RECORD)
    if record.get("format_version") != _FORMAT_VERSION:
        got = record.get("format_version")
        msg = f"{path / _RECORD}: expected format_version {_FORMAT_VERSION}, got {got!r}"
        raise ValueError(msg)
    with raising_together():
        record = _own_record(path, cell, record)
        _check_groups(record["groups"], _groups_of(cell))
    if (record["lr_scheduler"] is None) != (lr_scheduler is None):
        found = "holds no schedule state" if lr_scheduler else "holds the state of a schedule"
        wanted = "leave `lr_scheduler` out" if lr_scheduler else "pass `lr_scheduler`"
        msg = f"{path / _RECORD} {found}; {wanted}"
        raise ValueError(msg)
    stored = stored_tensors(path)
    state = cell.state_dict()
    own = _own_tensors(cell, state)
    of_optimizer = _templates(cell, stored)
    names = {*own, *of_optimizer}
    if _stages_of(cell):
        # The other ranks load the tensors of the other stages.
        names = names.union(*gather_objects(names))
    with raising_together():
        _check_fit(own | of_optimizer, stored, names)
    load_tensors(path, own | of_optimizer)
    with raising_together():
        check_unchanged(path, verified)
    _load_optimizer(cell, record["groups"], of_optimizer | record["optimizer"])
    cell.load_state_dict(state)
    if lr_scheduler is not None:
        state = _from_json(record["lr_scheduler"], lr_scheduler.state_dict())
        lr_scheduler.load_state_dict(state)


def _stages_of(cell: MFTrainOneStepCell) -> str:
    """Return the names of the stages of this rank, for JSON; empty without a pipeline."""
    return ",".join(cell.network) if isinstance(cell.network, PipelineStages) else ""


def _of_all_stages(
    cell: MFTrainOneStepCell, own: dict[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the records of all ranks of a pipeline, by the names of their stages."""
    averages = [name for name in tensors if name.startswith(("cell/ema/averages", "cell/ema/buff"))]
    gathered = gather_objects((_stages_of(cell), own, averages))
    stages_of: dict[str, str] = {}
    for stages, _, names in gathered:
        for name in names:
            if stages_of.setdefault(name, stages) != stages:
                msg = (
                    "the averages of a pipeline must have different names in each stage, got "
                    f"{name.removeprefix('cell/ema/')!r} in {stages_of[name]} and {stages}; build "
                    "the average from pipeline_stages(schedule)"
                )
                raise ValueError(msg)
    return {"stages": {stages: record for stages, record, _ in gathered}}


def _own_record(path: Path, cell: MFTrainOneStepCell, record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a record that belongs to the stages of this rank."""
    saved, own = record.get("stages", {"": record}), _stages_of(cell)
    if own not in saved:
        msg = (
            f"{path / _RECORD}: expected a checkpoint of {own or 'a network without a pipeline'} "
            f"on this rank, got one of {' and of '.join(saved) or 'a network without a pipeline'}; "
            "resume a pipeline with the same stages on each rank"
        )
        raise KeyError(msg)
    found: dict[str, Any] = saved[own]
    return found


def _own_tensors(cell: MFTrainOneStepCell, cell_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the network (without copying them) and of `cell_state`, by name."""
    reshard(cell.network)
    state = unwrapped_network(cell.network).state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            msg = (
                f"the network's state_dict must hold tensors only, got {type(value).__name__} at "
                f"{name!r}"
            )
            raise TypeError(msg)
    network = {plain_name(name): value for name, value in state.items()}
    return flat_tensors({"network": network, "cell": cell_state})


def _optimizer_state(cell: MFTrainOneStepCell) -> dict[str, Any]:
    state: Mapping[Any, dict[str, Any]] = cell.optimizer.state
    entries = {}
    for name, parameter in _held_by(cell).items():
        for key, value in state.get(parameter, {}).items():
            if is_distributed(value) and value.shape != parameter.shape:
                msg = (
                    "sharded optimizer state must have the shape of its parameter, got shape "
                    f"{tuple(value.shape)} for {key!r} of {name!r}, which has shape "
                    f"{tuple(parameter.shape)}"
                )
                raise ValueError(msg)
            entries[f"{_OPTIMIZER}/{name}/{key}"] = value
    return entries


def _templates(cell: MFTrainOneStepCell, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Create zeros, sharded like the parameters, to load the optimizer's state into."""
    templates: dict[str, Tensor] = {}
    held = _held_by(cell)
    for full_name, found in stored.items():
        kind, _, rest = full_name.partition("/")
        parameter = held.get(rest.rpartition("/")[0])
        if kind != _OPTIMIZER or parameter is None or not isinstance(found, TensorStorageMetadata):
            continue
        dtype = found.properties.dtype
        if found.size == parameter.shape and not rest.endswith("/step"):
            templates[full_name] = torch.zeros_like(parameter.detach(), dtype=dtype)
        else:
            # Allocate on the CPU. `Optimizer.load_state_dict` moves each tensor to its device.
            templates[full_name] = torch.zeros(found.size, dtype=dtype)
    return templates


def _load_optimizer(
    cell: MFTrainOneStepCell, groups: list[dict[str, Any]], entries: Mapping[str, Any]
) -> None:
    index = {name: number for number, name in enumerate(_held_by(cell))}
    state: dict[int, dict[str, Any]] = {}
    for full_name, value in entries.items():
        name, _, key = full_name.removeprefix(f"{_OPTIMIZER}/").rpartition("/")
        state.setdefault(index[name], {})[key] = value
    present: Optimizer = cell.optimizer
    saved = [
        {key: _setting(value, group.get(key)) for key, value in settings.items()}
        | {"params": [index[name] for name in settings["params"]]}
        for settings, group in zip(groups, present.param_groups, strict=True)
    ]
    present.load_state_dict({"state": state, "param_groups": saved})


def _held_by(cell: MFTrainOneStepCell) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name, in the optimizer's order."""
    names = {id(p): name for name, p in network_parameters(cell.network).items()}
    held = [p for group in cell.optimizer.param_groups for p in group["params"]]
    outside = sum(id(parameter) not in names for parameter in held)
    if outside:
        msg = f"all parameters of the optimizer must be in the network, got {outside} that are not"
        raise ValueError(msg)
    return {names[id(parameter)]: parameter for parameter in held}


def _groups_of(cell: MFTrainOneStepCell) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups for JSON: parameters are replaced by their names."""
    names = iter(_held_by(cell))
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        | {"params": [next(names) for _ in members]}
        for members, group in (
            (group["params"], {key: value for key, value in group.items() if key != "params"})
            for group in cell.optimizer.param_groups
        )
    ]


def _for_json(value: Any) -> Any:
    """Return the state of a schedule for JSON, whose keys are strings: others become pairs."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _for_json(item) for key, item in value.items()}
        return {_PAIRS: [[key, _for_json(item)] for key, item in value.items()]}
    return [_for_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _from_json(saved: Any, present: Any) -> Any:
    """Return what `_for_json` was given; `present` is the state of a schedule of the same kind."""
    if isinstance(saved, dict):
        pairs: list[Any] = saved[_PAIRS] if _PAIRS in saved else list(saved.items())
        known = present if isinstance(present, Mapping) else {}
        if _PAIRS not in saved and any(isinstance(key, int) for key in known):
            # Earlier versions wrote the keys as strings, such as the milestones of MultiStepLR.
            pairs = [(int(key), item) for key, item in pairs]
        found = {key: _from_json(item, known.get(key)) for key, item in pairs}
        return Counter(found) if isinstance(present, Counter) else found
    if isinstance(saved, list):
        alike = present[: len(saved)] if isinstance(present, (list, tuple)) else ()
        of_items = itertools.zip_longest(saved, alike)
        items = [_from_json(item, each) for item, each in of_items]
        return tuple(items) if isinstance(present, tuple) else items
    return saved


def _setting(saved: Any, present: Any) -> Any:
    """Convert a setting read from JSON to the present setting's type, a tuple or a tensor."""
    if isinstance(present, Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) else saved


def _check_groups(saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    expected, got = ([group["params"] for group in groups] for groups in (saved, present))
    if expected == got:
        return
    sizes = [[len(group) for group in groups] for groups in (expected, got)]
    if sizes[0] != sizes[1]:
        difference = f"expected groups of {sizes[0]} parameters, got groups of {sizes[1]}"
    else:
        group, index = next(
            (group, index)
            for group, names in enumerate(expected)
            for index, name in enumerate(names)
            if name != got[group][index]
        )
        difference = (
            f"expected {expected[group][index]!r} as parameter {index} of group {group}, got "
            f"{got[group][index]!r}"
        )
    msg = f"the optimizer's parameter groups differ from the saved ones: {difference}"
    raise KeyError(msg)


def _check_fit(tensors: Mapping[str, Tensor], stored: Mapping[str, Any], names: set[str]) -> None:
    """Check that the stored tensors fit this rank's `tensors`, and the `names` of all ranks."""
    missing, unknown = sorted(tensors.keys() - stored), sorted(stored.keys() - names)
    if missing or unknown:
        msg = (
            "the checkpoint's names differ from the cell's: the checkpoint lacks "
            f"{missing} and has the unknown names {unknown}"
        )
        raise KeyError(msg)
    for name, tensor in tensors.items():
        if stored[name].size != tensor.shape:
            msg = (
                f"`{name}` has shape {tuple(stored[name].size)} in the checkpoint, but "
                f"{tuple(tensor.shape)} in the cell"
            )
            raise ValueError(msg)
