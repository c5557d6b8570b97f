"""Measure everything after backward: mfwrap compared with plain torch and other averages.

    python benchmarks/epilogue.py                 # GPT-2's shapes, 30 million parameters
    python benchmarks/epilogue.py --device cuda   # GPT-2 medium's shapes, 355 million parameters

All contestants get the same parameters and the same scaled gradients. They take turns, in an order
that changes from round to round. Each contestant unscales, clips by the global norm, skips on
overflow, runs AdamW, averages the weights and computes the norm of every gradient. Contestants that
average at every fourth update take four steps in a turn; their times and bytes are the means of the
four, so that each round has the same share of averaging.

Each repeat builds all contestants anew. The table shows the median and the quartiles of the times
over all rounds. The ratio of a repeat is the median over its rounds of mfwrap's time divided by the
contestant's time; the table shows the median and the range of the ratios over repeats.
"""

import argparse
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

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
            elapsed = 0.0
            for _ in range(contestant.cycle):
                contestant.load_gradients(gradients)
                synchronize(device)
                started = time.perf_counter()
                contestant.step()
                synchronize(device)
                elapsed += time.perf_counter() - started
            if round_index >= 0:
                seconds[contestant.name].append(elapsed / contestant.cycle)
    return seconds


def mean_over_cycle(
    contestant: Contestant, gradients: list[Tensor], count: Callable[[Callable[[], None]], int]
) -> float:
    """Return the mean of what `count` returns for each step of a cycle."""
    total = 0
    for _ in range(contestant.cycle):
        contestant.load_gradients(gradients)
        total += count(contestant.step)
    return total / contestant.cycle


def report(
    contestants: list[Contestant],
    gradients: list[Tensor],
    repeats: list[dict[str, list[float]]],
    num_parameters: int,
) -> None:
    """Print the table, with one row per contestant."""
    print(
        "| everything after backward | ms, median (quartiles) | mfwrap takes, median (range) "
        "| bytes per parameter | host reads | peak memory over state |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for contestant in contestants:
        name, ours = contestant.name, contestant.compared_with
        times = [each for seconds in repeats for each in seconds[name]]
        low, median, high = statistics.quantiles(times, n=4)
        ratios = [
            statistics.median(a / b for a, b in zip(seconds[ours], seconds[name], strict=True))
            for seconds in repeats
        ]
        ratio, least, most = statistics.median(ratios), min(ratios), max(ratios)
        reads = mean_over_cycle(contestant, gradients, count_host_reads)
        count_bytes = partial(count_traffic, larger_than=num_parameters // 10**5)
        traffic = mean_over_cycle(contestant, gradients, count_bytes)
        peak = 0
        for _ in range(contestant.cycle):
            contestant.load_gradients(gradients)
            peak = max(peak, transient_peak(contestant.step, gradients[0].device))
        print(
            f"| {name} | {median * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f}) "
            f"| {ratio:.2f} ({least:.2f} to {most:.2f}) of it | {traffic / num_parameters:.0f} "
            f"| {reads:.0f} | {peak / contestant.state_bytes():+.1%} |"
        )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line: device, size and number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--width", type=int, help="hidden size (default: 384, on cuda 1024)")
    parser.add_argument("--layers", type=int, help="layers (default: 6, on cuda 24)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of a repeat (default: 6)")
    parser.add_argument("--repeats", type=int, default=11, help="repeats (default: 11)")
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
    print(
        f"{num_parameters / MILLION:.1f} million float32 parameters in {len(weights)} tensors on "
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{arguments.repeats} repeats of {arguments.rounds} rounds\n"
    )
    contestants: list[Contestant] = []
    repeats = []
    for _ in range(arguments.repeats):
        contestants.clear()
        gc.collect()  # free the contestants of the last repeat
        contestants += [kind(Model(weights)) for kind in CONTESTANTS]
        repeats.append(measure(list(contestants), gradients, arguments.rounds, device))
    report(contestants, gradients, repeats, num_parameters)


if __name__ == "__main__":
    main()
