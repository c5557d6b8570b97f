"""Measure whole training steps: MFTrainer beside the stock Trainer and Lightning.

    python benchmarks/trainer.py                       # a Llama of 8 million parameters
    python benchmarks/trainer.py --device cuda --width 1024 --layers 16 --batch-size 16

All train the same model on the same data with fused AdamW, accumulation, clipping and a cosine
schedule. Each round trains every contestant anew, in an order that changes. The time of a run is
the median of its steps, the first ones left out; printed are the median and the spread over rounds,
and the median of the rounds' own ratios.
"""

import argparse
import logging
import random
import statistics
import tempfile
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from trainer_contestants import CONTESTANTS, Setting


def build_model(width: int, layers: int, sequence_length: int) -> LlamaForCausalLM:
    """Return a Llama with a vocabulary of 4096."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            max_position_embeddings=sequence_length,
        )
    )


def argument_parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Return a parser of device, sizes and number of rounds.

    Args:
        description: Of the program; its first line is shown.
        steps: Updates of a run, where none are asked for.
    """
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0] if description else None
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    parser.add_argument("--layers", type=int, default=6, help="number of layers")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a micro-batch")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of an update")
    parser.add_argument("--steps", type=int, default=steps, help="updates of a run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contestant")
    return parser


def main() -> None:
    """Measure and print."""
    arguments = argument_parser(__doc__, steps=10).parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    length = arguments.sequence_length
    generator = torch.Generator().manual_seed(0)
    num_samples = arguments.batch_size * arguments.accumulation * arguments.steps
    tokens = torch.randint(0, 4096, (num_samples, length), generator=generator)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in CONTESTANTS}
    order = random.Random(0)  # noqa: S311  (an order, no secret)
    contestants = list(CONTESTANTS)
    for _ in range(arguments.rounds):
        order.shuffle(contestants)
        for contestant in contestants:
            model = build_model(arguments.width, arguments.layers, length)
            with tempfile.TemporaryDirectory() as folder:
                setting = Setting(
                    model,
                    tokens,
                    folder,
                    arguments.device,
                    arguments.batch_size,
                    arguments.accumulation,
                    arguments.steps,
                )
                seconds[contestant.name].append(contestant.seconds_per_step(setting))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Llama of {num_parameters / 1e6:.1f} million float32 parameters on {arguments.device}, "
        f"{arguments.batch_size * arguments.accumulation * length} tokens in "
        f"{arguments.accumulation} micro-batches a step, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps\n\n"
        "| training step | ms, median (least to most) | of the stock Trainer |\n| --- | --- | --- |"
    )
    stock = seconds[CONTESTANTS[0].name]
    for contestant in CONTESTANTS:
        times = seconds[contestant.name]
        ratio = statistics.median(a / b for a, b in zip(times, stock, strict=True))
        print(
            f"| {contestant.name} | {statistics.median(times) * 1e3:.1f} "
            f"({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}) | {ratio:.3f} |"
        )


if __name__ == "__main__":
    main()
