"""Everything after backward, at 125 million and 1.2 billion parameters.

All contestants get the same scaled gradients and take turns. Device times are taken while the host
is ahead; the section `host` has the times of the host. The bytes are those that the operators read
and write, each once. Divided by the measured speed of a copy they give the shortest time that these
operators can take.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contestants import (
    Contestant,
    Mfwrap,
    MfwrapHalfAverage,
    Model,
    TorchFusedForeachNorms,
    TorchFusedWithoutNorms,
    TorchHalf,
    TorchHalfFloatAverage,
)
from counting import count_traffic
from device.measuring import (
    copied_bytes_per_second,
    milliseconds,
    peak_of,
    ratios,
    spread,
    take_turns,
    work_of,
)
from device.recording import Recording
from device.setup import Setup
from epilogue import gpt2_shapes
from mfwrap import ExponentialMovingAverage

SCALED = 1e-3 * 2.0**16
"""Size of the scaled gradients."""

Kinds = Sequence[type[Contestant]]
IN_FLOAT32: Kinds = (Mfwrap, TorchFusedForeachNorms, TorchFusedWithoutNorms)
IN_HALF: Kinds = (Mfwrap, TorchHalfFloatAverage, MfwrapHalfAverage, TorchHalf)
LARGE: Kinds = (Mfwrap, TorchFusedForeachNorms)
"""Two at a time is what a GPU of 80 GB holds in float32."""


def measure(recording: Recording, setup: Setup) -> None:
    """Compare the ways at each size, and count the kernels of an average."""
    large = setup.size((1600, 37), (48, 1))
    cases: list[tuple[tuple[int, int], torch.dtype, Kinds]] = [
        (setup.size((768, 12), (32, 1)), torch.float32, IN_FLOAT32),
        (large, torch.float32, LARGE),
        (setup.size((768, 12), (32, 1)), torch.bfloat16, IN_HALF),
        (large, torch.bfloat16, IN_HALF),
    ]
    with recording.part("speed of a copy"):
        speed = copied_bytes_per_second(setup, setup.size(2**32, 2**22))
        recording.row("speed of a copy", {"GB/s, read and written": speed / 1e9})
        for shape, dtype, kinds in cases:
            setup.release()
            with recording.part(f"GPT-2 of {shape} in {dtype}"):
                _compare(recording, setup, shape, dtype, kinds, speed)
    with recording.part("kernels of an average"):
        _average(recording, setup)


def _compare(
    recording: Recording,
    setup: Setup,
    shape: tuple[int, int],
    dtype: torch.dtype,
    kinds: Kinds,
    speed: float,
) -> None:
    torch.manual_seed(0)
    shapes = gpt2_shapes(*shape)
    with setup.device:
        gradients = [(torch.randn(each) * SCALED).to(dtype) for each in shapes]
        weights = [(torch.randn(each) * 0.02).to(dtype) for each in shapes]
    contestants = {kind.name: kind(Model(weights)) for kind in kinds}
    del weights
    number = sum(gradient.numel() for gradient in gradients)
    times = take_turns(
        setup,
        {name: each.step for name, each in contestants.items()},
        rounds=setup.size(20, 2),
        before=lambda name: contestants[name].load_gradients(gradients),
    )
    ours = times[Mfwrap.name]
    torchs: list[str] = []
    for name, each in contestants.items():
        costs = _costs(setup, each, gradients)
        shortest = costs["bytes a parameter"] * number / speed
        against = ratios(ours, times[name])
        recording.row(
            f"{number / 1e6:.0f} million parameters of a GPT-2 of {shape[1]} layers with width "
            f"{shape[0]}, {len(gradients)} tensors, {str(dtype).removeprefix('torch.')}",
            {
                "everything after backward": name,
                "device ms": milliseconds(times[name]),
                "mfwrap takes, of it": against,
                "of the speed of a copy": spread([shortest / t for t in times[name]]),
                **costs,
            },
        )
        if not isinstance(each, Mfwrap):
            torchs.append(f"{against['median']:.2f}")
    summary = f"{number / 1e6:.0f}M {str(dtype).removeprefix('torch.')}: {'/'.join(torchs)}"
    recording.summarize_more(summary, before="mfwrap of torch: ")


def _costs(setup: Setup, each: Contestant, gradients: list[Tensor]) -> dict[str, Any]:
    number = sum(gradient.numel() for gradient in gradients)
    each.load_gradients(gradients)
    traffic = count_traffic(each.step, larger_than=number // 10**5)
    each.load_gradients(gradients)
    work = work_of(setup, each.step)
    each.load_gradients(gradients)
    peak = peak_of(setup, each.step)
    state = each.state_bytes()
    return {
        "bytes a parameter": round(traffic / number, 1),
        "kernels": work.num_kernels,
        "launches": work.launches,
        "operators": work.operators,
        "most frequent kernel": work.most_frequent,
        "peak over state, %": None if peak is None else 100 * peak / state,
    }


def _average(recording: Recording, setup: Setup) -> None:
    """Compare mfwrap's average, whose share is a tensor on the device, with torch's, a number."""
    number, size = setup.size((292, 16_384), (4, 64))
    with setup.device:
        network = nn.ParameterList(torch.randn(size) for _ in range(number))
    weights = [weight.detach() for weight in network]
    averages = [weight.clone() for weight in weights]
    share = torch.full((), 1e-3, device=setup.device)
    ours = ExponentialMovingAverage(network, 0.999)
    calls = {
        "mfwrap's average": ours.update,
        "_foreach_lerp_ with a number": lambda: torch._foreach_lerp_(averages, weights, 1e-3),
        "_foreach_lerp_ with a list of one tensor": lambda: torch._foreach_lerp_(
            averages, weights, [share] * number
        ),
        "_foreach_sub, _foreach_mul_, _foreach_add_": lambda: _follow(averages, weights, share),
    }
    with torch.no_grad():
        times = take_turns(setup, calls, rounds=setup.size(20, 2))
        work = {name: work_of(setup, call) for name, call in calls.items()}
    for name in calls:
        recording.row(
            f"an average of {number} weights of {size} numbers",
            {
                "average": name,
                "device ms": milliseconds(times[name]),
                "kernels": work[name].num_kernels,
                "operators": work[name].operators,
            },
        )


def _follow(averages: list[Tensor], weights: list[Tensor], share: Tensor) -> None:
    """Average with a share on the device, in three calls of many weights each."""
    steps = torch._foreach_sub(weights, averages)
    torch._foreach_mul_(steps, share)
    torch._foreach_add_(averages, steps)
