"""Write snapshots of averages while a training runs, and build other averages from them after it.

A snapshot is a folder ``average_snapshots/checkpoint-<step>`` in the run folder. It has the
averages of an `ExponentialMovingAverage` and its counters, and outlives the checkpoints, of which a
training deletes the oldest. Nothing is unpickled.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from mfwrap import ExponentialMovingAverage
from mfwrap.arguments import callers_stacklevel, check_int
from mfwrap.average.ema import part_of_state
from mfwrap.average.profiles import combine
from mfwrap.checkpoints import hashed_files
from mfwrap.checkpoints.manifest import write_manifest
from mfwrap.checkpoints.run_folders import (
    checkpoints_of_run,
    remove_leftovers,
    set_aside_later_checkpoints,
)
from mfwrap.checkpoints.step_files import (
    flat_tensors,
    load_tensors,
    save_tensors,
    stored_tensors,
    tensor_folders,
)
from mfwrap.checkpoints.verification import checkpoints_in, verify
from mfwrap.checkpoints.whole import clear_staging, move_into_place, staging_folder
from mfwrap.checkpoints.written_files import note_written
from mfwrap.collectives import gather_objects, num_ranks, raising_together, this_rank
from mfwrap.records.own_names import AVERAGE_SNAPSHOTS, begin_folder, check_own
from mfwrap.tensors.shards import is_distributed

LARGEST_ERROR = 0.1
"""Largest relative error of the profile of an average that is built from snapshots."""

_SIGMA = "counters/sigma_rel"
_UPDATES = "counters/averaged_updates"
_NETWORK = "network/"
_WHOLE = "averages.safetensors"
"""File of averages that one process has written."""

_PIECE = 2**25
"""Numbers that are summed at a time, at least one tensor."""

Tensors = Mapping[str, tuple[Path, Any]]
"""Folder and ``TensorStorageMetadata`` of each stored tensor, by name."""


class Stored(NamedTuple):
    """The weights in a checkpoint, or averages of them."""

    folder: Path
    prefix: str
    """Start of the names of the tensors in the files."""

    tensors: Tensors
    """Tensors by their names in the network."""

    sigma_rel: float = 0.0
    """Relative length of a power-function average."""

    updates: int = 0
    """Number of applied updates of a power-function average."""


class Built(NamedTuple):
    """How an average is built: the sum of stored tensors, each times its share."""

    parts: list[tuple[Stored, float]]
    """Stored weights or averages with their shares; the newest one is the last."""

    response_error: float = 0.0
    """Relative error of the profile; 0 for a plain average."""

    def check_fit(self, like: Mapping[str, Tensor]) -> None:
        """Raise ``ValueError`` if a tensor of `like` is not stored with its shape."""
        stored = self.parts[-1][0]
        for name, tensor in like.items():
            found = None if name not in stored.tensors else tuple(stored.tensors[name][1].size)
            if found != tuple(tensor.shape):
                msg = (
                    f"{stored.folder} must have {name!r} with shape {tuple(tensor.shape)}, got "
                    f"{'none' if found is None else f'shape {found}'}"
                )
                raise ValueError(msg)


def begin_snapshots(run_folder: Path, step: int) -> None:
    """Set snapshots of later steps aside, and check that snapshots may be written.

    Call it on every rank when a training begins.

    Args:
        run_folder: Run folder.
        step: Step from which the training goes on; 0 for a training from the start.

    Raises:
        FileExistsError: If the folder of the snapshots exists and is not mfwrap's.
    """
    folder = run_folder / AVERAGE_SNAPSHOTS
    with raising_together():
        if this_rank() == 0:
            check_own([folder])
            begin_folder(run_folder)
            remove_leftovers(folder)
            set_aside_later_checkpoints(checkpoints_of_run(folder), step)


def save_snapshot(
    ema: ExponentialMovingAverage, run_folder: Path, step: int, dtype: torch.dtype | None = None
) -> None:
    """Write a snapshot of power-function averages; each rank writes its own shards.

    Call it on every rank. Synchronizes with the device.

    Args:
        ema: Average with a ``sigma_rel``.
        run_folder: Run folder, which all ranks share.
        step: Step of the training, for the name of the snapshot.
        dtype: Dtype of the stored averages; ``None`` for that of `ema`.
    """
    folder = run_folder / AVERAGE_SNAPSHOTS / f"checkpoint-{step}"
    staging = staging_folder(folder)
    with raising_together():
        if this_rank() == 0:
            clear_staging(staging)
            note_written(folder.parent)
            (staging / folder.name).mkdir(parents=True)
    state = ema.state_dict()
    del state["buffers"]
    tensors = {
        name: tensor.to(dtype) if name.startswith("averages") else tensor
        for name, tensor in flat_tensors(state).items()
    }
    place, checksums = staging / folder.name, None
    if num_ranks() == 1 and not any(map(is_distributed, tensors.values())):
        checksums = hashed_files.save_tensors(tensors, place / _WHOLE)  # several times faster
    else:
        save_tensors(place, tensors)
    with raising_together():
        if this_rank() == 0:
            write_manifest(place, known=checksums)
            move_into_place(place, folder)


def build_average(
    run: Path, *, sigma_rel: float | None = None, last: int | None = None, at: int | None = None
) -> Built:
    """Return how an average is built, by `power_average` or `plain_average`; on every rank.

    Raises:
        TypeError: If not exactly one of `sigma_rel` and `last` is given, or `at` with `last`.
        ValueError: See `power_average` and `plain_average`.
    """
    if (sigma_rel is None) == (last is None) or (at is not None and sigma_rel is None):
        msg = (
            "either `sigma_rel`, perhaps with `at`, or `last` must be given, got "
            f"sigma_rel={sigma_rel}, last={last}, at={at}"
        )
        raise TypeError(msg)
    if sigma_rel is not None:
        return power_average(run, sigma_rel, at)
    return plain_average(run, last or 0)


def power_average(run: Path, sigma_rel: float, at: int | None = None) -> Built:
    """Return how a power-function average of any length is built from those that a run has stored.

    They are in its snapshots, in checkpoints of a training with such averages, and in checkpoints
    of `mfwrap.sharded_checkpoint.save_sharded`. Damaged ones are left out with a warning, and so
    are those from before a restart of the average, see `_since_restart`. Call it on every rank;
    rank 0 reads.

    Args:
        run: Run folder.
        sigma_rel: Relative length of the average.
        at: Number of applied updates of the average; the last stored one at or before it counts.
            By default the last one.

    Raises:
        ValueError: If there are no stored averages, their names or shapes differ, or they cannot
            reproduce the profile of `sigma_rel` with an error of at most `LARGEST_ERROR`.
    """
    intact = _intact(run, _has_averages)
    stored = [one for folder, tensors in intact for one in _power_averages(folder, tensors)]
    by_profile = {
        (one.updates, one.sigma_rel): one
        for one in _since_restart(stored)
        if one.updates > 0 and (at is None or one.updates <= at)
    }
    if not by_profile:
        before = "" if at is None else f" of update {at} or earlier"
        msg = (
            f"{run} has no power-function averages{before}; train with `sigma_rel` and "
            "EMACallback(snapshot_every=...)"
        )
        raise ValueError(msg)
    found = [by_profile[each] for each in sorted(by_profile)]
    _check_alike(found)
    sigmas, updates = [one.sigma_rel for one in found], [one.updates for one in found]
    shares, error = combine(sigmas, updates, sigma_rel, updates[-1])
    if error > LARGEST_ERROR:
        msg = (
            f"`sigma_rel` {sigma_rel} is out of the range of the {len(found)} averages in {run}: "
            f"the error of its profile is {error:.2g}, expected at most {LARGEST_ERROR}; choose a "
            f"length nearer to {' and '.join(map(str, sorted({*sigmas})))}"
        )
        raise ValueError(msg)
    return Built(list(zip(found, shares, strict=True)), error)


def plain_average(run: Path, last: int) -> Built:
    """Return how the plain average of the weights in the last intact checkpoints is built.

    Call it on every rank; rank 0 reads.

    Args:
        run: Run folder, or a folder of checkpoints of `mfwrap.sharded_checkpoint.save_sharded`.
        last: Number of checkpoints.

    Raises:
        ValueError: If there are not as many intact checkpoints with weights in safetensors files,
            or names or shapes differ.
    """
    check_int("last", last)
    intact = _intact(run, _has_weights, last)
    if len(intact) < last:
        msg = (
            f"{run} must have {last} intact checkpoints with weights in safetensors files, got "
            f"{len(intact)}"
        )
        raise ValueError(msg)
    found = [_weights(folder, tensors) for folder, tensors in intact]
    _check_alike(found)
    return Built([(one, 1 / last) for one in found])


def weighted_sums(built: Built, like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of an average, distributed as the tensor of its name in `like`.

    A few tensors are read at a time. They are summed in float64 on a CPU, in float32 elsewhere.

    Args:
        built: How the average is built.
        like: Floating-point tensors by name. If they are distributed, call this on every rank.
    """
    names: list[str] = []
    for number, (name, tensor) in enumerate(like.items(), 1):
        names.append(name)
        if sum(like[each].numel() for each in names) >= _PIECE or number == len(like):
            kind = torch.float64 if tensor.device.type == "cpu" else torch.float32
            sums = {each: torch.zeros_like(like[each], dtype=kind) for each in names}
            values = {each: torch.zeros_like(one) for each, one in sums.items()}
            for stored, share in built.parts:
                for folder in dict.fromkeys(stored.tensors[each][0] for each in names):
                    inside = [each for each in names if stored.tensors[each][0] == folder]
                    load_tensors(folder, {stored.prefix + each: values[each] for each in inside})
                for each, value in values.items():
                    sums[each].add_(value, alpha=share)
            yield from sums.items()
            names = []


def _intact(
    run: Path, is_wanted: Callable[[Tensors], bool], last: int | None = None
) -> list[tuple[Path, Tensors]]:
    """Return the last intact checkpoints of a run, the newest last, with the tensors in each.

    Snapshots of averages count as checkpoints. Call it on every rank; rank 0 reads.
    """
    found: list[tuple[Path, Tensors]] = []
    with raising_together():
        if this_rank() == 0:
            for folder in reversed(checkpoints_in(run)):
                is_aside = folder.name.startswith("_")
                if is_aside or folder.parent not in (run, run / AVERAGE_SNAPSHOTS):
                    continue
                try:
                    if is_wanted(tensors := _tensors_in(folder)):
                        verify(folder)
                        found.append((folder, tensors))
                except (OSError, SafetensorError, ValueError) as error:
                    warnings.warn(f"{folder} is left out: {error}", stacklevel=3)
                if len(found) == last:
                    break
    return list(reversed(gather_objects(found)[0]))


def _has_averages(tensors: Tensors) -> bool:
    return any(name.endswith(_SIGMA) for name in tensors)


def _has_weights(tensors: Tensors) -> bool:
    return any(name.startswith(_NETWORK) or "/" not in name for name in tensors)


def _tensors_in(folder: Path) -> Tensors:
    return {
        name: (place, stored)
        for place in tensor_folders(folder)
        for name, stored in stored_tensors(place).items()
    }


def _power_averages(folder: Path, tensors: Tensors) -> Iterator[Stored]:
    own = next(name for name in tensors if name.endswith(_SIGMA)).removesuffix(_SIGMA)
    sigmas = torch.zeros(tensors[own + _SIGMA][1].size, dtype=torch.float64)
    updates = torch.zeros((), dtype=torch.int64)
    load_tensors(tensors[own + _SIGMA][0], {own + _SIGMA: sigmas, own + _UPDATES: updates})
    for number, sigma in enumerate(sigmas.tolist()):
        prefix = f"{own}{part_of_state(number)}/"
        yield Stored(folder, prefix, _below(prefix, tensors), sigma, int(updates))


def _since_restart(stored: Iterable[Stored]) -> list[Stored]:
    """Return the averages of the newest step and those that led to it, in the order of their steps.

    Of the averages of one step, those in the widest dtype are the last: a snapshot may be rounded.
    The number of updates of an average never falls, unless it is restarted: a training began anew,
    or resumed from a checkpoint that had lost the average. Then all averages before the restart are
    left out with a warning, because they are not part of the newest one.
    """
    ordered = sorted(stored, key=lambda one: (_step_of(one.folder), -one.updates, _width(one)))
    falls = (n for n, pair in enumerate(pairwise(ordered), 1) if pair[0].updates > pair[1].updates)
    start = max(falls, default=0)
    if start and this_rank() == 0:
        names = ", ".join(dict.fromkeys(str(one.folder) for one in ordered[:start]))
        warnings.warn(
            f"averages from before a restart of the average are left out: {names}",
            stacklevel=callers_stacklevel(),
        )
    return ordered[start:]


def _step_of(folder: Path) -> int:
    """Return the number at the end of a name such as ``checkpoint-8`` or ``step_8``; 0 if none."""
    return int(folder.name.removeprefix(folder.name.rstrip("0123456789")) or 0)


def _width(stored: Stored) -> int:
    return sum(each.properties.dtype.itemsize for _, each in stored.tensors.values())


def _weights(folder: Path, tensors: Tensors) -> Stored:
    """Return the weights of the network in a checkpoint; the step's tensors have a ``/``."""
    if any(name.startswith(_NETWORK) for name in tensors):
        return Stored(folder, _NETWORK, _below(_NETWORK, tensors))
    return Stored(folder, "", {name: one for name, one in tensors.items() if "/" not in name})


def weights_in(folder: Path) -> Stored:
    """Return the weights of the network in a checkpoint, or in the folder of a model."""
    return _weights(folder, _tensors_in(folder))


def _below(prefix: str, tensors: Tensors) -> Tensors:
    return {n.removeprefix(prefix): one for n, one in tensors.items() if n.startswith(prefix)}


def _check_alike(found: Sequence[Stored]) -> None:
    """Check that names and shapes are those of the newest.

    Raises:
        ValueError: If they differ.
    """
    newest = found[-1]
    expected = {name: tuple(stored.size) for name, (_, stored) in newest.tensors.items()}
    for one in reversed(found):
        shapes = {name: tuple(stored.size) for name, (_, stored) in one.tensors.items()}
        if shapes != expected:
            name = min(name for name, _ in shapes.items() ^ expected.items())
            if one.updates and name not in shapes:
                msg = (
                    f"{newest.folder} has an average of {name!r}, which was frozen until update "
                    f"{one.updates} or later ({one.folder}); choose an average that ends there, "
                    f"with at={one.updates} or less, or a plain average of the last checkpoints"
                )
                raise ValueError(msg)
            msg = (
                f"{one.folder} must have the weights of {newest.folder}, got {name!r} with shape "
                f"{shapes.get(name)} instead of {expected.get(name)}"
            )
            raise ValueError(msg)
