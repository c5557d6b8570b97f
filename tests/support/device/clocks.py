"""Streams, events and memory of the simulated device, ordered by vector clocks.

A position of a stream is the number of operators queued on it so far. A clock maps streams to
positions: what is done by then. An operator is ordered after another one if the clock of its stream
has reached the other's position, because the stream has waited for an event, or the host has.

Source of the idea: ``torch.cuda._sanitizer``.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from support.device.allocator import Allocator

Clock = dict[int, int]


def place() -> str:
    """Return the innermost line on the stack that is neither torch's nor the device's own.

    Returns:
        File, with its last folders, and line; ``autograd`` in a thread of autograd.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = _shown_name(frame.f_code.co_filename)
        # A mode of torch runs the operator of its caller.
        if name is not None and frame.f_code.co_name != "__torch_function__":
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


@functools.cache
def _shown_name(file: str) -> str | None:
    """Return a file with its last folders, or None if it is torch's or the device's own."""
    path = Path(file)
    is_torchs = not {"torch", "contextlib.py", "functools.py"}.isdisjoint(path.parts)
    is_own = path.parent.name == "device" and path.stem not in {"cases", "ways", "captures"}
    return None if is_torchs or is_own else "/".join(path.parts[-3:])


@dataclass(frozen=True)
class Fault:
    """Something that is wrong on a device, although the numbers on the CPU are right."""

    kind: str
    sentence: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence} at {self.place}"


@dataclass
class Watch:
    """What has happened on the device since a moment."""

    faults: list[Fault] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    """Reads of the host, which wait for the device: operator and place."""

    synchronizations: list[str] = field(default_factory=list)
    """Other waits of the host for the device, except for events: operator and place."""

    waits: list[str] = field(default_factory=list)
    """Waits of the host for an event: place."""

    def kinds(self) -> list[str]:
        """Return the kinds of the faults, each once, in order."""
        return list(dict.fromkeys(fault.kind for fault in self.faults))


@dataclass(frozen=True)
class Use:
    """Use of memory by one operator."""

    stream: int
    position: int
    what: str


class Timeline:
    """Streams of the device, and what the host has waited for."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.current = self.new_stream()
        self.default = self.current
        self.watch = Watch()
        self.allocator = Allocator()
        self.is_capturing = False
        self.on_wait: Callable[[], None] = lambda: None
        """Called when the host has waited for more work."""

    def new_stream(self) -> "Stream":
        stream = Stream(self, len(self.streams))
        self.streams.append(stream)
        return stream

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        """Queue work on a stream within the block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def fault(self, kind: str, sentence: str) -> None:
        self.watch.faults.append(Fault(kind, sentence, place()))

    def refuse_in_capture(self, what: str) -> None:
        if self.is_capturing:
            self.fault("not allowed in a capture", f"{what} while a graph is captured")

    def read(self, what: str) -> None:
        """Note that the host reads a value, after all work of the current stream."""
        self.refuse_in_capture(f"the host reads ({what})")
        self.watch.reads.append(f"{what} at {place()}")
        self.wait_for(self.current.clock())

    def synchronize(self, what: str, clock: Clock | None = None) -> None:
        """Note that the host waits for the device; ``None`` for all streams."""
        self.refuse_in_capture(f"the host waits ({what})")
        self.watch.synchronizations.append(f"{what} at {place()}")
        clocks = [s.clock() for s in self.streams] if clock is None else [clock]
        for each in clocks:
            self.wait_for(each)

    def wait_for(self, clock: Clock) -> None:
        merge(self.host, clock)
        self.on_wait()

    def is_done(self, stream: int, position: int) -> bool:
        """Return whether the host knows that a stream has passed a position."""
        return self.host.get(stream, 0) >= position


class Stream:
    """Stand in for ``torch.Stream``."""

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self.number = number
        self.position = 0
        self._seen: Clock = {}
        self._blocks: list[AbstractContextManager[None]] = []

    def clock(self) -> Clock:
        return {**self._seen, self.number: self.position}

    def queue(self) -> int:
        """Queue an operator, and return its position."""
        merge(self._seen, self._timeline.host)
        self.position += 1
        return self.position

    def has_seen(self, use: Use) -> bool:
        seen = max(self._seen.get(use.stream, 0), self._timeline.host.get(use.stream, 0))
        return use.stream == self.number or seen >= use.position

    def is_capturing(self) -> bool:
        # torch's optimizers have asked this since torch 2.15.
        return self._timeline.is_capturing

    def wait_event(self, event: "Event") -> None:
        merge(self._seen, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        merge(self._seen, stream.clock())

    def __enter__(self) -> Self:
        self._blocks.append(self._timeline.on(self))
        self._blocks[-1].__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._blocks.pop().__exit__(None, None, None)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event(None, self._timeline) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._timeline.synchronize("stream.synchronize", self.clock())


class Event:
    """Stand in for ``torch.Event``.

    Args:
        device: Device.
        timeline: Timeline of the device.
        settings: Ignored; all times are one millisecond.
    """

    def __init__(self, device: object, timeline: Timeline, **settings: Any) -> None:
        del settings
        self.device = device
        self.clock: Clock = {}
        self._timeline = timeline
        # Copies to the host that arrive before this event, and have not arrived yet.
        self._copies: list[Any] = []

    def record(self, stream: Stream | None = None) -> None:
        stream = self._timeline.current if stream is None else stream
        if any(copy in copies_in_flight for copy in self._copies):
            self._timeline.fault(
                "event reused",
                "an event is recorded again although nobody has waited for the copy to the host "
                "that it marks",
            )
        self.clock = stream.clock()
        self._copies = [copy for copy in copies_in_flight if not copy.event_is_set]
        for copy in self._copies:
            copy.event_is_set = True

    def synchronize(self) -> None:
        self._timeline.refuse_in_capture("the host waits for an event")
        self._timeline.watch.waits.append(place())
        self._timeline.wait_for(self.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (self._timeline.current if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Return whether the host knows that the event is done: as late as possible."""
        self._timeline.refuse_in_capture("the host asks for an event")
        return all(self._timeline.is_done(*item) for item in self.clock.items())

    def elapsed_time(self, end: "Event") -> float:
        del end
        return 1.0


copies_in_flight: list[Any] = []
"""Copies to the host that have been queued and have not arrived."""


class Memory:
    """Memory of the device, as long as a tensor uses it.

    Args:
        timeline: Timeline of the device.
        num_bytes: Size of the tensor for which it is allocated.
    """

    _size: int | None = None

    def __init__(self, timeline: Timeline, num_bytes: int = 0) -> None:
        self._timeline = timeline
        self._size = timeline.allocator.allocate(num_bytes)
        self._owner = timeline.current
        self._written = Use(self._owner.number, self._owner.position, "its allocation")
        self._read: dict[int, Use] = {}
        self._recorded: set[int] = set()

    def record_stream(self, stream: Stream) -> None:
        self._recorded.add(stream.number)

    def use(self, what: str, *, writes: bool) -> None:
        """Note that an operator, which is queued already, reads or writes the memory."""
        stream = self._timeline.current
        earlier = [self._written, *(self._read.values() if writes else ())]
        for each in earlier:
            if not stream.has_seen(each):
                verb = "writes" if writes else "reads"
                self._timeline.fault(
                    "wrong stream",
                    f"{what} on stream {stream.number} {verb} memory that {each.what} uses on "
                    f"stream {each.stream}, and no event orders them",
                )
        use = Use(stream.number, stream.position, f"{what} at {place()}")
        if writes:
            self._written, self._read = use, {}
        else:
            self._read[stream.number] = use

    def __del__(self) -> None:
        if self._size is None:  # the allocation has failed
            return
        self._timeline.allocator.free(self._size)
        for use in (self._written, *self._read.values()):
            if use.stream not in self._recorded and not self._owner.has_seen(use):
                self._timeline.fault(
                    "missing record_stream",
                    f"memory of stream {self._owner.number} is freed while {use.what} may use it "
                    f"on stream {use.stream}",
                )


def merge(clock: Clock, other: Clock) -> None:
    """Move a clock forward to another one, in place."""
    for stream, position in other.items():
        clock[stream] = max(clock.get(stream, 0), position)
