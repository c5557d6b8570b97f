"""The default recipe trains a tiny model, and writes records, a picture and models."""

import itertools
import json
import math
import re
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM

from mfwrap.checkpoints.locks import RUN_LOCK, owning
from mfwrap.recipes import causal_lm
from mfwrap.records.run_record import read_facts

FEW_TOPICS = {name: topics[name] for name in sorted(topics)[:20]}
"""Topics that are evaluated in a fraction of the time of all."""


def train_into(folder, **settings):
    """Run the recipe with tiny settings."""
    settings = {
        "output_dir": folder,
        "max_steps": 12,
        "micro_batch_size": 16,
        "sequence_length": 32,
        "warmup_steps": 2,
        "logging_steps": 5,
        **settings,
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["causal_lm", *arguments])
        patch.setattr(causal_lm, "topics", FEW_TOPICS)
        causal_lm.main()


def records_of(folder):
    """Return the records of a run; fail if a line contains NaN or Infinity, which JSON lacks."""

    def refuse(name):
        pytest.fail(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Run twelve updates, and return the run folder."""
    folder = tmp_path_factory.mktemp("run")
    train_into(folder)
    return folder


def test_every_step_has_a_line(run_folder):
    """The metrics file has one record per step, with everything that the cell reports."""
    records = records_of(run_folder)
    steps = [record for record in records if "loss" in record]

    assert [record["step"] for record in steps] == list(range(1, 13))
    assert all(math.isfinite(record["loss"]) for record in steps)
    assert {"overflow", "loss_scale", "learning_rate", "global_norm"} <= set(steps[0])
    assert list(steps[0]["local_norm"]) == [
        "model.embed_tokens",
        *(f"model.layers.{layer}" for layer in range(4)),
        "model.norm",
    ]
    # The groups cover the whole model, so their squares add up to the square of the global norm.
    total = math.hypot(*steps[3]["local_norm"].values())
    assert total == pytest.approx(steps[3]["global_norm"], rel=1e-5)


def test_the_record_of_a_loss_that_is_nan_is_valid_json(tmp_path, monkeypatch):
    """A NaN loss is recorded as the string ``"nan"``, because JSON has no NaN."""
    build_model, losses = causal_lm.build_model, itertools.count()

    def spoil_the_third(module, _, output):
        if module.training and next(losses) == 2:
            output.loss = output.loss * math.nan
        return output

    def build_spoilt(sequence_length):
        model = build_model(sequence_length)
        model.register_forward_hook(spoil_the_third)
        return model

    monkeypatch.setattr(causal_lm, "build_model", build_spoilt)
    monkeypatch.setattr(causal_lm, "evaluate", lambda *_: 1.0)
    train_into(tmp_path, max_steps=3, gradient_accumulation_steps=1)
    steps = [record for record in records_of(tmp_path) if "loss" in record]

    assert [step["loss"] for step in steps if step["overflow"]] == ["nan"]
    assert [step["step"] for step in steps if step["overflow"]] == [3]
    assert set(steps[2]["local_norm"].values()) == {"nan"}


def test_training_lowers_the_loss_on_held_out_text(run_folder):
    """Raw weights predict held-out text better at the end than at the start."""
    first, last = (record for record in records_of(run_folder) if "eval_loss" in record)

    assert (first["step"], last["step"]) == (0, 12)
    assert first["eval_loss"] == pytest.approx(math.log(256), rel=0.05)
    assert last["eval_loss"] < first["eval_loss"] - 0.5
    assert math.isfinite(last["ema_eval_loss"])


def test_run_says_what_it_was(run_folder):
    """The run folder says the settings, the size of the model, and that the run has finished."""
    facts = read_facts(run_folder)
    model = LlamaForCausalLM.from_pretrained(run_folder / "model")

    assert facts["state"] == "finished"
    assert facts["parameters"]["total"] == model.num_parameters()
    assert facts["configuration"]["recipe"]["learning_rate"] == 3e-3
    assert facts["configuration"]["recipe"]["sequence_length"] == 32


def test_models_load_and_averages_differ_from_raw_weights(run_folder):
    """The raw and the averaged model load with `from_pretrained`, and their weights differ."""
    raw = LlamaForCausalLM.from_pretrained(run_folder / "model")
    averaged = LlamaForCausalLM.from_pretrained(run_folder / "model_ema")

    assert all(torch.isfinite(parameter).all() for parameter in averaged.parameters())
    assert not torch.equal(raw.lm_head.weight, averaged.lm_head.weight)


def test_picture_is_drawn(run_folder):
    """The picture is a PNG with the size of three panels and more than 50 colors."""
    with Image.open(run_folder / "run.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == (1350, 1200)
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 50


def test_padding_is_no_target():
    """Every byte of every topic is a target once, and padding is never a target."""
    names = ["assert", "if"]
    dataset = causal_lm.PythonTopics(names, sequence_length=50)
    targets = sum(int((piece["labels"] != causal_lm.IGNORED_LABEL).sum()) for piece in dataset)

    assert targets == sum(len(causal_lm.topics[name].encode()) for name in names)
    assert all(piece["input_ids"].shape == piece["labels"].shape == (50,) for piece in dataset)


@pytest.mark.parametrize(
    ("name", "limit"), [("max_steps", 1), ("micro_batch_size", 1), ("sequence_length", 2)]
)
def test_settings_that_train_nothing_are_refused(name, limit):
    """A setting that is too small is an error that names the setting."""
    with pytest.raises(ValueError, match=f"`{name}` must be >= {limit}, got {limit - 1}"):
        causal_lm.RecipeArguments(**{name: limit - 1})


def test_a_second_run_in_the_same_folder(tmp_path):
    """A second process in a folder prints one line without a traceback, and exits with 2."""
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-m", "mfwrap.recipes.causal_lm", "--output_dir", str(folder)]
    command += ["--sequence_length", "32", "--micro_batch_size", "128"]

    with owning(folder / RUN_LOCK):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(rf"mfwrap: {folder} is in use: process \d+ .*\n", ended.stderr)
