"""Weights that the optimizer trains outside of the model are in a checkpoint."""

import pytest
import torch
from torch import nn
from transformers import Trainer

from mfwrap.checkpoints.manifest import write_manifest
from mfwrap.trainer import MFTrainerMixin
from support.trainer_runs import (
    assert_same_log,
    assert_same_weights,
    logged,
    messages_of,
    new_trainer,
    train,
)

FILE = "mfwrap_outer_weights.safetensors"


class LearnedFactor(Trainer):
    """A trainer whose loss has a weight of its own, in the first group of the optimizer."""

    num_factors = 1

    def create_optimizer(self, *args, **keywords):
        if self.optimizer is None:
            self.factors = nn.Parameter(torch.ones(self.num_factors))
            super().create_optimizer(*args, **keywords)
            self.optimizer.param_groups[0]["params"].insert(0, self.factors)
            # The Trainer releases the gradients of its model only.
            self.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        return self.optimizer

    def compute_loss(self, model, inputs, *args, **keywords):
        found = super().compute_loss(model, inputs, *args, **keywords)
        factor = self.factors.exp().mean()
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor


class Ours(MFTrainerMixin, LearnedFactor):
    """The same with the mixin."""


class TwoFactors(Ours):
    """The same with another number of weights."""

    num_factors = 2


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0}


def test_a_weight_of_the_loss(tmp_path):
    """The weight is trained as by a stock Trainer, and a resumed training continues with it."""
    stock = train(new_trainer(LearnedFactor, tmp_path / "stock", **SAVING))
    whole = train(new_trainer(Ours, tmp_path / "ours", **SAVING))
    checkpoint = tmp_path / "ours" / "checkpoint-2"
    resumed = train(new_trainer(Ours, tmp_path / "again", **SAVING), checkpoint)

    assert_same_log(stock, whole)
    assert_same_weights(stock, whole)
    assert logged(resumed, after=2) == logged(whole, after=2)
    assert_same_weights(whole, resumed)
    assert torch.equal(resumed.trainer.factors, whole.trainer.factors)
    assert whole.trainer.factors.item() != 1


def test_a_checkpoint_without_the_weight(tmp_path):
    """A resume from an older checkpoint says that the weight starts again."""
    train(new_trainer(Ours, tmp_path, **SAVING))
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / FILE).unlink()
    write_manifest(checkpoint)
    with messages_of("mfwrap.trainer.outer_weights") as messages:
        train(new_trainer(Ours, tmp_path / "again", **SAVING), checkpoint)

    (message,) = messages
    assert "does not hold the 1 weights that the optimizer trains outside of the mod" in message


def test_weights_of_another_shape_are_refused(tmp_path):
    """The error names the file and both shapes."""
    train(new_trainer(Ours, tmp_path, **SAVING))

    message = rf"weights in {FILE} have the shapes {{'0/0': \[1\]}}, but .* have {{'0/0': \[2\]}}"
    with pytest.raises(ValueError, match=message):
        train(new_trainer(TwoFactors, tmp_path / "again", **SAVING), tmp_path / "checkpoint-2")


def test_a_trainer_without_such_weights(tmp_path):
    """Usually there is no such file."""
    train(new_trainer(type("Plain", (MFTrainerMixin, Trainer), {}), tmp_path, **SAVING))

    assert not (tmp_path / "checkpoint-2" / FILE).exists()
