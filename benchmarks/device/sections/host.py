"""Host time and launches of steps that cost the host more than the device.

A step's own part is its time less that of a bare forward and backward. benchmarks/host.py times
what follows backward alone, on other networks; its table for the same number of tensors is here
too, with the tensors on the device.
"""

import statistics
import warnings

from device.measuring import milliseconds, spread, steps_in_turns, work_of
from device.networks import gpt2_of_292_tensors, masked_tokens
from device.recording import Recording
from device.setup import Setup
from device.ways import BARE, CAPTURED, WAYS, Step, forget_accelerators
from host import CONTESTANTS, count_calls
from host import measure as measure_updates
from mfwrap.step.captured import WARM_UP


def measure(recording: Recording, setup: Setup) -> None:
    """Time whole steps in turns, and then the updates of benchmarks/host.py."""
    warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
    steps: dict[str, Step] = {}
    with recording.part("whole steps"):
        steps = _whole_steps(recording, setup)
    with recording.part("updates"):
        _updates(recording, setup)
    # After the last time: a profile leaves CUPTI attached, which slows launches down.
    for name, step in steps.items():
        with recording.part(f"launches: {name}"):
            _launches(recording, setup, name, step)


def _whole_steps(recording: Recording, setup: Setup) -> dict[str, Step]:
    """Time the steps in turns, and return those that could be timed."""
    forget_accelerators()
    steps: dict[str, Step] = {}
    batch = masked_tokens(setup, 2, setup.size(32, 8), 256)
    for name, (way, _) in WAYS.items():
        with recording.part(name):
            step = way(setup, gpt2_of_292_tensors(setup), batch)
            for _ in range(WARM_UP + 2):  # with the capture and a replay
                step()
            setup.synchronize()
            steps[name] = step
    times = steps_in_turns(
        setup, steps, rounds=setup.size(5, 2), steps=setup.size(15, 2), warm_up=setup.size(2, 1)
    )
    for name in steps:
        other = WAYS[name][1]
        if other not in steps or BARE not in steps:
            continue  # what it is compared with has failed
        whole, host = times[name]
        pairs = zip(whole, times[other].whole, times[BARE].whole, strict=True)
        own = [
            (ours - bare, theirs - bare) for ours, theirs, bare in pairs if name != BARE != other
        ]
        recording.row(
            "whole steps of a GPT-2, host-bound",
            {
                "whole step": name,
                "ms": milliseconds(whole),
                "queued by the host after, ms": milliseconds(host),
                "of the one without mfwrap": spread(
                    [a / b for a, b in zip(whole, times[other].whole, strict=True)]
                ),
                "ms less a bare forward and backward": milliseconds([a for a, _ in own])
                if own
                else None,
                # One ratio of medians: in a round, the difference of two times may be near zero.
                "of the one without mfwrap, less both": statistics.median(a for a, _ in own)
                / statistics.median(b for _, b in own)
                if own
                else None,
            },
        )
        if name == CAPTURED or name.startswith("mfwrap, cell: the same"):
            ratio = statistics.median(a / b for a, b in zip(whole, times[other].whole, strict=True))
            recording.summarize_more(f"{name.split(':')[0]} {ratio:.2f} of torch's step")
    return steps


def _launches(recording: Recording, setup: Setup, name: str, step: Step) -> None:
    def call() -> None:
        step()

    calls = count_calls(call)
    work = work_of(setup, step, calls=2)
    recording.row(
        "work of these steps",
        {
            "whole step": name,
            "kernels": work.num_kernels,
            "launches": work.launches,
            "Python calls": calls,
        },
    )


def _updates(recording: Recording, setup: Setup) -> None:
    forget_accelerators()
    number = setup.size(292, 4)
    contestants = [kind(number, 32, setup.kind) for kind in CONTESTANTS]
    seconds = measure_updates(contestants, setup.size(50, 3))
    for contestant in contestants:
        times = seconds[contestant.name]
        others = seconds[contestant.compared_with]
        recording.row(
            f"updates of {number} small tensors (benchmarks/host.py)",
            {
                "everything after backward": contestant.name,
                "host ms": milliseconds(times),
                "of the one without mfwrap": spread(
                    [a / b for a, b in zip(times, others, strict=True)]
                ),
            },
        )
