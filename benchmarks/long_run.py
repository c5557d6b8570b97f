"""Measure what a long run costs with everything that watches over it, and whether memory grows.

    python benchmarks/long_run.py                             # a Llama of 31 million parameters
    python benchmarks/long_run.py --steps 100 --ways memory sources saves averages

An `MFTrainer` trains in each way in its own process: without additions, and with everything, which
is

- `MemoryMonitor`;
- the loss by source, of four sources;
- checkpoints in the background, one each quarter of the run;
- two power-function averages of each tenth update, with 20 snapshots.

`--ways` measures one of these alone, or what a long run turns on only when it is asked for: the
losses of rows in files, and a step in ten that is done twice. The processes take turns after each
block of steps, in random order, so that a machine that slows down affects all of them. Without
additions, fewer blocks are measured (`--share`), because all of them are alike. Saves and snapshots
begin in the middle of a block, and a block is longer than the writing. A way's ratio is the median
over blocks of its time divided by the time of the block without additions in the same turn; that of
all blocks is the quotient of the means.

Memory is the resident memory of the process after a quarter of the blocks, when it has saved once,
and at the end.
"""

import argparse
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from mfwrap import ExponentialMovingAverage
from mfwrap.callbacks import EMACallback, MemoryMonitor, RecomputeCheck
from mfwrap.memory import host_memory
from mfwrap.trainer import MFTrainer
from trainer import argument_parser, build_setting, median_and_spread
from turns import Turns

WITHOUT, EVERYTHING = "without additions", "everything"
SAVES, SNAPSHOTS, SOURCES = 4, 20, 4
LEFT_OUT = 1
"""First blocks that are not measured."""


def _averages(steps: int) -> dict[str, Any]:
    callback = EMACallback(
        snapshot_every=max(steps // SNAPSHOTS, 1), evaluate=False, export=False, load_best=False
    )
    return {
        "ema": lambda model: ExponentialMovingAverage(
            model, sigma_rel=(0.05, 0.10), update_every=10
        ),
        "callbacks": [callback],
    }


WAYS: Mapping[str, Callable[[int, Path], dict[str, Any]]] = {
    "memory": lambda _, folder: {"callbacks": [MemoryMonitor(folder=folder)]},
    "sources": lambda *_: {"loss_by": "source"},
    "saves": lambda *_: {"async_save": True},
    "averages": lambda steps, _: _averages(steps),
    "rows": lambda *_: {"row_losses": True},
    "twice": lambda _, folder: {"callbacks": [RecomputeCheck(10, folder=folder)]},
}
TOGETHER = ("memory", "sources", "saves", "averages")
"""What `EVERYTHING` is made of."""


def settings_of(way: str, steps: int, folder: Path) -> dict[str, Any]:
    """Return the arguments of `MFTrainer` for a way."""
    names = {WITHOUT: (), EVERYTHING: TOGETHER}.get(way, (way,))
    settings: dict[str, Any] = {"callbacks": []}
    for name in names:
        own = WAYS[name](steps, folder)
        settings["callbacks"] += own.pop("callbacks", [])
        settings |= own
    return settings


@final
class EndsTurns(TrainerCallback):
    """Wait for the next turn of this process after each block of steps.

    Args:
        turn: Connection to `Turns`.
        block: Steps of a block.
    """

    def __init__(self, turn: Connection, block: int) -> None:
        self._turn, self._block = turn, block

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a block half a block before and after each save."""
        del args, control
        if state.global_step % self._block == self._block // 2:
            memory = host_memory()
            self._turn.send(0 if memory is None else memory.resident)
            self._turn.recv()


def train(way: str, turn: Connection, arguments: argparse.Namespace) -> None:
    """Train in a way in its own process.

    Args:
        way: One of `WAYS`, or all or none of them.
        turn: Connection to `Turns`; a turn is a block.
        arguments: Sizes.
    """
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    steps = arguments.steps // (arguments.share if way == WITHOUT else 1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        setting = build_setting(arguments, steps, name)
        rows = [
            {**row, "source": f"source {number % SOURCES}"}
            for number, row in enumerate(setting.dataset())
        ]
        settings = settings_of(way, steps, Path(name))
        is_saved = settings.get("async_save", False)
        trainer = MFTrainer(
            setting.model,
            TrainingArguments(
                output_dir=name,
                max_steps=steps,
                per_device_train_batch_size=arguments.batch_size,
                gradient_accumulation_steps=arguments.accumulation,
                use_cpu=True,
                logging_steps=arguments.block,
                save_strategy="steps" if is_saved else "no",
                save_steps=max(steps // SAVES, 1),
                save_total_limit=1,
                report_to="none",
                disable_tqdm=True,
                log_level="error",
                dataloader_pin_memory=False,
            ),
            train_dataset=rows,
            **settings | {"callbacks": [EndsTurns(turn, arguments.block), *settings["callbacks"]]},
        )
        trainer.remove_callback(PrinterCallback)
        turn.send("ready")
        turn.recv()
        trainer.train()


def measure(
    ways: list[str], arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Train in all ways; return the times of their blocks, and the memory after each block."""
    turns = Turns(train, ways, arguments)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    memory: dict[str, list[int]] = {way: [] for way in ways}
    order, draw = list(ways), random.Random(0)  # noqa: S311  (not cryptographic)
    # The first block and the last one are half as long.
    for number in range(arguments.steps // arguments.block):
        draw.shuffle(order)
        for way in order:
            if way == WITHOUT and number % arguments.share:
                continue
            seconds_of_block, resident = turns.take(way)
            seconds[way].append(seconds_of_block)
            memory[way].append(resident)
    turns.end()
    return seconds, memory


def main() -> None:
    """Measure, and print the table."""
    parser = argument_parser(__doc__, steps=2000)
    parser.set_defaults(width=512, layers=8, batch_size=1)
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the vocabulary")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--block", type=int, default=20, help="steps between two turns")
    parser.add_argument(
        "--share", type=int, default=4, help="blocks of each way for one without additions"
    )
    parser.add_argument("--ways", nargs="+", default=[EVERYTHING], choices=[*WAYS, EVERYTHING])
    parser.add_argument("--folder", help="where to write; by default that of temporary files")
    arguments = parser.parse_args()
    turns = arguments.share * arguments.block
    if arguments.steps % turns or arguments.steps == turns:
        parser.error(f"--steps must be 2 or more times {turns}, got {arguments.steps}")
    ways = [WITHOUT, *arguments.ways]
    seconds, memory = measure(ways, arguments)
    model = build_setting(arguments, 1, "").model
    tokens = arguments.batch_size * arguments.accumulation * arguments.sequence_length
    print(
        f"Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million float32 "
        f"parameters on cpu, {tokens} tokens in {arguments.accumulation} micro-batches a step, "
        f"{arguments.threads} threads, torch {torch.__version__}, {arguments.steps} steps in "
        f"blocks of {arguments.block}\n\n"
        "| way | ms a step, median (least to most) | ratio, median of blocks | ratio of all blocks "
        "| memory after a quarter and at the end, MB |\n| --- | --- | --- | --- | --- |"
    )
    without = seconds[WITHOUT][LEFT_OUT:]
    for way in ways:
        measured = seconds[way][LEFT_OUT:]
        time_of_step = median_and_spread([1e3 * each / arguments.block for each in measured], ".1f")
        share = 1 if way == WITHOUT else arguments.share
        beside = seconds[way][LEFT_OUT * share :: share]
        ratio = statistics.median(a / b for a, b in zip(beside, without, strict=True))
        of_all = statistics.mean(measured) / statistics.mean(without)
        quarter, end = (memory[way][place] / 1e6 for place in (len(memory[way]) // 4, -1))
        print(f"| {way} | {time_of_step} | {ratio:.3f} | {of_all:.3f} | {quarter:.0f}, {end:.0f} |")


if __name__ == "__main__":
    main()
