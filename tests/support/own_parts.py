"""A project whose recipe names a callback, a model and a data set of its own module."""

from pathlib import Path

import yaml

__all__ = ["IMPORTED", "write_project"]

IMPORTED = "imported.txt"
"""File in the project that gets a line at each import of its module."""

_HELPERS = "SCALE = 2.0\n"

_PARTS = f"""
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback

from mfwrap.recipes.data.columns import NUMBER
from mfwrap.recipes.data.source import DataSource
from mfwrap.recipes.data.source import Rows as Parts
from mfwrap.recipes.tasks.table import Task
from my_helpers import SCALE

with Path(__file__).with_name("{IMPORTED}").open("a") as file:
    file.write("imported\\n")


class Net(nn.Module):
    def __init__(self, hidden: int, num_features: int = 4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features, hidden), nn.Dropout(0.2), nn.Linear(hidden, 1)
        )

    def forward(self, features, labels):
        values = self.layers(features).squeeze(-1)
        return {{"loss": nn.functional.mse_loss(values, labels), "logits": values}}


class ScalarNet(Net):
    def forward(self, features, labels):
        return super().forward(features, labels)["loss"]


class VectorNet(Net):
    def forward(self, features, labels):
        return super().forward(features, labels)["logits"], labels


class Rows(torch.utils.data.Dataset):
    def __init__(self, number: int = 32):
        self.values = torch.randn(number, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        row = self.values[index]
        return {{"features": row, "labels": SCALE * row.sum()}}


class Count(TrainerCallback):
    def __init__(self, file: Path, every: int = 1):
        self.file, self.every = file, every
        self.file.touch()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 and state.is_world_process_zero:
            with self.file.open("a") as file:
                file.write(f"{{state.global_step}}\\n")


class Losses:  # a callback of MindFormers' PyNative trainer, without its base class
    def __init__(self, file: str):
        self.file = Path(file)

    def on_step_end(self, args, state, **kwargs):
        with self.file.open("a") as file:
            step = f"{{state.global_step}}/{{args.training.steps}}"
            file.write(f"{{step}} {{kwargs['loss'].item()}}\\n")


def largest(prediction, scale: float = 1.0):
    return {{"largest": scale * float(abs(prediction.predictions).max())}}


class Largest:
    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def __call__(self, prediction):
        return largest(prediction, self.scale)


class Refusing(TrainerCallback):
    def __init__(self, limit):
        raise ValueError("`limit` must be a prime number, got " + str(limit))


class Failing(TrainerCallback):
    def __init__(self, limit):
        [][limit]


class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr=0.5):
        super().__init__(params, {{"lr": lr}})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def falling(optimizer, num_training_steps, power: int = 1):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 - step / num_training_steps) ** power
    )


@dataclass(frozen=True, kw_only=True)
class Squares(DataSource):
    number: int = 32

    def __post_init__(self):
        super().__post_init__()
        if self.number < 4:
            raise ValueError("`number` must be >= 4, got " + str(self.number))

    def read(self):
        numbers = [float(number) for number in range(self.number)]
        return Parts(Dataset.from_dict({{"x": numbers, "square": [x * x for x in numbers]}}))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x, labels):
        return nn.functional.mse_loss(self.scale * x, labels), self.scale * x


def build(model, data, rows):
    return {{
        "model": model.make_model(None),
        **rows.prepared(lambda table: table.rename_column("square", "labels")),
        "compute_metrics": lambda prediction: {{"rows": len(prediction.predictions)}},
    }}


TASK = Task(needs=({{"x": NUMBER, "square": NUMBER}},), build=build, hub_task="other")


def nothing(*args, **kwargs):
    return None
"""

_RECIPE = {
    "task": "regression",
    "model": {"type": "my_parts.Net", "hidden": 8},
    "data": {"type": "my_parts.Rows", "number": 40},
    "training": {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_steps": 4,
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    },
    "callbacks": [{"type": "my_parts.Count", "file": "counted.txt"}],
}


def write_project(folder: Path, **sections) -> Path:
    """Write a recipe, its module and a module that this module imports.

    Args:
        folder: Folder of the project.
        sections: Sections that replace those of the recipe; ``None`` removes one.

    Returns:
        The recipe's file.
    """
    (folder / "my_parts.py").write_text(_PARTS, encoding="utf-8")
    (folder / "my_helpers.py").write_text(_HELPERS, encoding="utf-8")
    recipe = {name: one for name, one in (_RECIPE | sections).items() if one is not None}
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return file
