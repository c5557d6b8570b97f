"""The recipe with accelerate's own loop works with tiny settings."""

import io
import math
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from mfwrap.recipes import accelerate_loop
from support.trainer_runs import messages_of

RECORD = re.compile(r"{ Epoch:\[ *(\d+)/ *(\d+)\], step:\[ *(\d+)/ *(\d+)\], loss:\[ *([\d.]+)/")


def run(monkeypatch, folder: Path, **settings) -> Path:
    """Run the recipe; return the folder of the model that it saves."""
    settings = {
        "output_dir": folder,
        "num_train_epochs": 2,
        "max_samples": 90,
        "micro_batch_size": 4,
        "sequence_length": 32,
        "warmup_steps": 2,
        "checkpointing_steps": 5,
        "per_print_times": 5,
    } | settings
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    monkeypatch.setattr(sys, "argv", ["accelerate_loop", *arguments])
    accelerate_loop.main()
    return folder / "model"


@pytest.fixture(scope="module")
def said():
    """Return what the run without a stop logs and prints."""
    return {}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, said):
    """Run two epochs without a stop, and return the folder of the model."""
    folder, out = tmp_path_factory.mktemp("whole"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), messages_of("mfwrap") as log:
        model = run(patch, folder)
    said.update(log=log, out=out.getvalue())
    return model


def weights(folder: Path) -> list[torch.Tensor]:
    """Return the weights of a saved model."""
    return list(LlamaForCausalLM.from_pretrained(folder).parameters())


@pytest.mark.usefixtures("whole_run")
def test_the_loop_trains_prints_and_evaluates(said):
    """Every fifth update is logged in MindFormers' format, and each epoch is evaluated.

    An evaluation covers the raw and the averaged weights.
    """
    records = [match.groups() for line in said["log"] if (match := RECORD.search(line))]
    # An epoch of 90 texts has 23 micro-batches, which make 12 updates. The last micro-batch is
    # smaller.
    assert [record[:4] for record in records] == [
        ("1", "2", "5", "12"),
        ("1", "2", "10", "12"),
        ("2", "2", "3", "12"),
        ("2", "2", "8", "12"),
    ]
    losses = [float(record[4]) for record in records]
    assert losses[-1] < losses[0] - 1
    pattern = r"epoch (\d): loss on held-out text ([\d.]+) with raw weights, ([\d.]+) with averaged"
    first, second = re.findall(pattern, said["out"])
    assert float(second[1]) < float(first[1]) < math.log(256)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("step", [5, 20])
def test_a_resumed_run_is_the_run_that_was_not_stopped(whole_run, monkeypatch, tmp_path, step):
    """A run that resumes in the first or second epoch ends with bitwise the same weights."""
    checkpoint = whole_run.parent / f"step_{step}"
    resumed = run(monkeypatch, tmp_path, resume_from_checkpoint=checkpoint)

    for ours, theirs in zip(weights(resumed), weights(whole_run), strict=True):
        assert torch.equal(ours, theirs)


def test_one_command_that_comes_back(whole_run, monkeypatch, tmp_path):
    """With ``auto``, a run resumes from the newest intact checkpoint in its folder."""
    for step in (5, 10):
        shutil.copytree(whole_run.parent / f"step_{step}", tmp_path / f"step_{step}")
    (tmp_path / "step_10" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"step_10: model.safetensors .*; resuming from .*step_5$"):
        resumed = run(monkeypatch, tmp_path, resume_from_checkpoint="auto")

    for ours, theirs in zip(weights(resumed), weights(whole_run), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_holds_the_step(whole_run):
    """A checkpoint holds the step's files in addition to accelerate's files."""
    names = {path.name for path in (whole_run.parent / "step_5").iterdir()}

    assert {"mfwrap_step.json", "mfwrap_step.safetensors", "model.safetensors"} <= names
