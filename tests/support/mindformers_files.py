"""MindFormers files for tests: a small whole file, and changes of it."""

import copy
from collections.abc import Mapping
from typing import Any

import yaml

from mfwrap.runner import import_mindformers, parse_recipe

ABSENT = object()
"""In the place of a value: remove the key."""

_FILE: dict[str, Any] = {
    "run_mode": "train",
    "seed": 1,
    "output_dir": "./output",
    "load_checkpoint": "",
    "use_parallel": True,
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "small"},
    "runner_config": {"epochs": 2, "batch_size": 4, "sink_mode": True, "sink_size": 1},
    "runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "lr_schedule": {
        "type": "CosineWithWarmUpLR",
        "learning_rate": 1e-3,
        "lr_end": 1e-5,
        "warmup_ratio": 0.1,
        "total_steps": -1,
    },
    "train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": "/data/w.mindrecord"}},
    "parallel": {"parallel_mode": 1, "gradients_mean": False},
    "parallel_config": {"data_parallel": 1, "model_parallel": 2},
    "model": {
        "arch": {"type": "LlamaForCausalLM"},
        "model_config": {
            "type": "LlamaConfig",
            "seq_length": 32,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 300,
            "compute_dtype": "bfloat16",
            "param_init_type": "float32",
            "use_flash_attention": True,
        },
    },
    "callbacks": [{"type": "MFLossMonitor"}],
    "context": {"mode": 0, "device_target": "Ascend"},
}


def paths_of_keys(section: Mapping[str, Any] | None = None, outer: str = "") -> list[str]:
    """Return the dotted name of each key of the file, and of each section."""
    found = []
    for key, value in (_FILE if section is None else section).items():
        found.append(f"{outer}{key}")
        if isinstance(value, dict):
            found += paths_of_keys(value, f"{outer}{key}.")
    return found


def mindformers_text(changes: Mapping[str, Any] | None = None) -> str:
    """Return a MindFormers file.

    Args:
        changes: Values by dotted key, such as ``runner_config.epochs``.
    """
    data = copy.deepcopy(_FILE)
    for dotted, value in (changes or {}).items():
        *outer, key = dotted.split(".")
        holder = data
        for name in outer:
            holder = holder.setdefault(name, {})
        if value is ABSENT:
            del holder[key]
        else:
            holder[key] = value
    return yaml.safe_dump(data, sort_keys=False)


def imported(changes: Mapping[str, Any] | None = None, accept: tuple[str, ...] = ()) -> Any:
    """Return the result of the import, and its sections as plain values."""
    result = import_mindformers(mindformers_text(changes), "m.yaml", accept)
    return result, yaml.safe_load(result.text)


def imported_recipe(changes: Mapping[str, Any] | None = None, *overrides: str) -> Any:
    """Return the checked recipe of a file."""
    result, _ = imported(changes)
    return parse_recipe(result.text, "m.yaml", ["training.use_cpu=true", *overrides])


def lost(changes: Mapping[str, Any], *accept: str) -> list[str]:
    """Return the names of the losses of a file of which all are accepted."""
    result, _ = imported(changes, accept)
    return [loss.name for loss in result.losses]
