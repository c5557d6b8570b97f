"""Measure what checkpoints cost a training: written at once, and in the background.

    python benchmarks/background.py                    # states of 0.5 and 2 GB
    python benchmarks/background.py --gigabytes 8 --folder /scratch

An `MFTrainer` trains a network of linear layers for 60 steps with Adam, whose state takes twice the
memory of the weights. It saves after steps 10, 20, 30, 40 and 50. The cost of the saves is the time
of these 60 steps less that of 60 steps without saves, so it includes steps that a thread slows
down. The stall alone is the time between the end of a step with a save and the begin of the next
one, less that of the other steps. Torch computes with one thread, so another core is free, as
beside a GPU. Each round measures each way once, in random order.
"""

import argparse
import contextlib
import io
import random
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from mfwrap.trainer import MFTrainer

WIDTH = 2048
BYTES_A_WEIGHT = 12
"""The weight and Adam's two moments, in float32."""

NUM_STEPS, ROWS = 60, 16
SAVES = (10, 20, 30, 40, 50)
NO_SAVES, AT_ONCE, BACKGROUND = "no saves", "at once", "in the background"


class Layers(nn.Module):
    """Linear layers whose weights and Adam state take a number of bytes.

    Args:
        num_bytes: Bytes of the state.
        width: Size of the square layers.
        repeats: How often each row is computed in a step.
    """

    def __init__(self, num_bytes: int, width: int, repeats: int = 1) -> None:
        super().__init__()
        self._repeats = repeats
        number = max(1, round(num_bytes / (BYTES_A_WEIGHT * width**2)))
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(number)))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the mean square of the outputs as the loss."""
        return {"loss": self.layers(inputs.repeat(self._repeats, 1)).square().mean()}


class Clock(TrainerCallback):
    """Take the time of a training, and of the gaps between its steps; ask for the saves."""

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves
        self._ended = self._began = 0.0
        self._gaps: dict[int, float] = {}
        self.seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the gap since the last step."""
        del args, control
        self._gaps[state.global_step] = time.perf_counter() - self._ended

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for a save if one is due, and begin to measure a gap."""
        del args
        control.should_save = self._saves and state.global_step in SAVES
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._ended = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock; the last checkpoint is written by now."""
        self.seconds = time.perf_counter() - self._began

    @property
    def stall(self) -> float:
        """Seconds of the gaps with a save, beyond those of the other gaps."""
        gaps = {step: gap for step, gap in self._gaps.items() if step > 0}
        usual = statistics.median(gap for step, gap in gaps.items() if step not in SAVES)
        return sum(gaps[step] - usual for step in SAVES)


class Cost(NamedTuple):
    """Seconds of one training."""

    total: float
    stall: float


def train(way: str, num_bytes: int, folder: Path, *, device: str, width: int, repeats: int) -> Cost:
    """Train once in a way; return its seconds."""
    clock = Clock(saves=way != NO_SAVES)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = MFTrainer(
            Layers(num_bytes, width, repeats),
            TrainingArguments(
                str(folder),
                max_steps=NUM_STEPS,
                per_device_train_batch_size=ROWS,
                learning_rate=1e-6,
                logging_strategy="no",
                save_strategy="no",
                save_total_limit=1,
                report_to="none",
                disable_tqdm=True,
                use_cpu=device == "cpu",
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"inputs": torch.randn(width)} for _ in range(ROWS)],
            callbacks=[clock],
            async_save=way == BACKGROUND,
        )
        trainer.train()
    shutil.rmtree(folder, ignore_errors=True)
    return Cost(clock.seconds, clock.stall)


def costs(
    num_bytes: int, folder: Path, *, rounds: int, device: str, width: int, repeats: int
) -> dict[str, list[Cost]]:
    """Return the costs of the saves by way, one of each round."""
    found: dict[str, list[Cost]] = {AT_ONCE: [], BACKGROUND: []}
    for number in range(rounds):
        of_round = {
            way: train(
                way,
                num_bytes,
                folder / f"{number}{way}",
                device=device,
                width=width,
                repeats=repeats,
            )
            for way in random.sample([NO_SAVES, AT_ONCE, BACKGROUND], 3)
        }
        for way, measured in found.items():
            total = of_round[way].total - of_round[NO_SAVES].total
            measured.append(Cost(total, of_round[way].stall))
    return found


def shares(found: dict[str, list[Cost]]) -> Cost:
    """Return the medians in the background, each divided by the one at once."""
    total, stall = (
        statistics.median(each[place] for each in found[BACKGROUND])
        / statistics.median(each[place] for each in found[AT_ONCE])
        for place in range(2)
    )
    return Cost(total, stall)


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way")
    parser.add_argument("--width", type=int, default=WIDTH, help="size of the square layers")
    parser.add_argument("--repeats", type=int, default=4, help="how often a row is computed")
    parser.add_argument("--folder", help="where to write; by default that of temporary files")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"{arguments.rounds} rounds; seconds of five saves, median and range\n")
    print("| state | | total | stall alone |\n| --- | --- | --- | --- |")
    for size in arguments.gigabytes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            found = costs(
                int(size * 1e9),
                Path(name),
                rounds=arguments.rounds,
                device="cpu",
                width=arguments.width,
                repeats=arguments.repeats,
            )
        for way, measured in found.items():
            columns = (
                f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
                for each in zip(*measured, strict=True)
            )
            print(f"| {size:g} GB | {way} | {' | '.join(columns)} |")
        total, stall = shares(found)
        print(f"| | share | {total:.2f} | {stall:.2f} |")


if __name__ == "__main__":
    main()
