"""Compare the collectives of all ranks before they start, to find ranks that disagree.

`compare_collectives` wraps the functions of ``torch.distributed``. Before a collective starts, its
wrapper exchanges the call with the other ranks through the key-value store and compares the calls.
The caller may be mfwrap, accelerate, transformers or a test's program.

``TORCH_DISTRIBUTED_DEBUG=DETAIL`` also compares collectives, but names no call sites. In torch
2.13, DistributedDataParallel over gloo ends with a segmentation fault in that mode.

Collectives that torch starts in C++ are not compared: those of DistributedDataParallel's reducer
and of DTensors. If a rank is inside one of them and another rank is not, a report says where both
are.
"""

import functools
import inspect
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from torch import Tensor, distributed

from mfwrap.collectives import calls
from mfwrap.collectives.clock import Section, section_clock
from mfwrap.collectives.places import is_skipped, named_ranks, place_of
from mfwrap.collectives.store import has_keys, new_connection
from mfwrap.collectives.watch import rank_watch
from mfwrap.compatibility.torch import default_store

COLLECTIVES: dict[str, str | None] = {
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_object": None,
    "all_reduce": "tensor",
    "all_to_all": None,
    "all_to_all_single": None,
    "barrier": None,
    "broadcast": "tensor",
    "broadcast_object_list": None,
    "gather": "tensor",
    "gather_object": None,
    "monitored_barrier": None,
    "reduce": "tensor",
    "reduce_scatter": None,
    "reduce_scatter_tensor": "input",
    "scatter": "tensor",
    "scatter_object_list": None,
}
"""Collectives of ``torch.distributed``, and the parameter that must have the same shape and dtype
on all ranks."""

SECONDS_BEFORE_REPORT = 5.0
"""Time after which a rank that has not started the collective is reported."""

_logger = logging.getLogger("mfwrap")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """A collective that a rank is about to start."""

    name: str
    """Name of the function, with the tensor's dtype and shape if there is one tensor."""

    site: str
    """Innermost frames of the caller."""

    own_line: str
    """File and line that called mfwrap's collective; empty if mfwrap did not start it."""

    def __str__(self) -> str:
        return f"{self.name} at {self.site}"


def compare_collectives() -> None:
    """Compare the collectives of all ranks of this process from now on."""
    for name, parameter in COLLECTIVES.items():
        function = getattr(distributed, name)
        if not hasattr(function, "is_compared"):
            setattr(distributed, name, _compared(function, parameter))
    distributed.init_process_group = _watched(distributed.init_process_group)


def _compared(function: Callable[..., Any], parameter: str | None) -> Callable[..., Any]:
    """Wrap a function of ``torch.distributed`` so that its calls are compared across ranks."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if distributed.is_initialized():
            given = signature.bind(*args, **keywords).arguments
            tensor = None if parameter is None else given.get(parameter)
            frame = sys._getframe(1)
            with section_clock.within(Section.WAITING):
                _compare(_call(function.__name__, tensor, frame), given.get("group"))
        return function(*args, **keywords)

    wrapper.is_compared = True  # type: ignore[attr-defined]  # (marks the wrapper)
    return wrapper


def _watched(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``init_process_group`` so that it also starts the `RankWatch` of this process."""

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> None:
        function(*args, **keywords)
        rank_watch()

    return wrapper


def _call(name: str, tensor: Any, frame: FrameType) -> CollectiveCall:
    if isinstance(tensor, Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        name = f"{name} of {dtype}{list(tensor.shape)}"
    own_line = ""
    if frame.f_code.co_filename == calls.__file__:
        outer = frame.f_back
        while outer is not None and is_skipped(outer.f_code.co_filename):
            outer = outer.f_back
        if outer is not None:
            own_line = f"{outer.f_code.co_filename}:{outer.f_lineno}"
    return CollectiveCall(name=name, site=place_of(frame), own_line=own_line)


def _compare(call: CollectiveCall, group: Any) -> None:
    global _comparison  # noqa: PLW0603  (one comparison per process and process group)
    group = distributed.group.WORLD if group is None else group
    # A rank outside of the group has an int instead of a group.
    if isinstance(group, int) or distributed.get_world_size(group) == 1:
        return
    store = default_store()
    if _comparison is None or _comparison.belongs_to is not store:
        connection = new_connection(store, "mfwrap/collectives")
        if connection is None:
            return
        _comparison = Comparison(store, connection, calls.this_rank())
    ranks = distributed.get_process_group_ranks(group)
    _comparison.compare(call, ranks, getattr(group, "group_name", ""))


@final
class Comparison:
    """Compare the calls of this rank with those of the other ranks, separately for each group.

    Args:
        store: Key-value store that the ranks share.
        connection: The comparison's own connection to the store, see `new_connection`.
        rank: This rank.
    """

    def __init__(self, store: Any, connection: Any, rank: int) -> None:
        self.belongs_to = store
        self._store = connection
        self._timeout = store.timeout.total_seconds()
        self._rank = rank
        self._numbers: Counter[str] = Counter()

    def compare(self, call: CollectiveCall, ranks: Sequence[int], group: str) -> None:
        """Wait until all ranks of a group have reached their next call, and compare these calls.

        Args:
            call: What this rank is about to start.
            ranks: Ranks of the group.
            group: Name of the group.

        Raises:
            RuntimeError: If the ranks start different collectives, or if a missing rank has raised
                an error, does not answer, or does not start a collective within the timeout of the
                process group.
        """
        names = f"{group}/{'.'.join(map(str, ranks))}"
        self._numbers[names] += 1
        number = self._numbers[names]
        keys = {rank: f"{names}/{number}/{rank}" for rank in ranks}
        content = {"name": call.name, "site": call.site, "own_line": call.own_line}
        self._store.set(keys[self._rank], json.dumps(content))
        self._wait(number, call, keys)
        found = self._store.multi_get(list(keys.values()))
        of_ranks = {
            rank: CollectiveCall(**json.loads(each))
            for rank, each in zip(ranks, found, strict=True)
        }
        # A rank that has reached this call has read all keys of the call before the previous one,
        # so this rank can delete its own key of that call.
        self._store.delete_key(f"{names}/{number - 2}/{self._rank}")
        # Other libraries may start the same collective at two places: accelerate's
        # `main_process_first` has one barrier for the main process and one for the others.
        is_own = any(each.own_line for each in of_ranks.values())
        if len({(each.name, is_own and each.own_line) for each in of_ranks.values()}) > 1:
            by_call: dict[str, list[int]] = {}
            for rank, each in of_ranks.items():
                by_call.setdefault(str(each), []).append(rank)
            starts = "; ".join(
                f"{named_ranks(those)} {'start' if len(those) > 1 else 'starts'} {text}"
                for text, those in by_call.items()
            )
            msg = (
                f"ranks disagree about collective {number}: {starts}. All ranks must start the "
                "same collectives in the same order"
            )
            raise RuntimeError(msg)
        watch = rank_watch()
        if watch is not None:
            watch.go_on()

    def _wait(self, number: int, call: CollectiveCall, keys: dict[int, str]) -> None:
        """Wait until all ranks have written their keys; log a warning about missing ranks.

        Raises:
            RuntimeError: If a missing rank has raised an error, does not answer two questions in a
                row, or is still missing after the timeout.
        """
        waited, patience = 0.0, SECONDS_BEFORE_REPORT
        while not has_keys(self._store, list(keys.values()), patience):
            waited += patience
            watch = rank_watch()
            status = {} if watch is None else watch._messages.ask()
            missing = [r for r, key in keys.items() if r in status and not self._store.check([key])]
            if not missing:
                continue
            places = "; ".join(status[rank].description(rank) for rank in missing)
            report = (
                f"rank {self._rank} has waited {waited:.0f} s in collective {number}, {call}, for "
                f"{named_ranks(missing)}: {places}"
            )
            # A rank may be silent for some seconds while a C extension holds Python's lock.
            is_silent = waited > SECONDS_BEFORE_REPORT and not all(
                status[r].answers for r in missing
            )
            has_failed = any(status[rank].has_failed for rank in missing)
            if has_failed or is_silent or waited >= self._timeout:
                raise RuntimeError(report)
            _logger.warning(report)
            patience = min(patience * 2, self._timeout - waited)


_comparison: Comparison | None = None
