"""Models of transformers train on a GPU as on a CPU, in each precision."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.device_runs import everything, small_trainer
from support.devices import each_device
from support.trainer_runs import Counting, padded, train, values

PRECISIONS = {"float32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
TOLERANCES = {"float32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}


def llama():
    """Return a small Llama without dropout, whose attention is torch's."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def trained(folder, device, precision, callbacks=()):
    """Train ten updates of two micro-batches with padding; return the run."""
    trainer = small_trainer(
        folder,
        device,
        model=llama,
        data=Counting(64),
        callbacks=callbacks,
        extras=everything() | {"data_collator": padded},
        max_steps=10,
        learning_rate=3e-3,
        logging_strategy="steps",
        logging_steps=1,
        **PRECISIONS[precision],
    )
    return train(trainer)


@each_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_and_norms(precision, device, tmp_path):
    """Losses and norms are those of float32 on a CPU, within the precision; attention is observed.

    The mean loss of an update is over all targets of both micro-batches.
    """
    monitor = TrainingStateMonitor(
        folder=tmp_path / "run", step_interval=1, max_attention_logit_format=["jsonl"]
    )
    expected = trained(tmp_path / "cpu", "cpu", "float32")
    found = trained(tmp_path / "run", device, precision, [monitor])
    tolerance = TOLERANCES[precision]
    lines = (tmp_path / "run" / "training_state.jsonl").read_text(encoding="utf-8").splitlines()
    logits = [
        value
        for record in map(json.loads, lines)
        for name, value in record.items()
        if "logit" in name and isinstance(value, float)
    ]

    assert isinstance(found.trainer, MFTrainer)
    assert values(found, "loss") == pytest.approx(values(expected, "loss"), rel=tolerance)
    norms = values(found, "grad_norm"), values(expected, "grad_norm")
    assert len(norms[1]) == 10
    assert norms[0] == pytest.approx(norms[1], rel=10 * tolerance)
    assert values(found, "loss")[-1] < 0.9 * values(found, "loss")[0]
    assert logits
    assert all(map(math.isfinite, logits))
    assert all(p.dtype == torch.float32 for p in found.trainer.model.parameters())
