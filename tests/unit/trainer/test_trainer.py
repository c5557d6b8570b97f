"""MFTrainer declares the Trainer's parameters, and hands each of them on."""

import inspect

import pytest
from transformers import Trainer

from mfwrap.trainer import MFTrainer


def test_the_trainers_own_parameters_are_declared():
    """MFTrainer declares all parameters of the installed Trainer, followed by its own."""
    expected = list(inspect.signature(Trainer.__init__).parameters.values())
    found = list(inspect.signature(MFTrainer.__init__).parameters.values())
    form = [(each.name, each.kind, each.default) for each in found]

    assert form[: len(expected)] == [(each.name, each.kind, each.default) for each in expected]
    added = {each.name: each for each in found[len(expected) :]}
    assert list(added) == [
        *("step", "ema", "scale_sense", "communication_hook", "data_skip_steps", "skip_rows"),
        *("rollback", "rampup_batch_size", "eval_per_token_loss", "use_stateful_dataloader"),
        *("loss_by", "row_losses", "async_save"),
    ]
    assert all(each.kind is each.KEYWORD_ONLY for each in added.values())
    flags = ("eval_per_token_loss", "use_stateful_dataloader", "row_losses", "async_save")
    assert not any(added.pop(name).default for name in flags)
    assert all(each.default is None for each in added.values())


def test_every_parameter_reaches_the_trainer(monkeypatch):
    """MFTrainer passes each argument on to the Trainer under the same name."""
    arrived = {}
    signature = inspect.signature(Trainer.__init__)

    def note(self, *args, **keywords):
        arrived.update(signature.bind(self, *args, **keywords).arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "__init__", note)
    given = {name: object() for name in list(signature.parameters)[1:]}

    with pytest.raises(KeyboardInterrupt):
        MFTrainer(**given)

    assert {name: value for name, value in arrived.items() if name != "self"} == given
