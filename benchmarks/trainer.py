"""Measure whole training steps: mfwrap compared with the stock Trainer, Lightning and loops.

    python benchmarks/trainer.py                       # a Llama of 31 million parameters

All contestants train the same model on the same data with fused AdamW, accumulation, clipping and a
cosine schedule, each in its own process. They take turns after each step, in random order, so that
a machine that slows down affects all of them. To take turns on a GPU they would have to wait for it
in each step, which hides what a step without waits gains. So `make device` measures there, in
device/sections/steps.py.

A round trains every contestant from the start, and leaves out the first two steps. A contestant's
time in a round is the median of its steps. Its ratio in a round is the median over steps of its
time divided by the stock Trainer's time for the same step. The table shows the median and the range
of times and ratios over rounds.

Peak memory is measured in one more run of two steps, which is not timed. It is the largest sum of
all tensors at any time of the run: weights, gradients, moments, averages, activations and data.
"""

import argparse
import random
import statistics
import tempfile
import warnings
from multiprocessing.connection import Connection

import torch
from torch.multiprocessing import get_context
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from counting import transient_peak
from trainer_contestants import CONTESTANTS, Setting
from turns import Turns

LEFT_OUT = 2
STEPS_FOR_MEMORY = 2
"""The second step is the first one with the optimizer's whole state."""


def build_model(
    width: int, layers: int, sequence_length: int, vocabulary: int = 4096
) -> LlamaForCausalLM:
    """Return a Llama of these sizes, with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            max_position_embeddings=sequence_length,
        )
    )


def argument_parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Return a parser of a command line with sizes and number of rounds.

    Args:
        description: Docstring of the program; the help shows its first line.
        steps: Default number of updates per run.
    """
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0] if description else None
    )
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=6, help="number of layers")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a micro-batch")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--steps", type=int, default=steps, help="updates of a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contestant")
    return parser


def build_setting(arguments: argparse.Namespace, steps: int, folder: str) -> Setting:
    """Return model and data for a number of updates."""
    generator = torch.Generator().manual_seed(0)
    num_samples = arguments.batch_size * arguments.accumulation * steps
    length, vocabulary = arguments.sequence_length, arguments.vocabulary
    return Setting(
        build_model(arguments.width, arguments.layers, length, vocabulary),
        torch.randint(0, vocabulary, (num_samples, length), generator=generator),
        folder,
        "cpu",
        arguments.batch_size,
        arguments.accumulation,
        steps,
    )


def train(index: int, turn: Connection, arguments: argparse.Namespace) -> None:
    """Train one contestant in its own process.

    Args:
        index: Index of the contestant in `CONTESTANTS`.
        turn: Connection to `Turns`; a turn is a step.
        arguments: Sizes.
    """
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()

    def step_done() -> None:
        turn.send("done")
        turn.recv()

    with tempfile.TemporaryDirectory() as folder:
        setting = build_setting(arguments, arguments.steps, folder)
        turn.send("ready")
        turn.recv()
        CONTESTANTS[index].train(setting, step_done)


def train_for_memory(index: int, end: Connection, arguments: argparse.Namespace) -> None:
    """Train one contestant in its own process, and send the bytes of its peak memory.

    Args:
        index: Index of the contestant in `CONTESTANTS`.
        end: Connection to the main process.
        arguments: Sizes.
    """
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:

        def build_and_train() -> None:
            setting = build_setting(arguments, STEPS_FOR_MEMORY, folder)
            CONTESTANTS[index].train(setting, lambda: None)

        end.send(transient_peak(build_and_train, torch.device("cpu")))


def peak_memory(index: int, arguments: argparse.Namespace) -> int:
    """Return the peak memory of a short run of a contestant, in bytes."""
    context = get_context("forkserver")
    end, other_end = context.Pipe()
    process = context.Process(target=train_for_memory, args=(index, other_end, arguments))
    process.start()
    other_end.close()
    peak: int = end.recv()  # raises EOFError if the contestant fails
    process.join()
    return peak


def chosen(names: list[str]) -> list[int]:
    """Return the stock Trainer, and the contestants whose names contain one of these; all for none.

    Returns:
        Indices in `CONTESTANTS`.
    """
    return [
        index
        for index, contestant in enumerate(CONTESTANTS)
        if not index or not names or any(name in contestant.name for name in names)
    ]


def seconds_of_steps(
    contestants: list[int], arguments: argparse.Namespace, order: random.Random
) -> dict[int, list[float]]:
    """Train contestants once, and return the times of their steps, without the first steps."""
    turns = Turns(train, contestants, arguments)
    times: dict[int, list[float]] = {index: [] for index in contestants}
    indices = list(contestants)
    for _ in range(arguments.steps):
        order.shuffle(indices)
        for index in indices:
            seconds, _ = turns.take(index)
            times[index].append(seconds)
    turns.end()
    return {index: each[LEFT_OUT:] for index, each in times.items()}


def median_and_spread(values: list[float], form: str) -> str:
    """Format the median, the minimum and the maximum of some numbers."""
    numbers = (statistics.median(values), min(values), max(values))
    median, least, most = (format(number, form) for number in numbers)
    return f"{median} ({least} to {most})"


def main() -> None:
    """Measure all contestants, and print the table."""
    parser = argument_parser(__doc__, steps=20)
    # Use few tokens for the number of parameters, as in fine-tuning. With many tokens, forward and
    # backward take nearly all of the time, and the contestants cannot be told apart.
    parser.set_defaults(width=512, layers=8, batch_size=1)
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the vocabulary")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of contestants")
    arguments = parser.parse_args()
    contestants = chosen(arguments.only)
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    milliseconds: dict[int, list[float]] = {index: [] for index in contestants}
    ratios: dict[int, list[float]] = {index: [] for index in contestants}
    for _ in range(arguments.rounds):
        times = seconds_of_steps(contestants, arguments, order)
        for index, each in times.items():
            milliseconds[index].append(statistics.median(each) * 1e3)
            of_stock = [a / b for a, b in zip(each, times[0], strict=True)]
            ratios[index].append(statistics.median(of_stock))
    length = arguments.sequence_length
    model = build_model(arguments.width, arguments.layers, length, arguments.vocabulary)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Llama of {num_parameters / 1e6:.1f} million float32 parameters on cpu, "
        f"{arguments.batch_size * arguments.accumulation * length} tokens in "
        f"{arguments.accumulation} micro-batches a step, {arguments.threads} threads, torch "
        f"{torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps\n\n"
        "| training step | ms, median (least to most) | of the stock Trainer | peak memory, MB |\n"
        "| --- | --- | --- | --- |"
    )
    for index in contestants:
        time_of_step = median_and_spread(milliseconds[index], ".1f")
        ratio = median_and_spread(ratios[index], ".3f")
        peak = peak_memory(index, arguments) / 1e6
        print(f"| {CONTESTANTS[index].name} | {time_of_step} | {ratio} | {peak:.1f} |")


if __name__ == "__main__":
    main()
