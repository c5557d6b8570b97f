"""Measure everything after backward: mfwrap compared with plain torch and other averages.

    python benchmarks/epilogue.py                 # GPT-2's shapes, 30 million parameters
    python benchmarks/epilogue.py --device cuda   # GPT-2 medium's shapes, 355 million parameters

All contestants get the same parameters and the same scaled gradients. They take turns, in an order
that changes from round to round. Each contestant unscales, clips by the global norm, skips on
overflow, runs AdamW, averages the weights and computes the norm of every gradient. The table shows
the median and the quartiles of the times over rounds, and the median over rounds of the ratio of
mfwrap's time to the contestant's time.
"""

import argparse
import random
import statistics
import time
import warnings

import torch
from torch import Tensor

from contestants import CONTESTANTS, Contestant, Model
from counting import count_host_reads, count_traffic, transient_peak

MILLION = 1e6


def gpt2_shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2's parameters with tied embeddings."""
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width)]
        shapes += [(width,)]
    return [*shapes, (width,), (width,)]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    contestants: list[Contestant], gradients: list[Tensor], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of each contestant by round, after two warm-up rounds."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    for round_index in range(-2, rounds):
        order.shuffle(contestants)
        for contestant in contestants:
            contestant.load_gradients(gradients)
            synchronize(device)
            started = time.perf_counter()
            contestant.step()
            synchronize(device)
            if round_index >= 0:
                seconds[contestant.name].append(time.perf_counter() - started)
    return seconds


def report(
    contestants: list[Contestant],
    gradients: list[Tensor],
    seconds: dict[str, list[float]],
    num_parameters: int,
) -> None:
    """Print the table, with one row per contestant."""
    ours = seconds[contestants[0].name]
    print(
        "| everything after backward | ms, median (quartiles) | mfwrap takes | bytes per parameter "
        "| host reads | peak memory over state |\n| --- | --- | --- | --- | --- | --- |"
    )
    for contestant in contestants:
        times = seconds[contestant.name]
        low, median, high = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(ours, times, strict=True))
        contestant.load_gradients(gradients)
        reads = count_host_reads(contestant.step)
        contestant.load_gradients(gradients)
        traffic = count_traffic(contestant.step, larger_than=num_parameters // 10**5)
        contestant.load_gradients(gradients)
        excess = transient_peak(contestant.step, gradients[0].device) / contestant.state_bytes()
        print(
            f"| {contestant.name} | {median * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f}) "
            f"| {ratio:.2f} of it | {traffic / num_parameters:.0f} | {reads} | {excess:+.1%} |"
        )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line: device, size and number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--width", type=int, help="hidden size (default: 384, on cuda 1024)")
    parser.add_argument("--layers", type=int, help="layers (default: 6, on cuda 24)")
    parser.add_argument("--rounds", type=int, default=40, help="measured rounds (default: 40)")
    return parser.parse_args()


def main() -> None:
    """Measure all contestants, and print the table."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    on_cpu = device.type == "cpu"
    width = arguments.width or (384 if on_cpu else 1024)
    layers = arguments.layers or (6 if on_cpu else 24)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
    torch.manual_seed(0)
    weights = [torch.randn(shape, device=device) * 0.02 for shape in gpt2_shapes(width, layers)]
    gradients = [torch.randn_like(weight) * 1e-3 * 2.0**16 for weight in weights]
    num_parameters = sum(weight.numel() for weight in weights)
    contestants = [kind(Model(weights)) for kind in CONTESTANTS]
    print(
        f"{num_parameters / MILLION:.1f} million float32 parameters in {len(weights)} tensors on "
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{arguments.rounds} rounds\n"
    )
    seconds = measure(list(contestants), gradients, arguments.rounds, device)
    report(contestants, gradients, seconds, num_parameters)


if __name__ == "__main__":
    main()
