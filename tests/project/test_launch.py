"""The recipe scripts train with two processes under torchrun, without changes."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from mfwrap.records.json_lines import read_json_lines
from mfwrap.records.run_record import read_run

pytestmark = pytest.mark.slow

SMALL = ["--micro_batch_size=2", "--sequence_length=32", "--warmup_steps=2"]
TIMEOUT_SECONDS = 480
"""Time limit of one training; long enough for a slow machine."""


def launch(recipe, folder, *settings):
    """Run a recipe with torchrun on two processes, and return their output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--standalone", "-m", f"mfwrap.recipes.{recipe}", f"--output_dir={folder}"]
    ended = subprocess.run(
        [*command, *SMALL, *settings],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def test_the_cells_recipe(tmp_path):
    """Only the main process logs and saves the model; local norms of both ranks are recorded."""
    printed = launch("causal_lm", tmp_path, "--max_steps=6", "--logging_steps=2")
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
    record = read_run(tmp_path)

    assert steps == [1, 2, 3, 4, 5, 6]
    assert printed.count("{ Epoch") == 3
    assert printed.count("loss on held-out text") == 1
    assert list(record.local_norms) == [0, 1]
    other = read_json_lines(tmp_path / "local_norms_rank1.jsonl")
    own = read_json_lines(tmp_path / "local_norms.jsonl")
    assert [each["step"] for each in other] == [2, 4, 6]
    # The two ranks train on different data, so their norms differ.
    assert all(ours != theirs for ours, theirs in zip(own, other, strict=True))
    assert (tmp_path / "run.png").exists()
    for name in ("model", "model_ema"):
        weights = LlamaForCausalLM.from_pretrained(tmp_path / name).parameters()
        assert all(torch.isfinite(weight).all() for weight in weights)


def test_accelerates_loop(tmp_path):
    """Two processes need half as many updates; a checkpoint has the random states of both."""
    settings = ["--num_train_epochs=1", "--max_samples=48", "--per_print_times=2"]
    printed = launch("accelerate_loop", tmp_path, *settings, "--checkpointing_steps=3")
    names = {path.name for path in (tmp_path / "step_6").iterdir()}

    # 48 texts make 24 micro-batches, 12 on each process. 12 micro-batches make 6 updates, and every
    # second update is printed.
    assert printed.count("{ Epoch") == 3
    assert printed.count("loss on held-out text") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "step_3", "step_6"]
    assert {"mfwrap_step.json", "mfwrap_step.safetensors", "model.safetensors"} <= names
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= names
    weights = LlamaForCausalLM.from_pretrained(tmp_path / "model").parameters()
    assert all(torch.isfinite(weight).all() for weight in weights)
