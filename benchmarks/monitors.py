"""Measure what monitors cost: the same training without monitors and with all monitors.

    python benchmarks/monitors.py                       # a Llama of 8 million parameters
    python benchmarks/monitors.py --device cuda --width 1024 --layers 16 --batch-size 16

Each round trains without monitors, with local norms alone, with all monitors, and with fingerprints
alone (of each step, and of each tenth step), in random order. All monitors are:

- the loss monitor, the health of checkpoints, the comparison of replicas and the clock of ranks;
- the search for culprits with replay;
- every number of the training state monitor, as JSON lines and TensorBoard curves: norms of
  gradients and losses in each step; weights, optimizer state and attention logits in each tenth
  step (`--interval`); stable ranks in each hundredth step.

The time of a run is the mean of its steps without the first five. The table shows the median and
the range of these times over rounds, and the median and the range of their ratios to the time
without monitors in the same round.
"""

import argparse
import logging
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from mfwrap import StepConfig
from mfwrap.callbacks import (
    CheckpointMonitor,
    MFLossMonitor,
    RankClock,
    ReplicaCheck,
    TrainingStateMonitor,
)
from mfwrap.trainer import MFTrainer
from trainer import argument_parser, build_model

WARM_UP = 5
"""Number of first steps that are not measured."""

OFF, NORMS, ON = "no monitors", "local norms alone", "all monitors"
STEPS, STATES = "monitors of each step", "weights and optimizer at each tenth step"
LOGITS = "attention logits at each tenth step"
EACH, TENTH = "fingerprints of each step", "fingerprints of each tenth step"


@final
class Timer(TrainerCallback):
    """Measure the time from the end of the warm-up to the end of the last step.

    Args:
        device: Device that is synchronized at both ends.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the time after the warm-up and after the last step."""
        del args, control
        if state.global_step in {WARM_UP, state.max_steps}:
            if self._device == "cuda":
                torch.cuda.synchronize()
            self._times.append(time.perf_counter())

    def seconds_per_step(self, steps: int) -> float:
        """Return the mean time of the steps after the warm-up."""
        start, end = self._times
        return (end - start) / (steps - WARM_UP)


FORMATS: Any = ["jsonl", "tensorboard"]


def monitors_of_steps(folder: Path, interval: int) -> list[TrainerCallback]:
    """Return the monitors with cheap numbers of each step."""
    of_each_step = ("local_norm", "device_local_norm", "local_loss", "device_local_loss")
    return [
        MFLossMonitor(per_print_times=interval, tensorboard_dir=folder / "loss"),
        TrainingStateMonitor(
            **dict.fromkeys((f"{name}_format" for name in of_each_step), FORMATS),
            replay=True,
            tensorboard_dir=folder / "steps",
            folder=folder / "steps",
        ),
        CheckpointMonitor(save_checkpoint_steps=10**9),
        ReplicaCheck(10 * interval),
        RankClock(interval),
    ]


def monitor_of_states(folder: Path, interval: int, *names: str) -> TrainingStateMonitor:
    """Return the monitor of the numbers that are taken every `interval` steps.

    Args:
        folder: Folder of its outputs.
        interval: Steps between two records.
        names: Numbers.
    """
    return TrainingStateMonitor(
        **dict.fromkeys((f"{name}_format" for name in names), FORMATS),
        step_interval=interval,
        stable_rank_config={"format": FORMATS, "step_interval": 10 * interval},
        find_culprit=False,
        tensorboard_dir=folder / "states",
        folder=folder / "states",
    )


def callbacks_of(what: str, folder: Path, interval: int) -> list[TrainerCallback]:
    """Return the monitors that `what` names."""
    states = ("optimizer_state", "weight_state", "expert_load")
    if what == ON:
        numbers = (*states, "max_attention_logit")
        return [
            *monitors_of_steps(folder, interval),
            monitor_of_states(folder, interval, *numbers),
        ]
    if what == STEPS:
        return monitors_of_steps(folder, interval)
    if what == STATES:
        return [monitor_of_states(folder, interval, *states)]
    if what == LOGITS:
        return [monitor_of_states(folder, interval, "max_attention_logit")]
    if what in {EACH, TENTH}:
        every = 1 if what == EACH else interval
        return [TrainingStateMonitor(fingerprints=True, step_interval=every, find_culprit=False)]
    return []


def seconds_per_step(
    what: str, model: LlamaForCausalLM, tokens: Tensor, options: argparse.Namespace
) -> float:
    """Train with the kind of monitors that `what` names, and return the mean time of a step."""
    timer = Timer(options.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = MFTrainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch_size,
                gradient_accumulation_steps=options.accumulation,
                bf16=options.device == "cuda",
                use_cpu=options.device == "cpu",
                logging_steps=50,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                log_level="error",
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[timer, *callbacks_of(what, Path(folder), options.interval)],
            step=StepConfig(local_norm=what in {NORMS, ON, STEPS}),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return timer.seconds_per_step(options.steps)


def main() -> None:
    """Measure each kind of monitors, and print the table."""
    parser = argument_parser(__doc__, steps=45)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--interval", type=int, default=10, help="steps between two records of weights and states"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    logging.getLogger("mfwrap").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    num_samples = options.batch_size * options.accumulation * options.steps
    tokens = torch.randint(0, 4096, (num_samples, options.sequence_length), generator=generator)
    seconds: dict[str, list[float]] = {k: [] for k in (OFF, NORMS, ON, EACH, TENTH)}
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    kinds = list(seconds)
    for _ in range(options.rounds):
        order.shuffle(kinds)
        for what in kinds:
            model = build_model(options.width, options.layers, options.sequence_length)
            seconds[what].append(seconds_per_step(what, model, tokens, options))
    print(
        f"Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters on "
        f"{options.device}, {options.accumulation} micro-batches of "
        f"{options.batch_size * options.sequence_length} tokens a step, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {options.rounds} rounds of "
        f"{options.steps} steps\n\n"
        "| monitors | ms a step, median (least to most) | ratio, median (least to most) |\n"
        "| --- | --- | --- |"
    )
    for what, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[OFF], strict=True)]
        print(
            f"| {what} | {statistics.median(times) * 1e3:.1f} ({min(times) * 1e3:.1f} to "
            f"{max(times) * 1e3:.1f}) | {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    main()
