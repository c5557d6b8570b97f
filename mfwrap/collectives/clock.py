"""Measure in which section of a step this rank spends its time, and how long it waits for others.

At any moment a step is in one section: it loads data, computes forward and backward, reduces
gradients, updates weights, or waits for other ranks. Code that enters a section calls
`SectionClock.switch`; the time since the previous call then belongs to the section before. At the
end of an update, `SectionClock.end_step` returns the times of all sections since the previous
update.

Ranks wait for each other inside collectives, most of them inside torch's backward. The time until
the slowest rank arrives must not count as the own work of a rank that waits, because then all ranks
would seem equally slow:

- mfwrap's own collectives switch to `Section.WAITING` (`mfwrap.collectives.calls`).
- DistributedDataParallel starts its collectives during backward, and waits for them in a callback
  that autograd calls when all gradients are computed. `SectionClock.follow_backward` queues a
  callback of its own. Autograd calls the callbacks in the order in which they were queued, so ours,
  queued by the first gradient, comes before that of DistributedDataParallel, queued by the last.
- ``fully_shard`` waits in its own gathers and reductions (`mfwrap.step.ranks.fsdp`).

A maintainer must know:

- Nothing is measured unless somebody has called `SectionClock.start_for`. All calls then cost about
  a microsecond on a CPU.
- On a CPU, times are read from the host's clock. On other devices the host runs ahead of the
  device, so each switch records an event in the current stream, and the times are read later, when
  the device has passed the events. Nothing synchronizes. A device without such events is measured
  with the host's clock.
- A device runs backward in a thread of its own, which calls `SectionClock.switch` while the main
  thread waits for it. So the two threads never call it at the same time.
"""

import contextlib
import enum
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor

from mfwrap.compatibility.torch import call_after_backward


class Section(enum.IntEnum):
    """A section of a training step."""

    DATA = 0
    """Between the updates, and between the micro-batches of an attached loop: loading of data,
    callbacks, and everything else outside of the step."""

    FORWARD_BACKWARD = 1
    """Forward and backward, without waiting for other ranks."""

    REDUCTION = 2
    """Communication hook that reduces gradients, without waiting for other ranks."""

    UPDATE = 3
    """Norms, optimizer, average and loss scale, without waiting for other ranks."""

    WAITING = 4
    """Waiting for other ranks, and transfers: collectives that have no result yet."""


@final
class StepSections:
    """Times of the sections of one step on this rank.

    Args:
        host_ns: Time of each section, in nanoseconds, measured on the host.
        marks: On a device: pairs of an event and the section that ends with it, in order; ``None``
            for time that is in no section. The first event begins the step.
    """

    def __init__(
        self, host_ns: Sequence[int], marks: Sequence[tuple[Any, Section | None]] = ()
    ) -> None:
        self._seconds: list[float] | None = None
        self._marks = list(marks)
        if not self._marks:
            self._seconds = [each / 1e9 for each in host_ns]

    def seconds(self) -> list[float] | None:
        """Return the time of each `Section` in its order, in seconds.

        Does not synchronize with the device.

        Returns:
            A list of five numbers; ``None`` if the device has not finished the step yet.
        """
        if self._seconds is None and self._marks[-1][0].query():
            self._seconds = [0.0] * len(Section)
            for (start, _), (end, section) in itertools.pairwise(self._marks):
                if section is not None:
                    self._seconds[section] += start.elapsed_time(end) / 1e3
            self._marks = self._marks[-1:]
        return self._seconds


@final
class SectionClock:
    """Measure the sections of this rank's steps.

    A process does one step at a time, so there is one clock, `section_clock`.

    Args:
        now: Returns nanoseconds since an arbitrary start.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._readers: WeakSet[object] = WeakSet()
        self._section = Section.DATA
        self._device = torch.device("cpu")
        self._has_events = False
        self._has_begun = False
        self._is_paused = False
        self._restart()

    def _restart(self) -> None:
        self._host_ns = [0] * len(Section)
        self._last_ns = self._now()
        self._marks: list[tuple[Any, Section | None]] = []
        if self._has_events:
            self._marks.append((_recorded_event(self._device), self._section))

    @property
    def is_on(self) -> bool:
        """Whether somebody reads the times. If not, nothing is measured."""
        return len(self._readers) > 0

    def start_for(self, reader: object) -> None:
        """Measure from now on, until `stop_for` is called or `reader` is deleted."""
        if not self.is_on:
            self._section, self._has_begun = Section.DATA, False
            self._restart()
        self._readers.add(reader)

    def stop_for(self, reader: object) -> None:
        """Measure no longer for `reader`."""
        self._readers.discard(reader)

    def switch(self, section: Section) -> Section:
        """Enter a section, and return the section that ends with this call."""
        before = self._section
        if before is not section and self.is_on:
            self._mark(before)
            self._section = section
            # Ranks also wait for each other between two steps, in an evaluation for example.
            if section not in {Section.DATA, Section.WAITING} and not self._is_paused:
                self._has_begun = True
        return before

    @contextlib.contextmanager
    def within(self, section: Section) -> Iterator[None]:
        """Be in a section within the block; then return to the section before."""
        before = self.switch(section)
        try:
            yield
        finally:
            self.switch(before)

    def begin_step(self) -> None:
        """Tell the clock that the data of the next step are loaded; see `left_out`.

        The first forward, reduction or update also begins the step.
        """
        self._has_begun = True

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the time within the block out of all sections.

        If the next step has not begun, the time since the end of the last step is left out, too:
        an event such as ``on_evaluate`` comes after its evaluation.
        """
        section, was_paused = self._section, self._is_paused
        if self.is_on:
            self._mark(section)
        self._is_paused = True
        try:
            yield
        finally:
            if self.is_on:
                self._mark(section)
                self._section = section
            self._is_paused = was_paused
            if self.is_on and not self._has_begun:
                self._restart()

    def follow_backward(self, loss: Tensor) -> None:
        """Switch to waiting when the backward of `loss` has computed all gradients of this rank.

        The caller switches to another section after backward.
        """
        if self.is_on and loss.requires_grad:
            loss.register_hook(self._queue_end_of_backward)

    def _queue_end_of_backward(self, _: Tensor) -> None:
        call_after_backward(lambda: self.switch(Section.WAITING))

    def end_step(self, device: torch.device) -> StepSections | None:
        """End the step, and begin to load data for the next.

        Args:
            device: Training device.

        Returns:
            Times since the previous call; ``None`` if nobody reads them.
        """
        if not self.is_on:
            return None
        self._mark(self._section)
        self._section, self._has_begun = Section.DATA, False
        sections = StepSections(self._host_ns, self._marks)
        self._host_ns, self._marks = [0] * len(Section), self._marks[-1:]
        if device != self._device:
            self._device = device
            self._has_events = has_timed_events(device)
            self._restart()
        return sections

    def _mark(self, section: Section) -> None:
        """Add the time since the last mark to a section, or to none within `left_out`."""
        if self._has_events:
            ended = None if self._is_paused else section
            self._marks.append((_recorded_event(self._device), ended))
            return
        now = self._now()
        if not self._is_paused:
            self._host_ns[section] += now - self._last_ns
        self._last_ns = now


def has_timed_events(device: torch.device) -> bool:
    """Return whether events on a device measure time. If not, times are those of the host."""
    if device.type == "cpu":
        return False
    try:
        _recorded_event(device)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _recorded_event(device: torch.device) -> Any:
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


section_clock = SectionClock()
"""Clock of this process. Steps switch its sections; monitors start it and read
``StepReport.sections``."""
