"""``mfwrap train`` on a CPU and on a GPU."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mfwrap.runner import parse_recipe
from mfwrap.runner.library import find_recipe
from mfwrap.runner.run import run_recipe
from support.devices import each_device

# Ignore the warnings that datasets emits.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = [
    "model.config.num_hidden_layers=1",
    "model.config.hidden_dropout_prob=0.1",
    "data.max_train_samples=64",
    "data.max_eval_samples=8",
    "training.num_train_epochs=1",
    "training.max_steps=6",
    "training.per_device_train_batch_size=8",
    "training.eval_strategy=steps",
    "training.save_strategy=steps",
    "training.eval_steps=3",
    "training.save_steps=3",
    "training.logging_steps=3",
    "training.warmup_steps=1",
]


@pytest.fixture
def _deterministic():
    """Let torch refuse operations whose results differ from run to run."""
    torch.use_deterministic_algorithms(True)  # noqa: FBT003  (torch's signature)
    yield
    torch.use_deterministic_algorithms(False)  # noqa: FBT003  (torch's signature)


def train(folder, device, *overrides, resume=False):
    """Train the shipped recipe for images into a folder; return what it records by step."""
    place = ["training.use_cpu=true"] if device == "cpu" else []
    overrides = [*SMALL, *place, *overrides, f"training.output_dir={folder}"]
    text, name = find_recipe("image_classification")
    run_recipe(parse_recipe(text, name, overrides), resume=resume)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = map(json.loads, lines)
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@each_device
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_recipe_is_trained_and_resumed(precision, device, tmp_path):
    """A run that is resumed from the middle has the losses and the model of one that was not."""
    overrides = [] if precision == "float32" else [f"training.{precision}=true"]
    straight = train(tmp_path / "straight", device, *overrides)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for name in ("checkpoint-6", "model", "model_ema"):
        shutil.rmtree(tmp_path / "resumed" / name, ignore_errors=True)
    resumed = train(tmp_path / "resumed", device, *overrides, resume=True)
    models = [
        load_file(tmp_path / name / "model" / "model.safetensors")
        for name in ("straight", "resumed")
    ]
    facts = json.loads((tmp_path / "straight" / "run.json").read_text(encoding="utf-8"))

    assert list(straight) == [1, 2, 3, 4, 5, 6]
    assert resumed == straight
    assert all(torch.equal(models[1][name], tensor) for name, tensor in models[0].items())
    if device == "cuda":
        assert facts["hardware"]["device"] == "cuda"
