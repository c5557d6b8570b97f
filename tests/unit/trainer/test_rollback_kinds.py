"""A training goes back after each kind of anomaly, and nothing of the fault is left behind."""

import itertools
import json

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback

from mfwrap import StepConfig
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer import MFTrainer, Rollback
from support.small_llama import small_llama
from support.trainer_runs import new_trainer


class Texts(Dataset):
    """Rows of bytes that a network can learn a little of."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index):
        row = (torch.arange(12) * (index % 7 + 1) + index) % 32
        return {"input_ids": row, "labels": row}


def small_mixtral() -> nn.Module:
    """Return a network with two layers of four experts."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=16,
        )
    )


class Once(TrainerCallback):
    """Plant a fault in one step, or in all from it on, until the training has gone back."""

    def __init__(self, kind, step) -> None:
        self._plant, self._step, self._handles = PLANTS[kind], step, []
        self._is_done = False

    def on_train_begin(self, args, state, control, **_):
        """Remove the fault: the training has gone back, or begins."""
        self._is_done |= bool(self._handles) or state.global_step > 0
        for handle in self._handles:
            handle.remove()

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        """Plant the fault."""
        if state.global_step + 1 == self._step and not self._is_done:
            self._handles = list(self._plant(model, optimizer) or ())


def layer_of(model):
    """Return the layer that has the fault."""
    return model.model.layers[0]


def scaled_gradients(weights, factor):
    """Multiply gradients."""
    return [weight.register_hook(lambda gradient: gradient * factor) for weight in weights]


def grown(optimizer, change):
    """Change something after each update."""
    return [unwrapped_optimizer(optimizer).register_step_post_hook(lambda *_: change())]


def first_moments(optimizer, factor):
    """Multiply the first moments of all weights."""
    for state in optimizer.state.values():
        state["exp_avg"].mul_(factor)


def rate_times_300(model, optimizer):
    """Multiply the learning rate of the step."""
    for group in optimizer.param_groups:
        group["lr"] *= 300


def flipped_bit(model, optimizer):
    """Multiply an element of a weight."""
    layer_of(model).mlp.up_proj.weight.data[3, 3] *= 2.0**14


def collapsed_router(model, optimizer):
    """Send all tokens to the same experts."""

    def collapse():
        for layer in model.model.layers:
            layer.mlp.gate.weight.data[1:] = layer.mlp.gate.weight.data[:1]

    return grown(optimizer, collapse)


def growing_query(model, optimizer):
    """Let the attention logits grow."""
    weight = layer_of(model).self_attn.q_proj.weight.data
    return grown(optimizer, lambda: weight.mul_(1.3))


def growing_updates(model, optimizer):
    """Let all updates grow by 6 percent each."""
    sizes = (1e-3 * 1.06**number for number in itertools.count())

    def grow():
        size = next(sizes)
        for weight in model.parameters():
            weight.data.mul_(1 + size)

    # Right before an update, it counts as a part of it.
    return [unwrapped_optimizer(optimizer).register_step_pre_hook(lambda *_: grow())]


PLANTS = {
    "local_norm_spike": lambda model, _: scaled_gradients(
        [model.model.layers[1].post_attention_layernorm.weight], 1800.0
    ),
    "update_spike": lambda _, optimizer: first_moments(optimizer, 1e3),
    "state_spike": flipped_bit,
    "zero_gradient": lambda model, _: scaled_gradients(layer_of(model).parameters(), 0.0),
    "vanishing_gradient": lambda model, _: scaled_gradients(model.parameters(), 0.0),
    "learning_rate_spike": rate_times_300,
    "attention_logits": growing_query,
    "expert_load": collapsed_router,
    "update_growth": growing_updates,
}
"""Faults by the kind of anomaly that they cause."""


def trained(folder, kind, *, updates_before=0, fault=None, skip_rows=None):
    """Train, and return the trainer."""
    torch.manual_seed(0)
    rollback = Rollback(kinds=(kind,), max_rollbacks=2, updates_before=updates_before)
    callbacks = [
        TrainingStateMonitor(
            # Logits grow with the weights, and come first.
            max_attention_logit_format=None if kind == "update_growth" else "jsonl",
            expert_load_format="jsonl" if kind == "expert_load" else None,
            state_interval=10,
        )
    ]
    trainer = new_trainer(
        MFTrainer,
        folder,
        model=small_mixtral() if kind == "expert_load" else small_llama(),
        data=Texts(),
        callbacks=[*callbacks, *([] if fault is None else [Once(kind, fault)])],
        extras={
            "data_collator": None,
            "rollback": rollback if fault is not None else None,
            "skip_rows": skip_rows,
            "step": StepConfig(local_norm=True),
        },
        save_strategy="steps",
        save_steps=5,
        max_steps=110 if kind == "update_growth" else 50,
        learning_rate=3e-4 if kind == "update_growth" else 3e-3,
        lr_scheduler_type="constant",
    )
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTS)
def test_a_fault_that_is_gone(kind, tmp_path):
    """The result is bitwise that of a run without the fault and without the rows."""
    # Early warnings come some time after the fault.
    before = {"attention_logits": 20, "expert_load": 5, "update_growth": 80}.get(kind, 0)
    fault = 23
    trainer = trained(tmp_path / "run", kind, updates_before=before, fault=fault)
    done = json.loads((tmp_path / "run" / "rollbacks.json").read_text())["rollbacks"]
    fresh = trained(tmp_path / "fresh", kind, skip_rows=tmp_path / "run" / "skip_rows.jsonl")

    assert [one["kind"] for one in done] == [kind]
    assert int(done[0]["checkpoint"].partition("-")[2]) < fault <= done[0]["last_step"]
    for (name, weight), other in zip(
        trainer.model.named_parameters(), fresh.model.parameters(), strict=True
    ):
        assert torch.equal(weight, other), name
