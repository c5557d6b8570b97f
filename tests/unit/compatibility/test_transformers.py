"""The versions of transformers with a Trainer, and the private names that mfwrap uses of it.

tests/unit/trainer/test_surface.py compares signatures and the order of the Trainer's loop.
"""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from mfwrap.compatibility import transformers
from mfwrap.compatibility.foreign import is_installed
from mfwrap.trainer import MFTrainer


def test_a_trainer_that_is_too_old_is_refused(tmp_path, monkeypatch):
    """MFTrainer says which transformers it needs, and what works without it."""
    monkeypatch.setattr("mfwrap.compatibility.foreign.version", lambda _: "4.57.6")
    monkeypatch.setattr("mfwrap.compatibility.transformers.version", lambda _: "4.57.6")

    message = (
        r"MFTrainer needs transformers 5\.5 or newer, got 4\.57\.6; "
        r"`mfwrap\.accelerate\.attach` works with it"
    )
    with pytest.raises(ImportError, match=message):
        MFTrainer(nn.Linear(1, 1), TrainingArguments(str(tmp_path)))


def test_the_installed_release_is_checked():
    """The check raises only with a release that has no Trainer for it."""
    if is_installed("transformers", transformers.TRAINER_RELEASE):
        transformers.check_trainer_release()
    else:
        with pytest.raises(ImportError, match=version("transformers")):
            transformers.check_trainer_release()


def test_sums_of_losses_are_the_trainers_own():
    """`LossSums` reads and sets the attributes of the trainer."""
    trainer = SimpleNamespace(
        _tr_loss=torch.tensor(3.0), _total_loss_scalar=5.0, _globalstep_last_logged=7
    )
    sums = transformers.LossSums(trainer)

    assert (sums.since_last_log, sums.until_last_log, sums.last_logged) == (3.0, 5.0, 7)
    sums.since_last_log, sums.until_last_log, sums.last_logged = torch.tensor(4.0), 6.0, 8
    assert vars(trainer) == {
        "_tr_loss": 4.0,
        "_total_loss_scalar": 6.0,
        "_globalstep_last_logged": 8,
    }


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer, MFTrainer])
def test_a_method_of_the_users_own_is_recognized(kind):
    """A method of a subclass or of the object counts, one of transformers or mfwrap does not."""

    class Own(kind):
        def _prepare_inputs(self, inputs):
            return inputs

    class Below(kind, type("Mixin", (), {"get_batch_samples": print})):
        pass

    plain, own, below = object.__new__(kind), object.__new__(Own), object.__new__(Below)
    assert not transformers.has_own(plain, "_prepare_inputs", "get_batch_samples")
    assert not transformers.makes_batches_itself(plain)
    assert transformers.has_own(own, "_prepare_inputs")
    assert transformers.makes_batches_itself(own)
    assert not transformers.has_own(own, "get_batch_samples")
    assert transformers.has_own(below, "get_batch_samples")
    plain.get_batch_samples = print
    assert transformers.makes_batches_itself(plain)


def test_who_may_read_a_checkpoint_that_is_saved():
    """A `_save_checkpoint` of the user's own may; that of a Trainer of TRL only writes a card."""

    class Own(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)

    of_trl = type("OfTRL", (Trainer,), {"_save_checkpoint": print, "__module__": "trl.trainer.sft"})
    below = type("Below", (of_trl, Own), {})
    found = [
        transformers.completes_checkpoints_itself(object.__new__(kind))
        for kind in (MFTrainer, Own, of_trl, below)
    ]
    assert found == [False, True, False, True]
    plain = object.__new__(Trainer)
    plain._save_checkpoint = print
    assert transformers.completes_checkpoints_itself(plain)


def test_a_model_without_marks_has_none():
    """A network of torch ignores no keys and is in no stage."""
    network = nn.Linear(1, 1)

    assert transformers.unsaved_keys(network) == set()
    assert transformers.pipeline_stage_of(network) is None
    assert not transformers.reduces_partial_gradients(network.forward)
