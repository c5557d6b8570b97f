"""MFTrainer resumes what a stock Trainer resumes, and ends with the same weights."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer

from mfwrap.trainer import MFTrainer
from support.checkpoint_folders import split_weights
from support.trainer_runs import Counting, new_trainer

pytestmark = pytest.mark.filterwarnings("ignore:no state of the step in")  # of a stock Trainer
KINDS = {"stock": Trainer, "MFTrainer": MFTrainer}
NUM_STEPS = 6
"""Steps of a whole training: two epochs of three steps."""


class Seen(nn.Module):
    """A network with a buffer that grows: the first token of each row, in the order of training.

    Row number n of `Counting` begins with token n. The parameter `scales` grows, too: it has an
    element for each row seen when the network was loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(32, 4), nn.Linear(4, 32)
        self.register_buffer("seen", torch.empty(0, dtype=torch.int64))
        self.scales = nn.Parameter(torch.ones(1))

    def forward(self, input_ids, labels=None, attention_mask=None):
        """Record the rows, and return the loss."""
        if self.training:
            self.seen = torch.cat([self.seen, input_ids[:, 0]])
        logits = self.linear(self.embedding(input_ids)) * self.scales.mean()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}

    def resize(self, state):
        """Give the buffer the size that it has in a state."""
        self.seen = torch.empty_like(state["seen"])


class Method(Seen):
    """Resize the buffer in ``load_state_dict``."""

    def load_state_dict(self, state_dict, *arguments, **keywords):
        """Resize the buffer, and load."""
        self.resize(state_dict)
        return super().load_state_dict(state_dict, *arguments, **keywords)


class Hook(Seen):
    """Resize the buffer in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda module, state, *_: module.resize(state))


class Growing(Hook):
    """Replace the parameter by a longer one, too."""

    def resize(self, state):
        """Resize buffer and parameter: the saved elements, and an element for each row seen."""
        super().resize(state)
        state["scales"] = torch.cat([state["scales"], torch.ones(len(state["seen"]))])
        self.scales = nn.Parameter(torch.empty_like(state["scales"]))


def trainer_of(kind, folder, network=Seen, **arguments):
    """Return a trainer of two epochs that saves after each step."""
    saves = {"save_strategy": "steps", "save_steps": 1}
    arguments = {"max_steps": NUM_STEPS, "gradient_accumulation_steps": 1} | saves | arguments
    return new_trainer(kind, folder, model=network(), data=Counting(6, 4), **arguments)


def state_of(trainer):
    """Return the final weights and buffers."""
    return trainer.model.state_dict()


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("network", [Method, Hook])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_data_in_a_buffer_that_grows(tmp_path, kind, network):
    """A training of a network that resizes a buffer when it is loaded resumes exactly."""
    whole = trainer_of(KINDS[kind], tmp_path / "whole", network)
    whole.train()
    again = trainer_of(KINDS[kind], tmp_path / "again", network, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))

    assert len(whole.model.seen) == 2 * NUM_STEPS
    for name, expected in state_of(whole).items():
        assert torch.equal(state_of(again)[name], expected), name


def test_a_parameter_that_is_replaced_when_it_is_loaded(tmp_path):
    """A parameter that replaces another one at loading is trained, as in a stock Trainer."""
    ends = {}
    for name, kind in KINDS.items():
        settings = {"network": Growing, "save_only_model": True}
        trainer_of(kind, tmp_path / name, **settings, max_steps=2).train()
        again = trainer_of(kind, tmp_path / f"{name} again", **settings, max_steps=4)
        again.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
        ends[name] = state_of(again)

    assert ends["MFTrainer"]["scales"].shape == (5,)
    assert (ends["MFTrainer"]["scales"][1:] != 1).all()
    for name, expected in ends["stock"].items():
        torch.testing.assert_close(ends["MFTrainer"][name], expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    """Return the folder of a whole run of a stock Trainer or MFTrainer, and its final state."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_of(KINDS[request.param], folder, save_steps=4)
    trainer.train()
    return folder, state_of(trainer)


def renamed(checkpoint):
    """Rename the checkpoint so that its name has no step."""
    return str(checkpoint.rename(checkpoint.with_name("good")))


def linked(checkpoint):
    """Link to the checkpoint from another folder."""
    link = checkpoint.parent.parent / "latest"
    link.symlink_to(checkpoint)
    return str(link)


def relative(checkpoint):
    """Name the checkpoint by a relative path."""
    return os.path.relpath(checkpoint)


def with_slash(checkpoint):
    """Name the checkpoint with a slash at the end."""
    return f"{checkpoint}/"


def with_other_files(checkpoint):
    """Put files and folders of other tools into the checkpoint."""
    (checkpoint / "notes.txt").write_text("the best one")
    (checkpoint / ".cache").mkdir()
    (checkpoint / ".cache" / "lock").touch()
    return str(checkpoint)


def split(checkpoint):
    """Split the weights into a file for each tensor, with an index."""
    assert len(split_weights(checkpoint)) > 1
    return str(checkpoint)


@pytest.mark.fast_sample(5)
@pytest.mark.parametrize(
    "prepare", [renamed, linked, relative, with_slash, Path, with_other_files, split]
)
def test_checkpoints_that_can_be_resumed(run, tmp_path, monkeypatch, prepare):
    """A checkpoint may be moved, renamed, linked, and split; its path may have any form."""
    folder, expected = run
    monkeypatch.chdir(tmp_path)
    checkpoint = Path(shutil.copytree(folder / "checkpoint-4", tmp_path / "old" / "checkpoint-4"))
    trainer = trainer_of(MFTrainer, tmp_path / "new", save_strategy="no")
    with torch.no_grad():
        trainer.model.linear.bias.zero_()
    trainer.model.seen = torch.zeros(8, dtype=torch.int64)

    trainer.train(resume_from_checkpoint=prepare(checkpoint))

    assert trainer.state.global_step == NUM_STEPS
    for name, value in state_of(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_the_newest_checkpoint_of_the_run(run, tmp_path):
    """``resume_from_checkpoint=True`` resumes the newest checkpoint of a run of either Trainer."""
    folder, expected = run
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    trainer = trainer_of(MFTrainer, tmp_path, save_strategy="no")
    trainer.model.seen = torch.zeros(8, dtype=torch.int64)

    trainer.train(resume_from_checkpoint=True)

    for name, value in state_of(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
