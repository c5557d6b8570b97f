"""A small recipe that writes every kind of record, and that skips an update."""

from pathlib import Path

import torch
import yaml
from datasets import Dataset

__all__ = ["NUM_STEPS", "RECIPE", "write_recipe", "write_rows"]

NUM_STEPS = 4
_NUM_ROWS, _NUM_FEATURES, _BAD_ROW = 40, 3, 17
RECIPE = {
    "task": "regression",
    "model": {
        "config": {
            "model_type": "perceptron",
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "standardize": False,  # with it, no target would be infinite
        }
    },
    "data": {"type": "datasets", "path": "../rows", "eval_fraction": 0.4},
    "training": {
        "output_dir": "run",
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        # Between two checkpoints are a step that is logged and not saved, and the end of an epoch.
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 3,
    },
    "runner_wrapper": {
        "scale_sense": {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": 2.0**64,  # overflows in the first step
            "scale_factor": 2,
            "scale_window": 2,
        },
        "use_clip_grad": True,
        "max_grad_norm": 1.0,
        "local_norm": True,
        "local_norm_groups": "layer",
    },
    "ema": {"decay": 0.9},
    "callbacks": [
        {"type": "MFLossMonitor"},
        {"type": "LocalNormMonitor"},
        # Removes the first checkpoint after it has saved the second one.
        {"type": "CheckpointMonitor", "save_checkpoint_steps": 2, "keep_checkpoint_max": 1},
    ],
    "monitor_config": {
        "monitor_on": True,
        "local_norm_format": "jsonl",
        "local_loss_format": "jsonl",
        "optimizer_state_format": "jsonl",
        "weight_state_format": "jsonl",
    },
}
"""Recipe of a run with an average, a dynamic loss scale and all monitors that write records."""


def write_rows(folder: Path) -> None:
    """Write the data of the recipe to ``rows`` in a folder; one row has an infinite loss."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(_NUM_ROWS, _NUM_FEATURES, generator=generator)
    targets = features.sum(dim=1)
    targets[_BAD_ROW] = 1e30
    rows = {"features": features.tolist(), "target": targets.tolist()}
    Dataset.from_dict(rows).save_to_disk(folder / "rows")


def write_recipe(folder: Path) -> None:
    """Write `RECIPE` to ``crash.yaml`` in a new folder, which must be beside ``rows``."""
    folder.mkdir()
    (folder / "crash.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
