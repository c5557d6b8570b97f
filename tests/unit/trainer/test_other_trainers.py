"""Trainers of other libraries do the same with MFTrainerMixin as without, and resume exactly."""

import math
from collections import deque
from pathlib import Path

import pytest
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging

from mfwrap.compatibility.other_trainers import kept_attributes
from mfwrap.trainer import MFTrainerMixin
from support.other_trainers import OTHERS, new_trainer
from support.trainer_runs import assert_same_weights, logged, train

# The libraries raise warnings about their own code, which cannot be fixed here.
pytestmark = pytest.mark.filterwarnings("ignore")

# Clipped gradients are rounded differently. Where large terms of a loss cancel, as in RLOO, such a
# difference can be any part of the loss.
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
BEST = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}


def assert_covers(stock, ours):
    """Fail unless our log has all values of the stock log; only the norm may be rounded."""
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in stock]
    for expected, actual in zip(stock, ours, strict=True):
        for name, value in expected.items():
            rounding = 1e-6 if name == "grad_norm" else 0.0
            close = math.isclose(actual[name], value, rel_tol=rounding)
            same = close or (math.isnan(value) and math.isnan(actual[name]))
            assert same, f"step {expected['step']}: {name} is {actual[name]}, not {value}"


def card_of(trainer, folder):
    """Return a trainer's model card."""
    trainer.create_model_card()
    text = Path(trainer.args.output_dir, "README.md").read_text(encoding="utf-8")
    return text.replace(str(folder), "")


def assert_extends(stock, ours):
    """Fail unless our card has all lines of the stock card but times, and a section of its own."""
    lines = [line.strip() for line in ours.splitlines()]
    missing = [line for line in stock.splitlines() if line.strip() not in lines]
    assert [line for line in missing if not line.endswith(" seconds")] == []
    assert "## Training with mfwrap" in lines


ONE_OF_EACH_LIBRARY = {"Seq2Seq", "SparseEncoder", "GRPO"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH_LIBRARY else pytest.mark.slow)
        for name in OTHERS
    ],
)
def test_a_trainer_of_another_library(name, tmp_path):
    """It trains, logs, evaluates, saves, loads the best model and writes its card as without."""
    logging.set_verbosity_error()  # a card lists arguments whose defaults depend on this
    settings = SAVING | (BEST if OTHERS[name].evaluates else {})
    runs, cards = {}, {}
    for label, bases in (("stock", ()), ("ours", (MFTrainerMixin,))):
        folder = tmp_path / label
        runs[label] = train(new_trainer(name, folder / "run", *bases, **settings))
        cards[label] = card_of(runs[label].trainer, folder)
    halfway = tmp_path / "ours" / "run" / "checkpoint-3"
    again = new_trainer(name, tmp_path / "again" / "run", MFTrainerMixin, **settings)
    resumed = train(again, halfway)

    assert_covers(logged(runs["stock"]), logged(runs["ours"]))
    assert_same_weights(runs["stock"], runs["ours"])
    assert logged(resumed, after=3) == logged(runs["ours"], after=3)
    assert_same_weights(runs["ours"], resumed)
    assert_extends(cards["stock"], cards["ours"])


OF_STOCK = {
    "_globalstep_last_logged",
    "_mixed_mesh_grads",
    "_total_loss_scalar",
    "_tr_loss",
    "current_flos",
    "current_gradient_accumulation_steps",
}
"""Attributes of the stock Trainer, which itself or `mfwrap.trainer.log` restores."""


def plain(value):
    """Return numbers, texts and tensors in lists; None if a value holds any other object."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return [value]
    if isinstance(value, Tensor):
        return [value.tolist()]
    if isinstance(value, dict):
        value = [each for item in value.items() for each in item]
    if not isinstance(value, (list, tuple, set, deque)):
        return None
    parts = [plain(each) for each in value]
    return None if None in parts else parts


def plain_attributes(trainer):
    """Return a trainer's attributes that hold numbers, texts, tensors and containers of them."""
    attributes = {name: plain(value) for name, value in vars(trainer).items()}
    return {name: str(value) for name, value in attributes.items() if value is not None}


class Changes(TrainerCallback):
    """Collect the attributes of a trainer that change during its training."""

    def __init__(self) -> None:
        self.trainer = None
        self.names = set()

    def on_train_begin(self, *args, **kwargs):
        self.before = plain_attributes(self.trainer)

    def on_step_end(self, *args, **kwargs):
        now = plain_attributes(self.trainer)
        self.names |= {name for name, text in self.before.items() if now.get(name) != text}


@pytest.mark.fast_sample(6)
@pytest.mark.parametrize("name", OTHERS)
def test_what_a_trainer_changes_is_saved(name, tmp_path):
    """Each attribute that changes during a training is one that a checkpoint holds.

    If this fails with a new release: list the attribute in `mfwrap.compatibility.other_trainers` if
    a resume needs it.
    """
    changes = Changes()
    changes.trainer = trainer = new_trainer(name, tmp_path, extras={"callbacks": [changes]})
    train(trainer)

    assert changes.names - OF_STOCK - set(kept_attributes(trainer)) == set()
