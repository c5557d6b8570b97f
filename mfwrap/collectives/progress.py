"""Count a rank's updates and collectives, and recognize ranks that wait for each other forever."""

import dataclasses
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import distributed

from mfwrap.compatibility.torch import BROADCAST_OF_BUFFERS, number_of_collectives

_HAS_RAISED = "has raised"
_NUM_KEPT = 16
"""Number of updates whose collectives are remembered: a device may be some updates behind."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What one rank says about itself."""

    training: int = 0
    """Number of the training in this process; 0 for a loop without `RankWatch.training`."""

    begun: int = 0
    """Number of updates that the rank has begun."""

    done: int = 0
    """Number of updates that the rank has finished."""

    end: str = ""
    """How the rank's training ended; empty while it trains."""

    place: str = ""
    """Where the rank's main thread is; empty if the rank has not answered."""

    collective: str = ""
    """Function of torch, if the main thread is inside a collective of all ranks that Python code
    started; otherwise empty."""

    collectives: int = 0
    """Number of collectives that the rank has started in the default process group."""

    of_updates: Sequence[Sequence[int]] = dataclasses.field(default_factory=list)
    """For each of the last updates: its number, and `collectives` before and after it."""

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the rank's last update."""
        return self.end.startswith(_HAS_RAISED)

    @property
    def answers(self) -> bool:
        """Whether the rank has answered, or has said that its training has ended."""
        return bool(self.place or self.end)

    @property
    def is_in_update(self) -> bool:
        """Whether the rank is in an update that may still end."""
        return self.begun > self.done and not self.end

    @property
    def is_in_forward(self) -> bool:
        """Whether the rank waits for other ranks before a forward of DistributedDataParallel."""
        return self.collective == BROADCAST_OF_BUFFERS

    def description(self, rank: int) -> str:
        """Return the status of a rank in words."""
        where = f"in update {self.begun}" if self.begun > self.done else f"after update {self.done}"
        if self.end:
            return f"rank {rank} {self.end}"
        if not self.place:
            return f"rank {rank} does not answer and was last seen {where}"
        return f"rank {rank} is {where}, at {self.place}"

    def is_deadlocked_with(self, other: "RankStatus") -> bool:
        """Return whether this rank and another rank wait for each other forever.

        Collectives of one process group must have the same order on all ranks. So two ranks wait
        forever in two cases. This rank is in an update, and the other rank waits in a collective
        that it started instead of this update. Or both wait in different functions of torch that
        started the collective of the same number.

        A rank that is only slow, because it evaluates, reads data or is stopped by a debugger, does
        not wait in a collective.

        Args:
            other: Status of a rank of the same process group, which takes part in the update.
        """
        own, others = _by_update(self.of_updates), _by_update(other.of_updates)
        last = min(self.done, other.done)
        if (
            not other.collective
            or other.is_in_update
            or other.training != self.training
            or last not in own
            or last not in others
            # The ranks count differently: gloo also counts messages between two ranks.
            or own[last][1] != others[last][1]
        ):
            return False
        number = other.collectives
        if not self.is_in_update:
            return _differs(self, other) or _differs(other, self)
        missed = other.done + 1
        if missed not in own or number <= own[missed][0]:
            # This rank has started the collective, too: the other rank still receives data.
            return False
        return number > self.collectives or any(
            update >= missed and before < number <= after for update, (before, after) in own.items()
        )


def _differs(ahead: RankStatus, other: RankStatus) -> bool:
    """Return whether two ranks wait in different functions for the collective of one number."""
    if "" in (ahead.collective, other.collective) or ahead.collective == other.collective:
        return False
    # Making several buffers equal takes several collectives. No rank leaves a barrier before all
    # ranks have reached it, so a rank that waits in one has not met the other rank there.
    is_ahead = ahead.is_in_forward and other.collective == "barrier"
    return ahead.collectives == other.collectives or (
        is_ahead and ahead.collectives > other.collectives
    )


def _by_update(of_updates: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    return {update: (before, after) for update, before, after in of_updates}


@final
class Progress:
    """Count the updates of this rank, and its collectives in each of them.

    Its methods only set attributes, apart from reading a counter of torch, which takes less than a
    microsecond.

    Args:
        group: Default process group, which the object does not keep alive; ``None`` if there is
            none, so that no collective is counted.
    """

    def __init__(self, group: Any) -> None:
        # The watch of a process lives until the process ends. If it kept a destroyed group alive,
        # the threads of gloo would still run when the interpreter shuts down, and could abort the
        # process: they need the GIL to free the tensors of the last collective.
        self._reference = None if group is None else weakref.ref(group)
        self._training = self.begun = self.done = 0
        self.end = ""
        """How the rank's training ended; empty while it trains."""
        self._of_updates: deque[list[int]] = deque(maxlen=_NUM_KEPT)
        self._note(0)

    def begin_training(self) -> None:
        """Count the updates of another training, from 0."""
        self.begun = self.done = 0
        self.end = ""
        self._training += 1
        self._of_updates.clear()
        self._note(0)

    def begin_update(self) -> None:
        """Note that the next update has begun, unless it has begun already."""
        self.end = ""
        if self.begun == self.done:
            self._note(self.done + 1)
            self.begun = self.done + 1

    def end_update(self) -> None:
        """Note that the update has ended."""
        self._of_updates[-1][2] = self._collectives()
        self.done = self.begun

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the last update."""
        return self.status().has_failed

    def fail(self, error: Exception) -> None:
        """Note that an error has ended the training."""
        # Errors of torch's pipelines begin with an empty line.
        message = str(error).strip().partition("\n")[0]
        self.end = f"{_HAS_RAISED} {type(error).__name__} in update {self.begun}: {message}"

    def go_on(self) -> None:
        """Forget an error that has ended an update: this rank has met the other ranks again."""
        self.end = ""
        self.begun = self.done

    def leave(self, what: str) -> None:
        """Note that the rank has ended its training, for example by ``has ended its program``."""
        if not self.end:
            self.end = f"{what} after update {self.done}"

    def status(self) -> RankStatus:
        """Return the status of this rank, without its place and its collectives."""
        return RankStatus(training=self._training, begun=self.begun, done=self.done, end=self.end)

    def answer(self, place: str) -> RankStatus:
        """Return the status of this rank with its place and its collectives.

        Another thread calls this. So read first what proves that the main thread is outside of an
        update: a collective that it has started by then belongs to no later update.

        Args:
            place: Where the main thread is.
        """
        collective = collective_of_main_thread(self._group)
        collectives = self._collectives()
        of_updates = [list(each) for each in tuple(self._of_updates)]
        done, begun = self.done, self.begun
        if begun > done and of_updates and of_updates[-1][0] == begun:
            of_updates[-1][2] = collectives
        return RankStatus(
            training=self._training,
            begun=begun,
            done=done,
            end=self.end,
            place=place,
            collective=collective,
            collectives=collectives,
            of_updates=of_updates,
        )

    def answer_in_next_collective(self, function: str) -> RankStatus:
        """Return the status of this rank as it will be when it waits in its next collective.

        Args:
            function: Function of torch that starts the collective.
        """
        status = self.answer("")
        return dataclasses.replace(status, collective=function, collectives=status.collectives + 1)

    def waits_in(self) -> tuple[int, ...]:
        """Return what this rank waits in: its update, or its collective of all ranks.

        The numbers change when the rank moves on. Empty if it waits in neither.
        """
        if self.begun > self.done and not self.end:
            return (self._training, self.begun)
        if collective_of_main_thread(self._group):
            return (self._training, self.done, self._collectives())
        return ()

    @property
    def _group(self) -> Any:
        return None if self._reference is None else self._reference()

    def _note(self, update: int) -> None:
        collectives = self._collectives()
        self._of_updates.append([update, collectives, collectives])

    def _collectives(self) -> int:
        # For a backend that does not count its collectives, no collective is ever missing.
        return number_of_collectives(self._group)


def collective_of_main_thread(group: Any) -> str:
    """Return the function of torch in which the main thread waits for all ranks; empty if none.

    Args:
        group: Default process group. Collectives of other groups do not count.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  (no public name)
    try:
        while frame is not None and "/torch/" in frame.f_code.co_filename:
            file, name, given = frame.f_code.co_filename, frame.f_code.co_name, frame.f_locals
            if file == distributed.distributed_c10d.__file__:
                # Functions for objects call those for tensors. Outside of these, they pickle.
                is_default = given.get("group") in (None, group)
                is_waiting = is_default and not given.get("async_op", False)
                return name if name in COLLECTIVES and "object" not in name and is_waiting else ""
            if (
                name == BROADCAST_OF_BUFFERS
                and getattr(given.get("self"), "process_group", None) is group
            ):
                return name
            frame = frame.f_back
        return ""
    finally:
        # In the main thread the frame is this function's own, which would keep the group alive.
        del frame
