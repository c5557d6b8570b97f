"""Measure what checkpoints cost a training: written at once, and in the background.

    python benchmarks/background.py                    # states of 0.5 and 2 GB
    python benchmarks/background.py --gigabytes 8 --folder /scratch

An `MFTrainer` trains a network of linear layers with Adam, whose state takes twice the memory of
the weights: without saves, with saves at once, and with saves in the background, each in its own
process. The processes take turns of 12 steps, in random order, so that a machine that slows down
affects all of them. A turn saves after its first step, and ends when the checkpoint is written. The
cost of a save is the time of the turn less that of the turn without a save, so it includes steps
that a thread slows down. The stall alone is the time between the step with the save and the next
one, less that between other steps. Torch computes with one thread, so another core is free, as
beside a GPU. The first turn of each process is left out.
"""

import argparse
import random
import statistics
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from mfwrap.trainer import MFTrainer
from trainer import median_and_spread
from turns import Turns

WIDTH = 2048
BYTES_A_WEIGHT = 12
"""The weight and Adam's two moments, in float32."""

STEPS, ROWS = 12, 16
"""Steps of a turn, and rows of a step."""

LEFT_OUT = 1
"""First turns that are not measured."""

LONGEST_WRITE = 600.0
"""Seconds."""

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


@final
class TurnsWithSaves(TrainerCallback):
    """Ask for a save in each turn, and end the turn when the checkpoint is written.

    Args:
        turn: Connection to `Turns`, which gets the stall of each turn in seconds.
        saves: Whether to save.
        folder: The run folder.
    """

    def __init__(self, turn: Connection, folder: Path, *, saves: bool) -> None:
        self._turn, self._folder, self._saves = turn, folder, saves
        self._ended = 0.0
        self._gaps: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time since the last step."""
        self._gaps.append(time.perf_counter() - self._ended)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for the save after the first step of a turn, or end the turn after the last one."""
        del args
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        step = state.global_step
        control.should_save = self._saves and step % STEPS == 1
        if step % STEPS == 0:
            if self._saves:
                wait_for(self._folder / f"checkpoint-{step - STEPS + 1}")
            gap_of_save, *others = self._gaps[1:]
            self._gaps = []
            self._turn.send(gap_of_save - statistics.median(others))
            self._turn.recv()
        self._ended = time.perf_counter()


def wait_for(checkpoint: Path) -> None:
    """Wait until a checkpoint is written, which then gets its name.

    Raises:
        TimeoutError: If it takes more than ten minutes.
    """
    start = time.perf_counter()
    while not checkpoint.exists():
        if time.perf_counter() - start > LONGEST_WRITE:
            message = f"{checkpoint} was not written in {LONGEST_WRITE} seconds"
            raise TimeoutError(message)
        time.sleep(0.01)


class Cost(NamedTuple):
    """Seconds that a save costs."""

    total: float
    stall: float


class Sizes(NamedTuple):
    """What is trained, and how often it is saved."""

    num_bytes: int
    num_saves: int
    folder: Path
    device: str
    width: int
    repeats: int


def train(way: str, turn: Connection, sizes: Sizes) -> None:
    """Train in a way in its own process.

    Args:
        way: `NO_SAVES`, `AT_ONCE` or `BACKGROUND`.
        turn: Connection to `Turns`.
        sizes: Of model and run.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(dir=sizes.folder) as folder:
        trainer = MFTrainer(
            Layers(sizes.num_bytes, sizes.width, sizes.repeats),
            TrainingArguments(
                folder,
                max_steps=STEPS * (LEFT_OUT + sizes.num_saves),
                per_device_train_batch_size=ROWS,
                learning_rate=1e-6,
                logging_strategy="no",
                save_strategy="no",
                save_total_limit=1,
                report_to="none",
                disable_tqdm=True,
                use_cpu=sizes.device == "cpu",
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"inputs": torch.randn(sizes.width)} for _ in range(ROWS)],
            callbacks=[TurnsWithSaves(turn, Path(folder), saves=way != NO_SAVES)],
            async_save=way == BACKGROUND,
        )
        trainer.remove_callback(PrinterCallback)
        turn.send("ready")
        turn.recv()
        trainer.train()


def costs(sizes: Sizes) -> dict[str, list[Cost]]:
    """Return the costs of the saves by way, one of each turn."""
    ways = [NO_SAVES, AT_ONCE, BACKGROUND]
    turns = Turns(train, ways, sizes)
    draw = random.Random(0)  # noqa: S311  (not cryptographic)
    found: dict[str, list[Cost]] = {AT_ONCE: [], BACKGROUND: []}
    for _ in range(LEFT_OUT + sizes.num_saves):
        draw.shuffle(ways)
        of_turn = {way: turns.take(way) for way in ways}
        without, _ = of_turn[NO_SAVES]
        for way, measured in found.items():
            seconds, stall = of_turn[way]
            measured.append(Cost(seconds - without, stall))
    turns.end()
    return {way: measured[LEFT_OUT:] for way, measured in found.items()}


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
    parser.add_argument("--saves", type=int, default=5, help="measured saves of each way")
    parser.add_argument("--width", type=int, default=WIDTH, help="size of the square layers")
    parser.add_argument("--repeats", type=int, default=4, help="how often a row is computed")
    parser.add_argument("--folder", help="where to write; by default that of temporary files")
    arguments = parser.parse_args()
    print(f"{arguments.saves} saves; seconds of a save, median (least to most)\n")
    print("| state | | total | stall alone |\n| --- | --- | --- | --- |")
    for size in arguments.gigabytes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            sizes = Sizes(
                num_bytes=int(size * 1e9),
                num_saves=arguments.saves,
                folder=Path(name),
                device="cpu",
                width=arguments.width,
                repeats=arguments.repeats,
            )
            found = costs(sizes)
        for way, measured in found.items():
            columns = (median_and_spread(list(each), ".2f") for each in zip(*measured, strict=True))
            print(f"| {size:g} GB | {way} | {' | '.join(columns)} |")
        total, stall = shares(found)
        print(f"| | share | {total:.2f} | {stall:.2f} |")


if __name__ == "__main__":
    main()
