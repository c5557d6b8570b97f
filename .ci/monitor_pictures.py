"""Train small models with each monitor, and draw what it writes into docs/pictures.

python .ci/monitor_pictures.py    # as `make pictures` does; needs no network and no accelerator

Each run has a planted fault, so that the pictures show what the monitor is for.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from mfwrap import StepConfig
from mfwrap.callbacks import (
    CheckpointMonitor,
    EMACallback,
    EvalCallback,
    LocalNormMonitor,
    MetricsRecorder,
    MFLossMonitor,
    ProfileMonitor,
    RankClock,
    ReplicaCheck,
    TrainingStateMonitor,
)
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
STEPS = 60
LENGTH = 64
BAD_STEP = 52
NAN_STEPS = range(37, 41)
FIRST_LARGE = 30
CHANGED_STEP = 12
RANK = int(os.environ.get("RANK", "0"))
BLUE, RED, GREEN, GREY = "#2563eb", "#dc2626", "#16a34a", "#9ca3af"


def rows() -> list[dict[str, torch.Tensor]]:
    """Return Python's documentation as rows of bytes."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    pieces = [text[n : n + LENGTH] for n in range(0, 2000 * LENGTH, LENGTH)]
    tensors = [torch.tensor(list(piece)) for piece in pieces if len(piece) == LENGTH]
    return [{"input_ids": one, "labels": one} for one in tensors]


class Fault(TrainerCallback):
    """Plant a fault into a network at given steps.

    Args:
        network: The network.
        kind: ``"loss"``, ``"layer"``, ``"slow"`` or ``"weight"``.
    """

    def __init__(self, network: LlamaForCausalLM, kind: str) -> None:
        self.step = 0
        self.kind = kind
        self.network = network
        if kind == "loss":
            network.register_forward_hook(self.spoil_loss)
        elif kind == "layer" and RANK == 1:
            weight = network.model.layers[2].mlp.down_proj.weight
            weight.register_hook(lambda grad: grad * (30 if self.step >= FIRST_LARGE else 1))
            network.register_forward_pre_hook(lambda *_: time.sleep(0.02))

    def spoil_loss(self, network: Any, inputs: Any, output: Any) -> None:
        """Change the loss of a training step."""
        del inputs
        if network.training and self.step in NAN_STEPS:
            output["loss"] = output["loss"] * float("nan")
        elif network.training and self.step == BAD_STEP:
            output["loss"] = output["loss"] * 8

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step, and change a weight of rank 1."""
        del args, control
        self.step = state.global_step + 1
        if self.kind == "weight" and RANK == 1 and self.step == CHANGED_STEP:
            with torch.no_grad():
                self.network.model.layers[1].self_attn.q_proj.weight[3, 5] += 1e-3


def train(folder: str, kind: str) -> None:
    """Train with the monitors of a run."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )
    data = rows()
    held_out = [row["input_ids"] for row in data[-32:]]

    def evaluate() -> dict[str, float]:
        tokens = torch.stack(held_out)
        network.eval()
        with torch.no_grad():
            loss = network(input_ids=tokens, labels=tokens).loss
        network.train()
        return {"loss": round(float(loss), 4)}

    callbacks: dict[str, list[Any]] = {
        "loss": [
            MFLossMonitor(console="lines", per_print_times=20),
            TrainingStateMonitor(
                local_norm_format="jsonl", weight_state_format="jsonl", replay=True
            ),
            CheckpointMonitor(save_checkpoint_steps=10, keep_checkpoint_max=3, most_skips=2),
            ProfileMonitor(start_step=11, stop_step=13),
            EvalCallback(evaluate, step_interval=10),
            EMACallback(decay=0.9),
            MetricsRecorder(Path(folder)),
        ],
        "layer": [LocalNormMonitor(step_interval=1), RankClock(step_interval=10)],
        "weight": [ReplicaCheck(step_interval=5)],
    }
    trainer = MFTrainer(
        network,
        TrainingArguments(
            folder,
            max_steps=STEPS if kind != "weight" else 20,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            warmup_steps=5,
            logging_steps=10,
            save_strategy="no",
            eval_strategy="steps" if kind == "loss" else "no",
            eval_steps=10,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        ),
        train_dataset=data[:-32],
        eval_dataset=data[-32:] if kind == "loss" else None,
        callbacks=[Fault(network, kind), *callbacks[kind]],
        step=StepConfig(
            use_clip_grad=True,
            max_grad_norm=1.0,
            local_norm=True,
            local_norm_groups="layer",
            max_consecutive_skips=None,
        ),
    )
    trainer.train()


def run(folder: Path, kind: str, num_ranks: int) -> str:
    """Run `train` in processes of its own, and return what it has printed."""
    words = [sys.executable, "-P"]
    if num_ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    words += [__file__, "--train", kind, "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


def axes(title: str, height: float = 2.8) -> Any:
    """Return the axes of a new picture."""
    _, axis = plt.subplots(figsize=(9, height), layout="constrained")
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("step")
    return axis


def save(name: str) -> None:
    """Write the current picture."""
    plt.savefig(PICTURES / f"{name}.png", dpi=100)
    plt.close()


def draw_text(name: str, lines: Sequence[str]) -> None:
    """Draw lines as a terminal of 100 columns shows them."""
    shown = [part for line in lines for part in textwrap.wrap(line, 100) or [""]]
    figure = plt.figure(figsize=(9, 0.25 + 0.19 * len(shown)), facecolor="#111827")
    text = "\n".join(shown).replace("$", r"\$")
    figure.text(0.012, 0.5, text, color="#e5e7eb", family="monospace", fontsize=10.4, va="center")
    plt.savefig(PICTURES / f"{name}.png", dpi=100, facecolor="#111827")
    plt.close()


def cut(line: str) -> str:
    """Return a line, cut to the width of a terminal."""
    return line if len(line) <= 98 else f"{line[:95]}..."


def number(value: Any) -> float:
    """Return a number of a record, where a non-finite one is a string."""
    return float(value) if value is not None else float("nan")


def draw_one(folder: Path, printed: str) -> None:
    """Draw the run on one rank, whose losses are NaN in four steps and eight-fold in one."""
    lines = [line for line in printed.splitlines() if ".loss_monitor - " in line]
    draw_text("loss_monitor", [line.partition("INFO - ")[2] for line in lines[:4]])
    results = [line for line in printed.splitlines() if "Eval result" in line]
    draw_text("eval_callback", [line.partition("INFO - ")[2] for line in results])

    steps = [r for r in read_json_lines(folder / "training_state.jsonl") if "loss" in r]
    axis = axes("global norm, and what went wrong (training_state.jsonl, anomalies.jsonl)", 3.2)
    axis.plot([r["step"] for r in steps], [number(r["global_norm"]) for r in steps], color=BLUE)
    axis.set_yscale("log")
    for episode in read_json_lines(folder / "anomalies.jsonl"):
        if "last_step" not in episode:
            axis.axvspan(episode["step"] - 0.5, episode["step"] + 0.5, color=RED, alpha=0.25)
            said = f"step {episode['step']}: {episode['kind']}\ncause: {episode['cause']}"
            axis.annotate(
                said,
                (episode["step"], 0.97),
                xycoords=("data", "axes fraction"),
                xytext=(4 if episode["step"] == BAD_STEP else -4, 0),
                textcoords="offset points",
                fontsize=8,
                color=RED,
                va="top",
                ha="left" if episode["step"] == BAD_STEP else "right",
            )
    save("training_state_monitor")

    metrics = read_json_lines(folder / "metrics.jsonl")
    health = {r["step"]: r for r in read_json_lines(folder / "checkpoint_health.jsonl")}
    axis = axes("loss, and checkpoints: healthy or not (checkpoint_health.jsonl)")
    losses = {r["step"]: number(r["loss"]) for r in metrics if "loss" in r}
    axis.plot(list(losses), list(losses.values()), color=GREY)
    for step, record in health.items():
        axis.axvline(step, color=GREEN if record["healthy"] else RED, lw=2)
        if not record["healthy"]:
            said = "unhealthy: " + ", ".join(record["reasons"])
            axis.text(step - 0.5, 6.5, said, color=RED, fontsize=8, ha="right")
    axis.set_ylim(0, 8)
    save("checkpoint_monitor")

    axis = axes(
        "held-out loss with raw weights (EvalCallback) and with averaged weights (metrics.jsonl)"
    )
    raw = [float(line.partition("'loss': ")[2].partition("}")[0]) for line in results]
    axis.plot(range(10, STEPS + 1, 10), raw, color=GREY, marker="o", label="raw")
    averaged = [(r["step"], r["ema_eval_loss"]) for r in metrics if "ema_eval_loss" in r]
    axis.plot(*zip(*averaged, strict=True), color=BLUE, marker="o", label="averaged")
    axis.legend(frameon=False)
    save("ema_callback")

    table = (folder / "profile" / "rank_0" / "operators.txt").read_text().splitlines()
    draw_text("profile_monitor", [line[:98] for line in table if line.strip()][:9])
    records = [json.dumps(record) for record in metrics[:3]]
    draw_text(
        "metrics_recorder", [line if len(line) <= 98 else f"{line[:95]}..." for line in records]
    )


def draw_two(folder: Path) -> None:
    """Draw the run on two ranks, of which one has a slow forward and a faulty layer."""
    norms = [read_json_lines(folder / f"local_norms{end}.jsonl") for end in ("", "_rank1")]
    names = [name for name in norms[0][0] if name.startswith("local_norm/")]
    figure, both = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained", sharey=True)
    for rank, axis in enumerate(both):
        values = [[math.log10(number(r[name])) for r in norms[rank]] for name in names]
        image = axis.imshow(values, aspect="auto", cmap="viridis", vmin=-2, vmax=2)
        axis.set_title(f"rank {rank}", loc="left", fontsize=10)
        axis.set_xlabel("step")
        axis.set_yticks(range(len(names)), [name.split("/")[1] for name in names], fontsize=8)
    figure.colorbar(image, label="log10 of the local norm")
    save("local_norm_monitor")

    times = [r for r in read_json_lines(folder / "rank_clock.jsonl") if "data" in r][1:]
    sections = ["data", "forward_backward", "reduction", "update", "waiting"]
    _, axis = plt.subplots(figsize=(9, 1.9), layout="constrained")
    for rank in (0, 1):
        left = 0.0
        for section, color in zip(sections, ("#f59e0b", BLUE, "#a855f7", GREEN, GREY), strict=True):
            mean = sum(r[section][rank] for r in times) / len(times)
            label = section if rank == 0 else None
            axis.barh(f"rank {rank}", mean, left=left, color=color, label=label)
            left += mean
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds of a step (mean)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=5, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
    save("rank_clock")


def draw_three(folder: Path, printed: str) -> None:
    """Draw the run on three ranks, of which one has a changed weight."""
    said = [line.partition("WARNING - ")[2] for line in printed.splitlines() if "differ" in line]
    [record] = read_json_lines(folder / "anomalies.jsonl")
    lines = [said[0].replace(str(folder), "run"), "", "anomalies.jsonl:"]
    draw_text("replica_check", [*lines, *(f"  {name}: {value}" for name, value in record.items())])


def draw_loop(folder: Path) -> None:
    """Draw the first lines of the CSV file of a loop of one's own."""
    from torch.nn import Linear

    from mfwrap import MFTrainOneStepCell, WithLossCell
    from mfwrap.callbacks import LoopMonitor

    torch.manual_seed(0)
    network = WithLossCell(Linear(8, 1), torch.nn.MSELoss())
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, fused=True)
    cell = MFTrainOneStepCell(network, optimizer, use_clip_grad=True, local_norm=True)
    with LoopMonitor(cell, folder) as monitor:
        for step in range(1, 7):
            target = torch.full((4, 1), float("nan") if step == 4 else 1.0)
            cell(torch.randn(4, 8), target)
            monitor.end_step()
    lines = (folder / "metrics.csv").read_text().splitlines()
    draw_text("loop_monitor", [cut(line) for line in lines])


def small_llama() -> tuple[LlamaForCausalLM, torch.optim.AdamW]:
    """Return a network and its optimizer, for a loop of one's own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    network = LlamaForCausalLM(config)
    return network, torch.optim.AdamW(network.parameters(), lr=0.01, fused=True)


def draw_memory(folder: Path) -> None:
    """Draw the records of a loop whose fifth step has no memory left, and its error."""
    from mfwrap import MFTrainOneStepCell
    from mfwrap.callbacks import LoopMonitor, MemoryMonitor
    from mfwrap.memory import memory_note

    network, optimizer = small_llama()
    cell = MFTrainOneStepCell(network, optimizer, gradient_accumulation_steps=2)
    tokens = torch.randint(256, (8, LENGTH))
    note = ""
    with LoopMonitor(cell, folder, callbacks=[MemoryMonitor(2, folder=folder)]) as monitor:
        for _ in range(4):
            cell(input_ids=tokens, labels=tokens)
            monitor.end_step()
        network.lm_head.register_forward_hook(lambda *_: torch.empty(2**50))
        try:
            cell(input_ids=tokens, labels=tokens)
        except RuntimeError as error:
            note = memory_note(error) or ""
            raised = str(error).partition("] ")[2]
    lines = (folder / "memory.jsonl").read_text().splitlines()
    draw_text("memory_monitor", [*lines, "", f"RuntimeError: {raised}", note])


def draw_recompute(folder: Path) -> None:
    """Draw the record of a loop in whose sixth step a module has computed a wrong number."""
    from mfwrap import MFTrainOneStepCell
    from mfwrap.callbacks import LoopMonitor, RecomputeCheck

    network, optimizer = small_llama()
    cell = MFTrainOneStepCell(network, optimizer)
    tokens = torch.randint(256, (8, LENGTH))
    wrong = [1e-3]

    def disturb(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        if monitor.global_step < 5 or not wrong:
            return output
        change = torch.zeros_like(output)
        change[3, 5, 7] = wrong.pop()
        return output + change

    network.model.layers[1].mlp.down_proj.register_forward_hook(disturb)
    check = RecomputeCheck(2, repeats=2, folder=folder)
    with LoopMonitor(cell, folder, callbacks=[check]) as monitor:
        for _ in range(7):
            cell(input_ids=tokens, labels=tokens)
            monitor.end_step()
    [record] = read_json_lines(folder / "anomalies.jsonl")
    draw_text("recompute_check", [f"{name}: {value}" for name, value in record.items()])


def main() -> None:
    """Train, and draw all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", choices=("loss", "layer", "weight"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.folder, arguments.train)
        return
    mpl.use("Agg")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draw_one(folder / "one", run(folder / "one", "loss", 1))
        run(folder / "two", "layer", 2)
        draw_two(folder / "two")
        draw_three(folder / "three", run(folder / "three", "weight", 3))
        draw_loop(folder / "loop")
        draw_memory(folder / "memory")
        draw_recompute(folder / "recompute")


if __name__ == "__main__":
    main()
