"""Write what users of this version have on their disks, for later versions to read.

``python -m support.release_data FOLDER`` writes a run of ``mfwrap train``, a checkpoint of a cell
and one of an accelerate loop, with the numbers of the updates that follow each checkpoint.
CONTRIBUTING.md says when; ``tests/releases/README.md`` lists the files.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    StepConfig,
    WithLossCell,
)
from mfwrap.accelerate import AttachedStep, attach
from mfwrap.checkpoints.step_files import flat_tensors
from mfwrap.optimizers import AdamWeightDecay

__all__ = ["RECIPE", "CellTraining", "LoopTraining", "kept_batches", "write_release_data"]

NUM_UPDATES = 3
"""Number of updates before a checkpoint of a cell or a loop, and of those after it."""

RECIPE: dict[str, Any] = {
    "task": "regression",
    "model": {
        "config": {"model_type": "perceptron", "hidden_size": 8, "num_hidden_layers": 1},
    },
    "data": {"type": "diabetes", "max_train_samples": 64, "max_eval_samples": 16},
    "training": {
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "use_cpu": True,
        "seed": 3,
        "output_dir": "run",
    },
    "optimizer": {"type": "AdamW"},
    "runner_wrapper": {
        "use_clip_grad": True,
        "max_grad_norm": 1.0,
        "local_norm": True,
        "local_norm_groups": "layer",
        "scale_sense": {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": 1024,
            "scale_factor": 2,
            "scale_window": 3,
        },
    },
    "ema": {"decay": 0.9},
    "callbacks": [{"type": "MFLossMonitor", "per_print_times": 4}],
    "monitor_config": {"monitor_on": True, "step_interval": 2, "weight_state_format": "jsonl"},
}
"""Recipe of the kept run. The last of its two checkpoints is not kept, to save space."""


class CellTraining:
    """Train with `MFTrainOneStepCell`: loss scale, clipping, local norms and an average."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = WithLossCell(nn.Linear(4, 1), nn.MSELoss())
        self.cell = MFTrainOneStepCell(
            self.network,
            torch.optim.SGD(self.network.parameters(), lr=0.1, fused=True),
            use_clip_grad=True,
            scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 2),
            local_norm=True,
            ema=ExponentialMovingAverage(self.network, 0.9),
        )

    def save(self, folder: Path) -> None:
        """Write the network and the state of the cell, without pickle."""
        save_file(self.network.state_dict(), folder / "network.safetensors")
        save_file(flat_tensors(self.cell.state_dict()), folder / "cell.safetensors")

    def load(self, folder: Path) -> None:
        """Restore what `save` has written."""
        self.network.load_state_dict(load_file(folder / "network.safetensors"))
        self.cell.load_state_dict(_nested(load_file(folder / "cell.safetensors")))

    def train(self, batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
        """Train on each batch; return the numbers of each update."""
        return [_numbers(self.cell(*batch)) for batch in batches]


class LoopTraining:
    """Train in an accelerate loop with `attach`, `AdamWeightDecay`, a schedule and an average."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        self.attached: AttachedStep = attach(
            self.accelerator,
            StepConfig(local_norm=True),
            scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 2),
            ema=lambda network: ExponentialMovingAverage(network, 0.9),
        )
        network = nn.Linear(4, 1)
        optimizer = AdamWeightDecay(network.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
        self.network, self.optimizer, self.schedule = self.accelerator.prepare(
            network, optimizer, schedule
        )

    def save(self, folder: Path) -> None:
        """Save the state of the accelerator."""
        self.accelerator.save_state(str(folder / "checkpoint"))

    def load(self, folder: Path) -> None:
        """Restore what `save` has written."""
        self.accelerator.load_state(str(folder / "checkpoint"))

    def train(self, batches: list[tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
        """Train on each batch; return the numbers of each update."""
        found = []
        for inputs, targets in batches:
            self.accelerator.backward(nn.functional.mse_loss(self.network(inputs), targets))
            self.accelerator.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            found.append(_numbers(self.attached.last_output))
        return found


def write_release_data(folder: Path) -> None:
    """Write the data of this version into a folder.

    Args:
        folder: Folder that does not exist yet.
    """
    folder.mkdir(parents=True)
    text = yaml.safe_dump(RECIPE, sort_keys=False)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mfwrap", "train", "recipe.yaml"]
    subprocess.run(command, cwd=folder, check=True)
    shutil.rmtree(folder / "run" / f"checkpoint-{RECIPE['training']['max_steps']}")
    for name, training in (("cell", CellTraining()), ("accelerate", LoopTraining())):
        part = folder / name
        part.mkdir()
        batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2 * NUM_UPDATES)]
        training.train(batches[:NUM_UPDATES])
        training.save(part)
        rest = batches[NUM_UPDATES:]
        kept = {
            "inputs": [inputs for inputs, _ in rest],
            "targets": [targets for _, targets in rest],
        }
        save_file(
            {name: torch.stack(rows) for name, rows in kept.items()}, part / "batches.safetensors"
        )
        text = json.dumps(training.train(rest), indent=2)
        (part / "updates.json").write_text(f"{text}\n", encoding="utf-8")


def kept_batches(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of the updates after a kept checkpoint."""
    kept = load_file(folder / "batches.safetensors")
    return list(zip(kept["inputs"], kept["targets"], strict=True))


def _numbers(output: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in output._asdict().items()}


def _nested(tensors: dict[str, Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {"ema": {"buffers": {}}}  # the network has no buffers
    for path, tensor in tensors.items():
        *outer, name = path.split("/")
        part = state
        for key in outer:
            part = part.setdefault(key, {})
        part[name] = tensor
    return state


if __name__ == "__main__":
    match sys.argv[1:]:
        case [new] if not Path(new).exists():
            write_release_data(Path(new))
        case given:
            sys.exit(f"expected one folder that does not exist yet, got {given}")
