"""Read the memory of this process, and explain an error for lack of memory.

Nothing here synchronizes with the device: torch's caching allocator keeps its numbers on the host.
Nothing resets them either, because a user may measure with the same peaks.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mfwrap.collectives import Section, num_ranks, this_rank

GIB = 2**30

_NOTE = "out of memory in "
_TEXTS = ("out of memory", "can't allocate memory")
"""Texts of errors that are no ``torch.OutOfMemoryError``: torch's on a CPU, and other devices'."""

_SECTIONS = {
    Section.DATA: "outside of the updates (data, evaluation or saving)",
    Section.FORWARD_BACKWARD: "forward and backward",
    Section.REDUCTION: "the reduction of gradients",
    Section.UPDATE: "the update (norms, optimizer and average)",
}
_FUNCTIONS = {
    "foreach_reduce": Section.REDUCTION,  # of ``fully_shard``
    "GradientTap.reduce": Section.REDUCTION,  # the communication hook
    "MFTrainerMixin.training_step": Section.FORWARD_BACKWARD,
}
"""Sections that a function in the traceback tells, by its qualified name."""

_MOST_SHAPES = 8


class DeviceMemory(NamedTuple):
    """What torch's caching allocator says about a device and this process, in bytes.

    The peaks are torch's own: the highest since the process began, or since the last call of
    ``torch.cuda.reset_peak_memory_stats``.
    """

    allocated: int
    """Memory that tensors occupy now."""

    max_allocated: int
    max_reserved: int
    """Peak of what the allocator has taken from the device: tensors, and memory that it keeps."""

    num_alloc_retries: int
    """How often the device had no memory left, so that the allocator freed what it kept, and asked
    again. Each time it synchronizes with the device."""

    total: int | None
    """Memory of the device; ``None`` if it is unknown."""

    @property
    def share(self) -> float | None:
        """Highest share of the device that the allocator has taken; ``None`` if it is unknown."""
        return self.max_reserved / self.total if self.total else None


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a device; ``None`` for a CPU and devices without such numbers."""
    # Half as long as `torch.accelerator.memory_stats`, which sorts and joins 100 names.
    read = getattr(_module(device), "memory_stats_as_nested_dict", None)
    stats = read(device) if read is not None else None
    if not stats:
        return None
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    retries = stats["num_alloc_retries"]
    current, peak = allocated["current"], allocated["peak"]
    return DeviceMemory(current, peak, reserved["peak"], retries, _total(device))


class HostMemory(NamedTuple):
    """Resident memory of this process now and at its peak, in bytes."""

    resident: int
    peak: int


def host_memory() -> HostMemory | None:
    """Return the memory of this process; ``None`` if the system is not Linux."""
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:
        return None
    found = {name: 1024 * int(kib) for name, kib in re.findall(rb"Vm(HWM|RSS):\s*(\d+) kB", status)}
    return HostMemory(found[b"RSS"], found[b"HWM"]) if len(found) == 2 else None


def peak_memory(device: torch.device) -> int | None:
    """Return the peak of a device's allocated memory, or on a CPU that of the process, in bytes."""
    of_device = device_memory(device)
    if of_device is not None:
        return of_device.max_allocated
    of_host = host_memory()
    return None if of_host is None else of_host.peak


def _module(device: torch.device) -> Any:
    return None if device.type == "cpu" else getattr(torch, device.type, None)


@functools.cache
def _total(device: torch.device) -> int | None:
    properties = getattr(_module(device), "get_device_properties", None)
    total: int | None = getattr(properties and properties(device), "total_memory", None)
    return total


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the host has no memory left."""
    texts = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, torch.OutOfMemoryError) or any(each in texts for each in _TEXTS)


def memory_note(error: BaseException) -> str | None:
    """Return the note of `explain_out_of_memory`; ``None`` if the error has none."""
    notes: Sequence[str] = getattr(error, "__notes__", ())
    return next((note for note in notes if note.startswith(_NOTE)), None)


class Average(Protocol):
    """An average of the weights."""

    @property
    def is_on_accelerator(self) -> bool:
        """Whether the average takes memory of an accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What decides how much memory a training needs."""

    networks: Sequence[nn.Module]
    """Networks that are trained, with their wrappers."""

    is_sharded: bool
    """Whether ``fully_shard`` has sharded a network."""

    accumulates: bool
    """Whether an update has several micro-batches."""

    reduces_each: bool
    """Whether ``sync_each_batch`` is on."""

    average: Average | None


class SnapshotTaker(Protocol):
    """Writes what the allocator holds when memory has run out."""

    def take_snapshot(self) -> None:
        """Write the snapshot."""


snapshot_takers: WeakSet[SnapshotTaker] = WeakSet()
"""Called once for each error that `explain_out_of_memory` explains."""


def explain_out_of_memory(
    error: BaseException,
    device: torch.device,
    section: Section,
    training: Training,
    *,
    step: int,
    micro_batch: str = "",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Add a note to an error for lack of memory: where it was raised, and what helps.

    Neither type nor text of the error changes, so accelerate's ``find_executable_batch_size`` still
    recognizes it. Starts no collective and does not synchronize with the device. Does nothing for
    another error, and for one that has the note.

    Args:
        error: Any error.
        device: Training device.
        section: Section of the step, unless the traceback tells it more exactly.
        training: What decides which remedies the note names.
        step: Number of the update, from 1.
        micro_batch: Number of the micro-batch in the update, from 1, as ``"2"`` or ``"2 of 4"``;
            empty if none was computed.
        shapes: Shapes of the micro-batch's tensors by name.
    """
    if not is_out_of_memory(error) or memory_note(error) is not None:
        return
    names = reversed([each.f_code.co_qualname for each in _frames(error)])
    section = next((_FUNCTIONS[each] for each in names if each in _FUNCTIONS), section)
    rank = f" of rank {this_rank()}" if num_ranks() > 1 else ""
    parts = [f"{_NOTE}step {step}{rank}", _SECTIONS[section]]
    if micro_batch:
        parts.append(f"micro-batch {micro_batch}")
    if shapes:
        shown = [f"{name} {tuple(shape)}" for name, shape in shapes.items()]
        parts.append(" and ".join([*shown[:_MOST_SHAPES], "others"][: len(shown)]))
    note = ", ".join(parts) + f"; {_before(device)}"
    helps = list(_remedies(section, training, shapes or {}))
    error.add_note(f"{note}; what needs less: {'; '.join(helps)}" if helps else note)
    for taker in list(snapshot_takers):
        taker.take_snapshot()


def _frames(error: BaseException) -> Iterator[Any]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _before(device: torch.device) -> str:
    memory, host = device_memory(device), host_memory()
    if memory is not None:
        total = "" if memory.total is None else f" of {memory.total / GIB:.2f} GiB"
        return (
            f"peak before it: {memory.max_allocated / GIB:.2f} GiB allocated, "
            f"{memory.max_reserved / GIB:.2f} GiB reserved{total} on {device}"
        )
    peak = "unknown" if host is None else f"{host.peak / GIB:.2f} GiB of this process"
    return f"peak before it: {peak}"


def shapes_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a micro-batch's tensors, scalars left out, by names or positions."""
    named = {f"inputs[{index}]": value for index, value in enumerate(arguments)} | dict(keywords)
    return {name: tuple(one.shape) for each in named.items() for name, one in _tensors(*each)}


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield from [(name, value)] if value.dim() else []
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(str(key), each)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}[{index}]", each)


def _remedies(
    section: Section, training: Training, shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Yield what needs less memory in a training, as parts of a sentence."""
    if section is Section.UPDATE:
        if not training.is_sharded:
            yield "`fully_shard` on several ranks, or an optimizer with a smaller state"
    elif section is not Section.DATA:
        rows = max((shape[0] for shape in shapes.values() if shape), default=2)
        yield (
            "micro-batches of fewer rows, and more of them (`gradient_accumulation_steps`)"
            if rows > 1
            else "shorter rows"
        )
        if not any(map(_recomputes, training.networks)):
            yield (
                "gradient checkpointing (a setting of transformers' models and of a Trainer; "
                "elsewhere `torch.utils.checkpoint`)"
            )
        if training.is_sharded and training.accumulates and not training.reduces_each:
            yield "`sync_each_batch=True`, so that gradients are sharded between micro-batches"
    average = training.average
    if average is not None and average.is_on_accelerator:
        yield "the average on the CPU (`device='cpu'`, and `update_every` to copy it less often)"


def _recomputes(network: nn.Module) -> bool:
    # A model of transformers sets this on its layers, by whatever name the user has turned it on.
    return any(getattr(each, "gradient_checkpointing", False) for each in network.modules())
