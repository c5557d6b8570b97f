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
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from device.measuring import ratios, spread, steps_in_turns
from device.recording import Recording
from device.setup import Setup
from distributed import Step, batches_of_step, cell_step, free_port, plain_step, replicated, sharded

KINDS: dict[str, Callable[[argparse.Namespace], nn.Module]] = {
    "DDP": replicated,
    "FSDP2": sharded,
}
STEPS_COMPARED = 3


def measure(recording: Recording, setup: Setup) -> None:
    """Start the ranks of each case, and record what rank 0 has found."""
    cases = [(1, "nccl" if setup.on_cuda else "gloo"), (2, "gloo")]
    seconds = setup.size(25.0, 25.0) if setup.on_cuda else 300.0
    for num_ranks, backend in cases:
        with recording.part(f"{num_ranks} ranks, {backend}"), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                _run(setup, num_ranks, backend, folder, seconds)
            finally:
                _record(recording, folder, f"{num_ranks} x {backend}")


def _run(setup: Setup, num_ranks: int, backend: str, folder: Path, seconds: float) -> None:
    """Run the ranks; raise if one fails, or if they take too long."""
    arguments = argparse.Namespace(
        device=setup.kind,
        ranks=num_ranks,
        width=setup.size(512, 64),
        layers=setup.size(8, 1),
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
                msg = f"the ranks did not end within {seconds:.0f} s"
                raise TimeoutError(msg)
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
    torch.set_num_threads(1)
    if setup.on_cuda:
        torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        backend, rank=rank, world_size=arguments.ranks, timeout=timedelta(seconds=60)
    )
    batches = batches_of_step(arguments, rank)
    for kind, wrap in KINDS.items():
        try:
            found = _compared(setup, arguments, wrap, batches)
        except Exception as error:  # noqa: BLE001  (the other kind is still to be measured)
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        if rank == 0:
            Path(folder, f"{kind}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    os._exit(0)  # destroying a process group after an error may hang


def _compared(
    setup: Setup,
    arguments: argparse.Namespace,
    wrap: Callable[[argparse.Namespace], nn.Module],
    batches: list[Tensor],
) -> dict[str, Any]:
    plain_network, network = wrap(arguments), wrap(arguments)
    plain, ours = plain_step(plain_network), cell_step(network)
    for _ in range(STEPS_COMPARED):
        plain(batches)
        ours(batches)
    pairs = list(zip(plain_network.parameters(), network.parameters(), strict=True))
    gap = max((_local(a) - _local(b)).abs().max().item() for a, b in pairs)
    steps: dict[str, Step] = {"plain": plain, "mfwrap": ours}
    times = steps_in_turns(
        setup,
        {name: lambda step=step: step(batches) for name, step in steps.items()},  # type: ignore[misc]  # (mypy cannot infer the default's type)
        rounds=setup.size(5, 2),
        steps=setup.size(10, 2),
        warm_up=setup.size(4, 1),
    )
    whole = {name: times[name].whole for name in steps}
    return {"gap": gap, "whole": whole, "parameters": sum(a.numel() for a, _ in pairs)}


def _local(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _record(recording: Recording, folder: Path, ranks: str) -> None:
    for kind in KINDS:
        file = folder / f"{kind}.json"
        if not file.exists():
            recording.fail(f"{kind}, {ranks}", "its ranks ended before they measured it")
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        if "error" in found:
            recording.fail(f"{kind}, {ranks}", found["error"])
            continue
        plain, ours = found["whole"]["plain"], found["whole"]["mfwrap"]
        ratio = ratios(ours, plain)
        for name, times in (("", plain), (", mfwrap", ours)):
            recording.row(
                "whole steps of a Llama, 2 micro-batches",
                {
                    "training step": f"{kind}{name}",
                    "ranks": ranks,
                    "ms": spread([each * 1e3 for each in times]),
                    "of the plain one": ratios(times, plain),
                },
            )
        recording.check(
            f"{kind}, {ranks}: after {STEPS_COMPARED} updates the weights are those without mfwrap",
            # Fused AdamW moves a weight by at most the rate, 1e-4, in each of the first updates.
            holds=found["gap"] < 2e-5,
            found=f"largest difference {found['gap']:.2g}",
        )
        recording.summarize_more(f"{kind} {ranks}: {ratio['median']:.3f}")
