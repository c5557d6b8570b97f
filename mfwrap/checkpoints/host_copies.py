"""Copy the state of a training to host memory, where it stays as it is while training goes on."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.tensors.shards import is_distributed

_LOG = logging.getLogger(__name__)

_Place = tuple[int, torch.device, int]
"""Address, device and number of bytes of a storage."""

_Kind = tuple[int, bool]
"""Number of bytes of a buffer, and whether its memory is pinned."""


@final
class HostCopies:
    """Copy nested state to host memory, into buffers that the next copy uses again.

    A tensor keeps its dtype, shape and strides, and tensors that share memory share it in the copy.
    Values that are no tensors are copied, too.

    A tensor on a device is copied to pinned memory in the stream of the training: the host does not
    wait, and the device does what changes the tensor after the copy. (In a stream of its own, the
    copy could overlap the next forward. But then each place that may change weights in place, such
    as a callback, would have to wait for it.)
    """

    def __init__(self) -> None:
        self._buffers: dict[_Kind, list[Tensor]] = {}
        self._taken: dict[_Kind, list[Tensor]] = {}
        self._copied: list[torch.Event] = []
        self._logged = 0

    def copy(self, state: Any) -> Any:
        """Return a copy of nested dictionaries, lists and tuples with tensors.

        Call `wait` before the copy is read, and `release` before the next call.

        Args:
            state: The state.

        Raises:
            MemoryError: If the host does not have the memory. Nothing has been copied then.
            ValueError: If a tensor is distributed over ranks.
        """
        places = {_place_of(each): each for each in _tensors(state) if is_plain(each)}
        kinds = Counter(_kind_of(place) for place in places)
        # The buffers of the last copy that this one has no use for are given back first.
        self._buffers = {
            kind: buffers[: kinds[kind]] for kind, buffers in self._buffers.items() if kind in kinds
        }
        self._check(kinds)
        buffers = {place: self._copied_storage(place, each) for place, each in places.items()}
        for device in {place[1] for place in places if place[1].type != "cpu"}:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._copied.append(event)
        return _mapped(state, lambda tensor: _in_buffer(tensor, buffers))

    def _check(self, kinds: Counter[_Kind]) -> None:
        kept = Counter({kind: len(buffers) for kind, buffers in self._buffers.items()})
        needed = _num_bytes(kinds - kept)
        problem = memory_problem(needed)
        if problem is not None:
            raise MemoryError(problem)
        total = _num_bytes(kinds)
        if total > self._logged:
            _LOG.info("checkpoints in the background take %s of host memory", readable_size(total))
            self._logged = total

    def _copied_storage(self, place: _Place, tensor: Tensor) -> Tensor:
        kind = _kind_of(place)
        free = self._buffers.get(kind)
        buffer = (
            free.pop()
            if free
            else torch.empty(kind[0], dtype=torch.uint8, device="cpu", pin_memory=kind[1])
        )
        self._taken.setdefault(kind, []).append(buffer)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        buffer.copy_(whole.set_(tensor.untyped_storage()), non_blocking=True)
        return buffer

    def wait(self) -> None:
        """Wait until the device has done the copies; any thread may call this."""
        for event in self._copied:
            event.synchronize()

    def release(self) -> None:
        """Let the next copy use the buffers. The last copy must not be read any more."""
        self._buffers, self._taken, self._copied = self._taken, {}, []

    def __reduce__(self) -> tuple[type["HostCopies"], tuple[()]]:
        # A pickled trainer has buffers of its own.
        return type(self), ()


def memory_problem(num_bytes: int, remedy: str = "save without `async_save`") -> str | None:
    """Return why a copy of the state does not fit into host memory; ``None`` if it does.

    Only Linux says how much memory is available; elsewhere the answer is ``None``.

    Args:
        num_bytes: Bytes of the copy.
        remedy: What to do instead, for the answer.
    """
    available = available_memory()
    if available is None or num_bytes <= available:
        return None
    return (
        f"a checkpoint in the background needs a copy of {readable_size(num_bytes)} in host "
        f"memory, but only {readable_size(available)} are available; {remedy}"
    )


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still allocate; ``None`` if the system does not say.

    Args:
        root: Folder that has ``proc`` and ``sys`` of the system.

    Source: ``MemAvailable`` of proc(5), and ``memory.max`` of Linux' control groups, version 2.
    """
    found = []
    meminfo = _lines(root / "proc/meminfo")
    found += [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
    for line in _lines(root / "proc/self/cgroup"):
        group = root / "sys/fs/cgroup" / line.rpartition(":")[2].lstrip("/")
        limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
        if limit and used and limit[0] != "max":
            # The kernel takes cached files away before a group has too little memory.
            cached = [
                int(each.split()[1])
                for each in _lines(group / "memory.stat")
                if each.startswith("inactive_file ")
            ]
            found.append(int(limit[0]) - int(used[0]) + sum(cached))
    return max(min(found), 0) if found else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is its storage and a view of it, and nothing else."""
    if is_distributed(tensor):
        msg = "the tensors of a background copy must be whole on each rank, got a distributed one"
        raise ValueError(msg)
    return type(tensor) in {Tensor, torch.nn.Parameter} and (
        tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _place_of(tensor: Tensor) -> _Place:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.device, storage.nbytes()


def _kind_of(place: _Place) -> _Kind:
    return place[2], place[1].type != "cpu"


def _num_bytes(kinds: Counter[_Kind]) -> int:
    """Return the memory of buffers; torch rounds the size of pinned ones to a power of two."""
    return sum(
        number * (1 << (size - 1).bit_length() if is_pinned and size else size)
        for (size, is_pinned), number in kinds.items()
    )


def _in_buffer(tensor: Tensor, buffers: dict[_Place, Tensor]) -> Tensor:
    if not is_plain(tensor):
        return tensor.detach().to("cpu", copy=True)
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    storage = buffers[_place_of(tensor)].untyped_storage()
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)


def _mapped(state: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested state of the same classes, with other tensors."""
    if isinstance(state, Tensor):
        return copied(state)
    if isinstance(state, dict):
        # A shallow copy keeps the class, such as OrderedDict, and its attributes.
        new = copy.copy(state)
        for key, value in state.items():
            new[key] = _mapped(value, copied)
        return new
    if type(state) in {list, tuple}:
        return type(state)(_mapped(value, copied) for value in state)
    return copy.deepcopy(state)


def readable_size(num_bytes: int) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
