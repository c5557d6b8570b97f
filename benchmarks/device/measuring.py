"""Measure times, kernels and memory on a GPU, and the same on a CPU as far as it can be had.

Three times are told apart. The *device time* of a call runs between two events of the device, which
has other work first, so that the host is ahead. The *host time* is what the host takes to queue the
call. The *step time* is that of many calls with one wait at the end, divided by their number; it is
the longer one of the other two.
"""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from device.setup import Setup

Call = Callable[[], object]

LEAD_CYCLES = 20_000_000
"""Cycles, about 10 ms, that the device is busy with before a call whose device time is measured."""

LAUNCHES = ("LaunchKernel", "Memcpy", "Memset", "GraphLaunch")
"""Parts of the names of CUDA's functions that queue work."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles of some numbers, and their count."""
    if len(values) < 2:
        [value] = values
        low = median = high = value
    else:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "count": len(values)}


def ratios(ours: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of two contestants within the rounds."""
    return spread([a / b for a, b in zip(ours, others, strict=True)])


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Return the spread of some times in milliseconds."""
    return spread([each * 1e3 for each in seconds])


def take_turns(
    setup: Setup,
    contestants: Mapping[str, Call],
    *,
    rounds: int,
    before: Callable[[str], None] = lambda _: None,
    warm_up: int = 3,
) -> dict[str, list[float]]:
    """Return the device time of calls that take turns, in an order that changes by round.

    The device is kept busy before each call, so the host waits for it now and then. The time that
    the host takes for a call cannot be measured in this way.

    Args:
        setup: Device.
        contestants: What is timed, by name.
        rounds: Number of measured rounds.
        before: Called with the name before each timed call; not timed.
        warm_up: Rounds that do not count.

    Returns:
        Seconds by name and round; on a CPU those of the host.
    """
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    names = list(contestants)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        order.shuffle(names)
        for name in names:
            before(name)
            pair = _events() if setup.on_cuda else None
            if pair is not None:
                # Without a lead, gaps in which the host queues the next kernel would count.
                torch.cuda._sleep(LEAD_CYCLES)
                pair[0].record()
            start = time.perf_counter()
            contestants[name]()
            elapsed = time.perf_counter() - start
            if pair is not None:
                pair[1].record()
            if number >= 0 and pair is not None:
                events[name].append(pair)
            elif number >= 0:
                times[name].append(elapsed)
    setup.synchronize()
    for name, pairs in events.items():
        times[name].extend(start.elapsed_time(end) / 1e3 for start, end in pairs)
    return times


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class StepTimes(NamedTuple):
    """Seconds for each step of a contestant, by round."""

    whole: list[float]
    """With one wait at the end of the round's steps."""

    host: list[float]
    """Until the host has queued them."""


def steps_in_turns(
    setup: Setup,
    contestants: Mapping[str, Call],
    *,
    rounds: int,
    steps: int,
    warm_up: int = 4,
    turn_seconds: float = 0.4,
) -> dict[str, StepTimes]:
    """Time many steps of each contestant with one wait at the end; contestants take turns.

    All turns have the same number of steps: hosts differ by a factor of five.

    Args:
        setup: Device.
        contestants: One step each, by name.
        rounds: Number of turns of each contestant.
        steps: Most steps of a turn.
        warm_up: Steps of each contestant before the first turn.
        turn_seconds: Seconds of a turn from which on it has fewer steps, but at least three; on
            several ranks, which must do the same number, infinity.
    """
    slowest = 0.0
    for step in contestants.values():
        for _ in range(warm_up - 1):
            step()
        setup.synchronize()
        start = time.perf_counter()
        step()
        setup.synchronize()
        slowest = max(slowest, time.perf_counter() - start)
    steps = max(min(3, steps), int(min(steps, turn_seconds / slowest)))
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    names = list(contestants)
    times = {name: StepTimes([], []) for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            step = contestants[name]
            step()  # memory that another contestant has used last
            setup.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            queued = time.perf_counter() - start
            setup.synchronize()
            times[name].whole.append((time.perf_counter() - start) / steps)
            times[name].host.append(queued / steps)
    return times


class Work(NamedTuple):
    """What one call makes the device do."""

    kernels: dict[str, int] | None
    """Number of runs by kernel, copies included; None on a CPU."""

    launches: int | None
    """Calls of CUDA that queue work: fewer than kernels if a graph is replayed; None on a CPU."""

    seconds: float | None
    """Sum of the times of all kernels; None on a CPU."""

    operators: int
    """Calls of torch's operators, with those that operators call."""

    @property
    def num_kernels(self) -> int | None:
        """Number of kernels."""
        return None if self.kernels is None else sum(self.kernels.values())

    @property
    def most_frequent(self) -> str:
        """The kernel that runs most often, with its number of runs."""
        if not self.kernels:
            return ""
        name, count = Counter(self.kernels).most_common(1)[0]
        return f"{count} x {name.split('<')[0].removeprefix('void ')[:60]}"


def work_of(setup: Setup, call: Call, *, calls: int = 1, operators: bool = True) -> Work:
    """Count the work of `call` for the device, as a mean over some calls, rounded.

    Args:
        setup: Device.
        call: Function to profile; not its first call.
        calls: Number of calls.
        operators: Whether to count operators, too. It takes long for a call of many operators.
    """
    activities = [ProfilerActivity.CUDA] if setup.on_cuda else [ProfilerActivity.CPU]
    if operators and setup.on_cuda:
        activities.append(ProfilerActivity.CPU)
    setup.synchronize()
    with profile(activities=activities) as profiler:
        for _ in range(calls):
            call()
        setup.synchronize()
    kernels: Counter[str] = Counter()
    launches = num_operators = 0
    seconds = 0.0
    for event in profiler.events():
        if event.device_type.name == "CPU":
            launches += any(part in event.name for part in LAUNCHES)
            num_operators += event.name.startswith("aten::")
        elif not event.is_user_annotation:  # Optimizer.step marks a range on the device, too
            kernels[event.name] += 1
            seconds += event.time_range.elapsed_us() / 1e6
    if not setup.on_cuda:
        return Work(None, None, None, round(num_operators / calls))
    by_name = {name: round(count / calls) for name, count in kernels.items()}
    return Work(by_name, round(launches / calls), seconds / calls, round(num_operators / calls))


def copied_bytes_per_second(setup: Setup, num_bytes: int) -> float:
    """Return the bytes that are read and written in a second when memory is copied."""
    source = torch.ones(num_bytes // 4, device=setup.device)
    target = torch.empty_like(source)
    times = take_turns(setup, {"copy": lambda: target.copy_(source)}, rounds=9)
    return 2 * num_bytes / statistics.median(times["copy"])


def peak_of(setup: Setup, call: Call) -> int | None:
    """Return the peak of allocated memory during a call beyond what was allocated before it.

    Returns:
        Bytes; None on a CPU, whose allocations are not counted.
    """
    if not setup.on_cuda:
        call()
        return None
    setup.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    setup.synchronize()
    return torch.cuda.max_memory_allocated() - before
