"""What is written after the Trainer's own files is what the Trainer would have written."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from mfwrap.checkpoints.checksums import checksum
from mfwrap.checkpoints.host_copies import HostCopies
from mfwrap.trainer.deferred_files import DeferredFiles
from support.resumed_training import PLAIN, new_trainer

CONFIG = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)


class Plain(nn.Module):
    """A network that transformers does not know; its second layer may be a part of the first."""

    def __init__(self, overlap=0):
        super().__init__()
        whole = torch.randn(3, 2)
        self.a = nn.Parameter(whole)
        self.b = nn.Parameter(whole.detach()[:overlap]) if overlap else nn.Parameter(torch.ones(2))
        self.register_buffer("place", torch.arange(2))
        self.register_buffer("empty", torch.empty(0))


def tied():
    """Return a model whose last layer has the weights of the embedding."""
    return GPT2LMHeadModel(CONFIG)


def adapted():
    """Return a model with an adapter, of which only the adapter is saved."""
    return get_peft_model(tied(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))


def trainer_of(model, folder):
    """Return a trainer that has an optimizer with a state."""
    trainer = new_trainer(folder, PLAIN, model=model)
    trainer.create_optimizer_and_scheduler(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step()
    return trainer


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize(
    ("make", "is_later"),
    [(tied, True), (Plain, True), (adapted, False), (functools.partial(Plain, 2), False)],
)
def test_weights(tmp_path, make, is_later):
    """The file is byte for byte that of the Trainer, and has the weights of the copy.

    Adapters, and weights that overlap, are written at once.
    """
    trainer = trainer_of(make(), tmp_path / "run")
    now, later = tmp_path / "now", tmp_path / "later"
    refuses = is_later is False and isinstance(trainer.model, Plain)
    if not refuses:
        Trainer._save(trainer, str(now))

    files = DeferredFiles(trainer, HostCopies())
    save = functools.partial(Trainer._save, trainer, str(later))
    if refuses:  # as safetensors does
        with pytest.raises(RuntimeError, match="share memory"):
            files.save_weights(later, save)
        return
    files.save_weights(later, save)
    weights = next(now.glob("*.safetensors")).name
    assert ((later / weights).read_bytes() == (now / weights).read_bytes()) != is_later
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1)
    found = files.write()

    names = sorted(path.name for path in now.iterdir())
    assert sorted(path.name for path in later.iterdir()) == names
    for name in names:
        assert (later / name).read_bytes() == (now / name).read_bytes(), name
    assert {extent.path for extent in found} == ({later / weights} if is_later else set())
    assert found == {extent: checksum(extent) for extent in found}


def test_the_optimizer(tmp_path):
    """The schedule is written at once, the state of the optimizer later, from the copy."""
    trainer = trainer_of(tied(), tmp_path / "run")
    expected = {key: value["exp_avg"].clone() for key, value in enumerate(
        trainer.optimizer.state.values())}  # fmt: skip
    files = DeferredFiles(trainer, HostCopies())
    save = functools.partial(Trainer._save_optimizer_and_scheduler, trainer, str(tmp_path))
    files.save_optimizer(tmp_path, save)
    assert torch.load(tmp_path / "optimizer.pt", weights_only=True) == {}
    schedule = (tmp_path / "scheduler.pt").read_bytes()
    trainer.optimizer.step()
    found = files.write()

    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert all(torch.equal(saved["state"][key]["exp_avg"], each) for key, each in expected.items())
    assert len(saved["state"]) == len(expected)
    assert (tmp_path / "scheduler.pt").read_bytes() == schedule
    assert [extent.path.name for extent in found] == ["optimizer.pt"]


def test_another_format(tmp_path):
    """Weights that go to a file without names are saved at once."""
    trainer = trainer_of(tied(), tmp_path / "run")
    files = DeferredFiles(trainer, HostCopies())
    saved = []

    def save(state_dict=None):
        saved.append(state_dict)
        torch.save(trainer.model.state_dict() if state_dict is None else state_dict,
                   tmp_path / "pytorch_model.bin")  # fmt: skip

    files.save_weights(tmp_path, save)
    assert saved[-1] is None
    assert len(saved) == 2
    assert files.write() == {}
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(found["lm_head.weight"], trainer.model.lm_head.weight)


def test_a_tensor_like_a_stand_in(tmp_path):
    """A weight of two integers is saved as it is."""
    model = Plain()
    trainer = trainer_of(model, tmp_path / "run")
    files = DeferredFiles(trainer, HostCopies())
    files.save_weights(tmp_path, functools.partial(Trainer._save, trainer, str(tmp_path)))
    files.write()
    assert load_file(tmp_path / "model.safetensors")["place"].tolist() == [0, 1]
