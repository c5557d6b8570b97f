"""Measure training steps on several ranks: DDP and FSDP2, each with and without mfwrap.

    python benchmarks/distributed.py                                       # 2 processes, gloo
    python benchmarks/distributed.py --device cuda --ranks 8 --width 1024 --layers 16

A step without mfwrap is a plain loop with `clip_grad_norm_` and fused AdamW. A step with mfwrap
does the same, and adds each rank's own norms by parameter before the reduction, overflow checks
that all ranks agree on, and a dynamic loss scale.

Each round trains every contestant from the start. The two contestants of a kind, with and without
mfwrap, take turns after each step. The time of a run is the median of its steps without the first
two. The table shows the median and the range of these times over rounds, and the median over rounds
of the ratio to the plain loop of the same round. Messages are the collectives that one step
requests from the backend.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell

LEFT_OUT = 2
Step = Callable[[list[Tensor]], object]


def build_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """Return the same Llama on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 32,
        max_position_embeddings=arguments.sequence_length,
    )
    model = LlamaForCausalLM(config)
    model.to(arguments.device)
    return model


def replicated(arguments: argparse.Namespace) -> nn.Module:
    """Return the model in DistributedDataParallel."""
    return DistributedDataParallel(build_model(arguments), gradient_as_bucket_view=True)


def sharded(arguments: argparse.Namespace) -> nn.Module:
    """Return the model under fully_shard, one unit per layer."""
    mesh = init_device_mesh(arguments.device, (arguments.ranks,))
    model = build_model(arguments)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def plain_step(network: nn.Module) -> Step:
    """Return a training step without mfwrap, written by hand."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def reduces(*, last: bool) -> None:
        if isinstance(network, DistributedDataParallel):
            network.require_backward_grad_sync = last
        else:
            network.set_requires_gradient_sync(last)  # type: ignore[operator]  # (a method that fully_shard adds)

    def step(batches: list[Tensor]) -> None:
        for index, batch in enumerate(batches):
            reduces(last=index == len(batches) - 1)
            loss = network(input_ids=batch, labels=batch).loss
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def cell_step(network: nn.Module) -> Step:
    """Return a step of mfwrap's cell."""
    cell = MFTrainOneStepCell(
        network,
        torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True),
        use_clip_grad=True,
        max_grad_norm=1.0,
        scale_sense=DynamicLossScaleUpdateCell(1.0, 2, 1000),
        local_norm=True,
    )
    return lambda batches: cell.step([{"input_ids": b, "labels": b} for b in batches])


CONTESTANTS: dict[str, tuple[Callable[[argparse.Namespace], nn.Module], Callable[..., Step]]] = {
    "DDP": (replicated, plain_step),
    "DDP, mfwrap": (replicated, cell_step),
    "FSDP2": (sharded, plain_step),
    "FSDP2, mfwrap": (sharded, cell_step),
}


PAIRS = (("DDP", "DDP, mfwrap"), ("FSDP2", "FSDP2, mfwrap"))
"""Kinds of steps that are compared with each other."""


def batches_of_step(arguments: argparse.Namespace, rank: int) -> list[Tensor]:
    """Return this rank's micro-batches."""
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.batch_size, arguments.sequence_length)
    return [
        torch.randint(0, 4096, shape, generator=generator).to(arguments.device)
        for _ in range(arguments.accumulation)
    ]


def seconds_per_step(
    steps: dict[str, Step], batches: list[Tensor], arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the median time of each kind of step; all ranks start a step together.

    The kinds take turns after each step, so that a machine that slows down affects all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.steps):
        for name in sorted(steps, reverse=number % 2 == 1):
            torch.distributed.barrier()
            start = time.perf_counter()
            steps[name](batches)
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[LEFT_OUT:]) for name, each in times.items()}


def messages_of(step: Step, batches: list[Tensor]) -> int:
    """Return how many collectives a step requests from the backend."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batches)
    return sum(event.name.startswith("c10d::") for event in profiler.events())


def train_rank(rank: int, arguments: argparse.Namespace, port: int, results: str) -> None:
    """Train all contestants on one rank; rank 0 writes the measurements."""
    warnings.filterwarnings("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.ranks))
    if arguments.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=arguments.ranks)
    batches = batches_of_step(arguments, rank)
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    messages: dict[str, int] = {}
    for _ in range(arguments.rounds):
        for names in PAIRS:
            steps = {}
            for name in names:
                wrap, make_step = CONTESTANTS[name]
                steps[name] = make_step(wrap(arguments))
            for name, value in seconds_per_step(steps, batches, arguments).items():
                seconds[name].append(value)
                messages[name] = messages_of(steps[name], batches)
    if rank == 0:
        torch.save((seconds, messages), results)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line: device, sizes and number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2, help="number of processes")
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=6, help="number of layers")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a micro-batch")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of an update")
    parser.add_argument("--steps", type=int, default=8, help="updates of a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contestant")
    return parser.parse_args()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def main() -> None:
    """Measure all contestants, and print the table."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        results = str(Path(folder, "results.pt"))
        spawn(train_rank, (arguments, free_port(), results), nprocs=arguments.ranks)
        seconds, messages = torch.load(results, weights_only=True)
    num_parameters = sum(parameter.numel() for parameter in build_model(arguments).parameters())
    tokens = arguments.batch_size * arguments.accumulation * arguments.sequence_length
    print(
        f"Llama of {num_parameters / 1e6:.1f} million float32 parameters on {arguments.ranks} x "
        f"{arguments.device}, {tokens} tokens a rank in {arguments.accumulation} micro-batches, "
        f"torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps\n\n"
        "| training step | ms, median (least to most) | of the plain one | messages |\n"
        "| --- | --- | --- | --- |"
    )
    for name, times in seconds.items():
        plain = seconds[name.split(",")[0]]
        ratio = statistics.median(a / b for a, b in zip(times, plain, strict=True))
        print(
            f"| {name} | {statistics.median(times) * 1e3:.1f} ({min(times) * 1e3:.1f} to "
            f"{max(times) * 1e3:.1f}) | {ratio:.3f} | {messages[name]} |"
        )


if __name__ == "__main__":
    main()
