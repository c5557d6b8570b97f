"""The default recipe, on a tiny setting."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM

from mfwrap.recipes import causal_lm
from mfwrap.report.picture import draw_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of a dozen updates."""
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "output_dir": folder,
        "max_steps": 12,
        "micro_batch_size": 2,
        "sequence_length": 32,
        "warmup_steps": 2,
        "logging_steps": 5,
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["causal_lm", *arguments])
        causal_lm.main()
    return folder


def test_every_step_has_a_line(run_folder):
    """Metrics hold the evaluations and one record a step with all that the cell reports."""
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]

    assert [record["step"] for record in steps] == list(range(1, 13))
    assert all(math.isfinite(record["loss"]) for record in steps)
    assert {"overflow", "loss_scale", "learning_rate", "global_norm"} <= set(steps[0])
    assert list(steps[0]["local_norm"]) == [
        "model.embed_tokens",
        *(f"model.layers.{layer}" for layer in range(4)),
        "model.norm",
    ]
    # The groups are all of the model, so their squares add up to the global norm's.
    total = math.hypot(*steps[3]["local_norm"].values())
    assert total == pytest.approx(steps[3]["global_norm"], rel=1e-5)


def test_training_lowers_the_loss_on_held_out_text(run_folder):
    """Raw weights predict held-out text better at the end than at the start."""
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]

    assert records[0]["eval_loss"] == pytest.approx(math.log(256), rel=0.05)
    assert records[-1]["eval_loss"] < records[0]["eval_loss"] - 0.5
    assert math.isfinite(records[-1]["ema_eval_loss"])


def test_models_load_and_averages_differ_from_raw_weights(run_folder):
    """Both models load with `from_pretrained`; the averaged one holds other weights."""
    raw = LlamaForCausalLM.from_pretrained(run_folder / "model")
    averaged = LlamaForCausalLM.from_pretrained(run_folder / "model_ema")

    assert all(torch.isfinite(parameter).all() for parameter in averaged.parameters())
    assert not torch.equal(raw.lm_head.weight, averaged.lm_head.weight)


def test_picture_is_drawn(run_folder):
    """The picture is a PNG of three panels' size, with more than a few colours."""
    with Image.open(run_folder / "run.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == (1350, 1200)
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 50


def test_picture_of_a_run_with_overflows(tmp_path: Path):
    """Norms and losses that are not finite leave gaps and do not break the picture."""
    bad = float("nan")
    lines = [
        {
            "step": step,
            "loss": bad if step == 2 else 3.0 / step,
            "overflow": step == 2,
            "global_norm": bad if step == 2 else 1.0,
            "local_norm": {"a": bad if step == 2 else 0.5, "b": 0.0},
        }
        for step in range(1, 5)
    ]
    lines.append({"step": 4, "eval_loss": 1.0})
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(map(json.dumps, lines)))

    draw_run(metrics, tmp_path / "run.png", max_grad_norm=1.0, title="overflow at step 2")

    with Image.open(tmp_path / "run.png") as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=2**24)
    assert any(colour == (200, 30, 30) for _, colour in colours)


def test_padding_is_no_target():
    """Every byte of every topic is a target once, and padding never is."""
    names = ["assert", "if"]
    dataset = causal_lm.PythonTopics(names, sequence_length=50)
    targets = sum(int((piece["labels"] != causal_lm.IGNORED_LABEL).sum()) for piece in dataset)

    assert targets == sum(len(causal_lm.topics[name].encode()) for name in names)
    assert all(piece["input_ids"].shape == piece["labels"].shape == (50,) for piece in dataset)


@pytest.mark.parametrize(
    ("name", "limit"), [("max_steps", 1), ("micro_batch_size", 1), ("sequence_length", 2)]
)
def test_settings_that_train_nothing_are_refused(name, limit):
    """A number that is too small is refused with its name."""
    with pytest.raises(ValueError, match=f"`{name}` must be >= {limit}, got {limit - 1}"):
        causal_lm.RecipeArguments(**{name: limit - 1})
