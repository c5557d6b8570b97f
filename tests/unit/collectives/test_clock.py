"""The clock adds the time since each switch to the section that ends with the switch."""

import contextlib
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfwrap.collectives.clock import (
    Section,
    SectionClock,
    StepSections,
    has_timed_events,
)

CPU = torch.device("cpu")


class Ticks:
    """A clock that advances when it is told to, and counts how often it is read."""

    def __init__(self) -> None:
        self.ns = 0
        self.num_reads = 0

    def __call__(self) -> int:
        self.num_reads += 1
        return self.ns


class Reader:
    """An object that reads times."""


@pytest.fixture
def ticks() -> Ticks:
    """Return the time."""
    return Ticks()


@given(st.lists(st.tuples(st.sampled_from(Section), st.integers(0, 100)), max_size=20))
def test_each_section_gets_its_time(visits):
    """Times are sums over all visits of a section, and together the time of the step."""
    ticks, reader = Ticks(), Reader()
    clock = SectionClock(ticks)
    clock.start_for(reader)
    expected = [0] * len(Section)
    for section, seconds in visits:
        clock.switch(section)
        ticks.ns += seconds * 10**9
        expected[section] += seconds

    assert clock.end_step(CPU).seconds() == expected
    assert clock.end_step(CPU).seconds() == [0] * len(Section)


def test_a_block_returns_to_the_section_before(ticks):
    """Time in a block counts for the block's section, even if the block raises."""
    clock, reader = SectionClock(ticks), Reader()
    clock.start_for(reader)
    clock.switch(Section.UPDATE)
    with contextlib.suppress(KeyError), clock.within(Section.WAITING):
        ticks.ns += 3 * 10**9
        raise KeyError
    ticks.ns += 10**9

    assert clock.end_step(CPU).seconds() == [0, 0, 0, 1, 3]


def test_time_can_be_left_out(ticks):
    """An evaluation between two steps is in no section."""
    clock, reader = SectionClock(ticks), Reader()
    clock.start_for(reader)
    ticks.ns += 5 * 10**9
    with clock.within(Section.WAITING):
        ticks.ns += 10**9
    with clock.left_out():
        ticks.ns += 10**9
    ticks.ns += 10**9

    assert clock.end_step(CPU).seconds() == [1, 0, 0, 0, 0]


def test_within_a_step_only_the_block_is_left_out(ticks):
    """A log within a step, even one that waits for ranks and has blocks of its own, is left out."""
    clock, reader = SectionClock(ticks), Reader()
    clock.start_for(reader)
    for begin in (lambda: clock.switch(Section.FORWARD_BACKWARD), clock.begin_step):
        ticks.ns += 5 * 10**9
        begin()
        ticks.ns += 10**9
        with clock.left_out():
            ticks.ns += 10**9
            with clock.within(Section.WAITING), clock.left_out():
                ticks.ns += 10**9
            clock.switch(Section.UPDATE)
            ticks.ns += 10**9
        ticks.ns += 10**9
        sections = clock.end_step(CPU).seconds()
        assert sections[:2] in ([5, 2], [7, 0])
        assert sum(sections) == 7
    with clock.left_out():
        clock.switch(Section.FORWARD_BACKWARD)
        ticks.ns += 10**9
    with clock.left_out():
        ticks.ns += 10**9
    assert clock.end_step(CPU).seconds() == [0] * len(Section)


def test_nothing_is_measured_for_nobody(ticks):
    """Without a reader the time is not even read; a deleted reader is none."""
    clock, reader = SectionClock(ticks), Reader()
    ticks.num_reads = 0
    network = nn.Linear(2, 1)

    def step():
        clock.switch(Section.FORWARD_BACKWARD)
        loss = network(torch.ones(1, 2)).sum()
        clock.follow_backward(loss)
        assert not loss._backward_hooks
        with clock.within(Section.WAITING), clock.left_out():
            clock.begin_step()
        return clock.end_step(CPU)

    assert step() is None
    assert ticks.num_reads == 0
    clock.start_for(reader)
    assert clock.switch(Section.UPDATE) is Section.DATA
    clock.stop_for(reader)
    assert step() is None
    other = Reader()
    clock.start_for(other)
    assert clock.switch(Section.UPDATE) is Section.DATA
    del other
    gc.collect()
    assert step() is None


def test_backward_ends_before_callbacks_that_wait(ticks):
    """A callback that backward queues later, as DistributedDataParallel does, is waiting time."""
    clock, reader = SectionClock(ticks), Reader()
    weight = torch.ones(3, requires_grad=True)

    def wait():
        ticks.ns += 7 * 10**9

    def compute(_):
        ticks.ns += 2 * 10**9
        torch.autograd.Variable._execution_engine.queue_callback(wait)

    weight.register_post_accumulate_grad_hook(compute)
    clock.start_for(reader)
    clock.switch(Section.FORWARD_BACKWARD)
    loss = (weight * 2).sum()
    clock.follow_backward(loss)
    loss.backward()
    clock.switch(Section.UPDATE)

    assert clock.end_step(CPU).seconds() == [0, 2, 0, 0, 7]


class Event:
    """An event at a time in milliseconds that the device may not have reached yet."""

    is_reached = False

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def query(self) -> bool:
        """Return whether the device has passed the event."""
        return Event.is_reached

    def elapsed_time(self, end: "Event") -> float:
        """Return the time from this event to another, as torch's events do."""
        return end.milliseconds - self.milliseconds


def test_times_of_a_device_are_known_when_it_has_finished(monkeypatch):
    """Before the device has passed the last event the times are unknown; nothing waits."""
    marks = [
        (Event(10.0), Section.UPDATE),
        (Event(14.0), Section.DATA),
        (Event(17.0), None),
        (Event(24.0), Section.WAITING),
        (Event(27.0), Section.DATA),
    ]
    sections = StepSections([0] * len(Section), marks)

    assert sections.seconds() is None
    monkeypatch.setattr(Event, "is_reached", True)
    assert sections.seconds() == sections.seconds() == pytest.approx([0.007, 0, 0, 0, 0.007])


def test_a_device_without_timed_events_uses_the_clock_of_the_host(ticks):
    """On a device that has no events, the times are those of the host."""
    clock, reader = SectionClock(ticks), Reader()
    clock.start_for(reader)
    clock.end_step(torch.device("meta"))
    ticks.ns += 10**9

    assert clock.end_step(torch.device("meta")).seconds() == [1, 0, 0, 0, 0]
    assert not has_timed_events(torch.device("meta"))
    assert not has_timed_events(CPU)


@pytest.mark.cuda
def test_times_on_a_gpu():
    """On a GPU the times are those of the device, and no switch synchronizes."""
    device, reader = torch.device("cuda"), Reader()
    clock = SectionClock()
    clock.start_for(reader)
    clock.end_step(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with clock.within(Section.FORWARD_BACKWARD):
            torch.cuda._sleep(10**8)
        sections = clock.end_step(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    data, forward, *others = sections.seconds()

    assert forward > 0.01
    assert max(data, *others) < forward / 2
