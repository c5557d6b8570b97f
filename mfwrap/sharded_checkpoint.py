"""Checkpoints that any number of ranks can go on from, with shards or without."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from mfwrap.checkpoints.folders import whole_file
from mfwrap.checkpoints.step_files import load_tensors, save_tensors, stored_tensors
from mfwrap.collectives import any_rank, this_rank
from mfwrap.step.cell import MFTrainOneStepCell
from mfwrap.step.parameters import network_parameters
from mfwrap.tensors.shards import is_distributed
from mfwrap.tensors.wrappers import plain_name, reshard, unwrapped_network

__all__ = ["load_sharded", "save_sharded"]

_RECORD = "mfwrap_sharded.json"
_FORMAT_VERSION = 1
_OPTIMIZER = "optimizer"


class _Schedule(Protocol):
    """A learning-rate schedule with a state of numbers."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule is."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there."""


def save_sharded(
    folder: str | Path, cell: MFTrainOneStepCell, lr_scheduler: _Schedule | None = None
) -> None:
    """Write all that training goes on from; every rank calls it, and writes its own shards.

    Tensors of network, optimizer, average and the step's state go into safetensors files, numbers
    of the optimizer and of the schedule into a JSON file, which comes last: a folder without it is
    no whole checkpoint.

    Args:
        folder: One that all ranks share; made here, or empty.
        cell: What trains; it is flushed.
        lr_scheduler: Its schedule, if it has one.

    Raises:
        FileExistsError: If the folder holds anything.
        TypeError: If a setting of the optimizer or the schedule does not go into JSON, or the
            network's state holds anything else than tensors.
        ValueError: If the optimizer holds parameters outside of the network, or sharded state in
            other shapes than theirs.

    Source: ``torch.distributed.checkpoint`` with its Hugging Face storage.
    """
    path = Path(folder)
    tensors = _own_tensors(cell, cell.state_dict())
    numbers: dict[str, Any] = {}
    for name, value in _optimizer_state(cell).items():
        (tensors if isinstance(value, Tensor) else numbers)[name] = value
    record = {
        "format_version": _FORMAT_VERSION,
        "groups": _groups_of(cell),
        "optimizer": numbers,
        "lr_scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(),
    }
    text = json.dumps(record, indent=2) + "\n"
    is_filled = path.exists() and any(path.iterdir())
    if any_rank(flag=is_filled, device=cell.scale_sense.device):
        msg = f"`folder` must be empty, got {path}, which holds something"
        raise FileExistsError(msg)
    save_tensors(path, tensors)
    if this_rank() == 0:
        # torch has synced the shards by now, so the record is never on the disk without them.
        with whole_file(path / _RECORD) as partial:
            partial.write_text(text, encoding="utf-8")
    # No rank may find the checkpoint unfinished when it goes on to load it.
    any_rank(flag=False, device=cell.scale_sense.device)


def load_sharded(
    folder: str | Path, cell: MFTrainOneStepCell, lr_scheduler: _Schedule | None = None
) -> None:
    """Restore what `save_sharded` wrote, bitwise; every rank calls it, and reads its own shards.

    The number of ranks, and how the network is distributed over them, may be others than when it
    was saved. Nothing is unpickled, and nothing is changed if names or shapes do not fit.

    Args:
        folder: The checkpoint.
        cell: Built as the one that was saved, with the same groups of parameters.
        lr_scheduler: Its schedule, if it has one.

    Raises:
        FileNotFoundError: If the folder is no whole checkpoint.
        KeyError: If it has not the cell's names.
        ValueError: If a shape does not fit, or it is of a format that is not known here.
    """
    path = Path(folder)
    record = json.loads((path / _RECORD).read_text(encoding="utf-8"))
    if record.get("format_version") != _FORMAT_VERSION:
        got = record.get("format_version")
        msg = f"`{_RECORD}` must have format_version {_FORMAT_VERSION}, got {got!r}"
        raise ValueError(msg)
    _check_groups(record["groups"], _groups_of(cell))
    if (record["lr_scheduler"] is None) != (lr_scheduler is None):
        msg = "`lr_scheduler` must be given if, and only if, one was saved, got the other"
        raise ValueError(msg)
    stored = stored_tensors(path)
    state = cell.state_dict()
    own = _own_tensors(cell, state)
    of_optimizer = _templates(cell, stored)
    _check_fit(own | of_optimizer, stored)
    load_tensors(path, own | of_optimizer)
    _load_optimizer(cell, record["groups"], of_optimizer | record["optimizer"])
    cell.load_state_dict(state)
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(record["lr_scheduler"])


def _own_tensors(cell: MFTrainOneStepCell, cell_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of the network, which are the live ones, and of the cell's state."""
    reshard(cell.network)
    state = unwrapped_network(cell.network).state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            msg = f"`network` must have a state of tensors, got {type(value).__name__} at {name!r}"
            raise TypeError(msg)
    network = {plain_name(name): value for name, value in state.items()}
    return dict(_flat({"network": network, "cell": cell_state}))


def _optimizer_state(cell: MFTrainOneStepCell) -> dict[str, Any]:
    state: Mapping[Any, dict[str, Any]] = cell.optimizer.state
    entries = {}
    for name, parameter in _held_by(cell).items():
        for key, value in state.get(parameter, {}).items():
            if is_distributed(value) and value.shape != parameter.shape:
                msg = (
                    f"`optimizer` must keep sharded state in the shapes of its parameters, got "
                    f"{key!r} of {tuple(value.shape)} for {name!r} of {tuple(parameter.shape)}"
                )
                raise ValueError(msg)
            entries[f"{_OPTIMIZER}/{name}/{key}"] = value
    return entries


def _templates(cell: MFTrainOneStepCell, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors for the optimizer state that a checkpoint holds, placed as the parameters."""
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
            # The optimizer moves it to where it keeps such things.
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
    """Return the optimizer's parameters by name, in its order."""
    names = {id(p): name for name, p in network_parameters(cell.network).items()}
    held = [p for group in cell.optimizer.param_groups for p in group["params"]]
    outside = sum(id(parameter) not in names for parameter in held)
    if outside:
        msg = f"`optimizer` must hold parameters of the network only, got {outside} others"
        raise ValueError(msg)
    return {names[id(parameter)]: parameter for parameter in held}


def _groups_of(cell: MFTrainOneStepCell) -> list[dict[str, Any]]:
    """Return the optimizer's settings for JSON, with names in place of parameters."""
    names = iter(_held_by(cell))
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        | {"params": [next(names) for _ in members]}
        for members, group in (
            (group["params"], {key: value for key, value in group.items() if key != "params"})
            for group in cell.optimizer.param_groups
        )
    ]


def _setting(saved: Any, present: Any) -> Any:
    """Return a setting as the optimizer has it; JSON knows neither tuples nor tensors."""
    if isinstance(present, Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) else saved


def _check_groups(saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    names = [[group["params"] for group in groups] for groups in (saved, present)]
    if names[0] != names[1]:
        msg = (
            "`optimizer` must hold the groups of parameters that were saved, got "
            f"{[len(group) for group in names[1]]} parameters for {[len(g) for g in names[0]]}"
        )
        raise KeyError(msg)


def _check_fit(tensors: Mapping[str, Tensor], stored: Mapping[str, Any]) -> None:
    missing, unknown = sorted(tensors.keys() - stored), sorted(stored.keys() - tensors)
    if missing or unknown:
        msg = f"`folder` must have this cell's names, missing are {missing}, unknown {unknown}"
        raise KeyError(msg)
    for name, tensor in tensors.items():
        if stored[name].size != tensor.shape:
            msg = f"`{name}` must have shape {tuple(tensor.shape)}, got {tuple(stored[name].size)}"
            raise ValueError(msg)


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
