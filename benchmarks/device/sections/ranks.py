"""DistributedDataParallel and FSDP2: on one rank with NCCL, and two ranks of one GPU over gloo.

On a CPU all ranks use gloo. The networks and steps are those of benchmarks/distributed.py.
"""

import argparse
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from device.measuring import ratios, spread, steps_in_turns
from device.recording import Recording
from device.results import write_json
from device.setup import Setup
from distributed import Step, batches_of_step, cell_step, free_port, plain_step, replicated, sharded

KINDS: dict[str, Callable[[argparse.Namespace], nn.Module]] = {
    "DDP": replicated,
    "FSDP2": sharded,
}
STEPS_COMPARED = 3


class Sizes(NamedTuple):
    """Sizes of a network, and how often its steps are timed."""

    width: int
    layers: int
    rounds: int
    steps: int
    warm_up: int


USUAL = Sizes(512, 8, 5, 4, 2)
SMALL = Sizes(64, 1, 2, 2, 1)


def measure(recording: Recording, setup: Setup) -> None:
    """Start the ranks of each case, and record what rank 0 has found."""
    cases = [(1, "nccl" if setup.on_cuda else "gloo"), (2, "gloo")]
    seconds = 25.0 if setup.on_cuda else 300.0
    for num_ranks, backend in cases:
        with recording.part(f"{num_ranks} ranks, {backend}"), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # gloo copies each message of a GPU to the host, so these steps are few and small.
            of_gloo = Sizes(256, 4, 3, 3, 1)
            usual = of_gloo if setup.on_cuda and backend == "gloo" else USUAL
            sizes: Sizes = setup.size(usual, SMALL)
            try:
                _run(setup, num_ranks, backend, folder, seconds, sizes)
            finally:
                _record(recording, folder, f"{num_ranks} x {backend}", sizes)


def _run(
    setup: Setup, num_ranks: int, backend: str, folder: Path, seconds: float, sizes: Sizes
) -> None:
    """Run the ranks for a while; raise if one fails."""
    arguments = argparse.Namespace(
        device=setup.kind,
        ranks=num_ranks,
        **sizes._asdict(),
        batch_size=setup.size(4, 2),
        sequence_length=setup.size(256, 16),
        accumulation=2,
    )
    given = (setup, arguments, backend, free_port(), str(folder))
    context = spawn(train_rank, given, nprocs=num_ranks, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):  # raises the first error of a rank
            if time.monotonic() > deadline:
                return  # the files of the kinds say how far they have come
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def train_rank(
    rank: int,
    setup: Setup,
    arguments: argparse.Namespace,
    backend: str,
    port: int,
    folder: str,
) -> None:
    """Compare steps with and without mfwrap on one rank; rank 0 writes a file for each kind."""
    warnings.filterwarnings("ignore")
    # A machine without network may not know its own name, which gloo would ask for.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(arguments.ranks), "LOCAL_RANK": "0"}
    # cuBLAS reads this when it is first used; deterministic algorithms ask for it.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_num_threads(1)
    if setup.on_cuda:
        torch.cuda.set_device(0)
    files = {kind: Path(folder, f"{kind}.json") for kind in KINDS}

    def say(found: dict[str, Any], *kinds: str) -> None:
        if rank == 0:
            for kind in kinds:
                write_json(files[kind], found)

    say({"absent": f"{backend} did not start in time"}, *KINDS)
    try:
        torch.distributed.init_process_group(
            backend, rank=rank, world_size=arguments.ranks, timeout=timedelta(seconds=60)
        )
    except Exception as error:  # noqa: BLE001  (the backend's refusal is no failure of mfwrap)
        traceback.print_exc()
        say({"absent": f"{backend}: {type(error).__name__}: {error}"}, *KINDS)
        os._exit(0)
    say({"absent": "not reached in time"}, *KINDS)
    batches = batches_of_step(arguments, rank)
    for kind, wrap in KINDS.items():
        stage = "absent"  # while torch trains alone
        say({stage: f"plain steps over {backend} did not end in time"}, kind)
        try:
            plain = _plain(setup, arguments, wrap, batches)
            stage = "error"
            say(
                {stage: "the steps of mfwrap did not end in time, or their process has ended"}, kind
            )
            gap, ours = _compared(setup, arguments, wrap, batches, plain)
            say({"gap": gap}, kind)
            times = _timed(setup, arguments, batches, {"plain": plain.step, "mfwrap": ours})
            say({"gap": gap, "whole": times}, kind)
        except Exception as error:  # noqa: BLE001  (the other kind is still to be measured)
            traceback.print_exc()
            say({stage: f"{type(error).__name__}: {error}"}, kind)
    torch.distributed.barrier()
    os._exit(0)  # destroying a process group after an error may hang


class Plain(NamedTuple):
    """A network that was trained without mfwrap, its step, and how its weights have changed."""

    network: nn.Module
    step: Step
    change: list[Tensor]


def _plain(
    setup: Setup,
    arguments: argparse.Namespace,
    wrap: Callable[[argparse.Namespace], nn.Module],
    batches: list[Tensor],
) -> Plain:
    network = wrap(arguments)
    step = plain_step(network)
    return Plain(network, step, _change(setup, network, step, batches))


def _change(setup: Setup, network: nn.Module, step: Step, batches: list[Tensor]) -> list[Tensor]:
    """Do the steps that are compared; return by how much each local weight has changed."""
    before = [_local(parameter).clone() for parameter in network.parameters()]
    # AdamW makes a whole step of a gradient of rounding errors, which vary without this.
    torch.use_deterministic_algorithms(setup.on_cuda)
    try:
        for _ in range(STEPS_COMPARED):
            step(batches)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    pairs = zip(network.parameters(), before, strict=True)
    return [_local(parameter) - old for parameter, old in pairs]


def _compared(
    setup: Setup,
    arguments: argparse.Namespace,
    wrap: Callable[[argparse.Namespace], nn.Module],
    batches: list[Tensor],
    plain: Plain,
) -> tuple[float, Step]:
    """Return how far mfwrap's change is from the plain one, as a share of it, and its step."""
    network = wrap(arguments)
    ours = cell_step(network)
    change = _change(setup, network, ours, batches)
    gap = _norm([a - b for a, b in zip(change, plain.change, strict=True)]) / _norm(plain.change)
    return gap, ours


def _timed(
    setup: Setup, arguments: argparse.Namespace, batches: list[Tensor], steps: dict[str, Step]
) -> dict[str, list[float]]:
    times = steps_in_turns(
        setup,
        {name: lambda step=step: step(batches) for name, step in steps.items()},  # type: ignore[misc]  # (mypy cannot infer the default's type)
        rounds=arguments.rounds,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        turn_seconds=float("inf"),
    )
    return {name: times[name].whole for name in steps}


def _norm(tensors: list[Tensor]) -> float:
    norm: float = torch.cat([tensor.flatten().double() for tensor in tensors]).norm().item()
    return norm


def _local(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _record(recording: Recording, folder: Path, ranks: str, sizes: Sizes) -> None:
    for kind in KINDS:
        file = folder / f"{kind}.json"
        if not file.exists():
            recording.fail(f"{kind}, {ranks}", "its ranks ended before they measured it")
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        if "absent" in found:
            recording.leave_out(f"{kind}, {ranks}", found["absent"])
            continue
        if "error" in found:
            recording.fail(f"{kind}, {ranks}", found["error"])
            continue
        recording.check(
            f"{kind}, {ranks}: {STEPS_COMPARED} updates change the weights as without mfwrap",
            holds=found["gap"] < 1e-3,
            found=f"the norm of the difference is {found['gap']:.2g} of that of the change",
        )
        if "whole" not in found:
            recording.leave_out(f"times of {kind}, {ranks}", "the steps did not end in time")
            continue
        plain, ours = found["whole"]["plain"], found["whole"]["mfwrap"]
        ratio = ratios(ours, plain)
        for name, times in (("", plain), (", mfwrap", ours)):
            recording.row(
                "whole steps of a Llama, 2 micro-batches",
                {
                    "training step": f"{kind}{name}",
                    "ranks": ranks,
                    "width, layers": f"{sizes.width}, {sizes.layers}",
                    "ms": spread([each * 1e3 for each in times]),
                    "of the plain one": ratios(times, plain),
                },
            )
        recording.summarize_more(f"{kind} {ranks}: {ratio['median']:.3f}")
