"""The script with a loop of its own trains in each precision; it needs no optional package."""

import json
import math
import sys

import pytest

from mfwrap.recipes import causal_lm
from support.devices import each_device


@pytest.mark.slow
@each_device
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_default_recipe(precision, device, tmp_path, monkeypatch):
    """The loss falls, and each record names the loss scale and the norms."""
    if (device, precision) == ("cpu", "fp16"):
        pytest.skip("accelerate has no fp16 on a CPU")
    settings = {
        "output_dir": tmp_path,
        "max_steps": 24,
        "micro_batch_size": 8,
        "sequence_length": 32,
        "warmup_steps": 4,
        "mixed_precision": precision,
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    monkeypatch.setattr(sys, "argv", ["causal_lm", *arguments])
    causal_lm.main()
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    facts = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    losses = [step["loss"] for step in steps if not step["overflow"]]

    assert [step["step"] for step in steps] == list(range(1, 25))
    assert losses[-1] < 0.9 * losses[0]
    assert all(math.isfinite(norm) for norm in steps[-1]["local_norm"].values())
    if device == "cuda":
        assert facts["hardware"]["device"] == "cuda"
