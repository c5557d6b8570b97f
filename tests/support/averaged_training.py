"""Set up runs of both Trainers with averaged weights, and compute the expected averages."""

from dataclasses import replace

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback

from mfwrap import ExponentialMovingAverage
from mfwrap.trainer import MFTrainer
from support.resumed_training import PLAIN, new_trainer

__all__ = [
    "DECAY",
    "EPOCHS",
    "KINDS",
    "SKIPPING",
    "STEPS",
    "WEIGHT",
    "Follower",
    "evaluated_by_hand",
    "weights_of",
]

DECAY = 0.5
WEIGHT = "transformer.wte.weight"
STEPS = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    # Prefer the highest loss, so that the best checkpoint is not the last one.
    "greater_is_better": True,
    # Without warm-up, the first update already changes the weights, so the averages differ from the
    # weights from the first update on.
    "warmup_steps": 0,
}
EPOCHS = STEPS | {"eval_strategy": "epoch", "save_strategy": "epoch"}
SKIPPING = replace(PLAIN, spoilt_rows=(25, 40))
"""Settings with which the 4th, 5th, 7th and 9th update are skipped."""


class Follower(TrainerCallback):
    """Record the weights at each event, and average them with torch's own function.

    At each event the follower is called before the tested callback, so the follower sees the
    weights that were evaluated or saved.
    """

    def __init__(self) -> None:
        self.raw, self.averages, self.evaluated, self.saved = {}, {}, {}, {}
        self._average = None

    def on_train_begin(self, _args, _state, _control, model=None, **_) -> None:
        """Start the average at the current weights."""
        self._before = weights_of(model)
        self._average = weights_of(model)

    def on_step_end(self, _args, state, _control, model=None, **_) -> None:
        """Average the weights if the update has changed them."""
        weights = weights_of(model)
        if not all(torch.equal(weights[name], value) for name, value in self._before.items()):
            averages, values = list(self._average.values()), list(weights.values())
            get_ema_multi_avg_fn(DECAY)(averages, values, torch.tensor(1))
        self._before = weights
        self.raw[state.global_step] = weights
        self.averages[state.global_step] = {k: v.clone() for k, v in self._average.items()}

    def on_evaluate(self, _args, state, _control, model=None, **_) -> None:
        """Record the evaluated weights."""
        self.evaluated[state.global_step] = weights_of(model)

    def on_save(self, _args, state, _control, model=None, **_) -> None:
        """Record the saved weights."""
        self.saved[state.global_step] = weights_of(model)


def weights_of(model):
    """Return copies of the parameters by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def average(model):
    """Return an average for an `MFTrainer`."""
    return ExponentialMovingAverage(model, DECAY)


KINDS = {
    "its average": (MFTrainer, {}, {"trainer_settings": {"ema": average}}),
    "own average": (MFTrainer, {"decay": DECAY}, {}),
    "stock": (Trainer, {"decay": DECAY}, {}),
}


def evaluated_by_hand(folder, weights):
    """Return the evaluation loss of `weights`, computed by a stock Trainer without an average."""
    trainer = new_trainer(folder, PLAIN, kind=Trainer)
    trainer.model.load_state_dict(weights, strict=False)
    return trainer.evaluate()["eval_loss"]
