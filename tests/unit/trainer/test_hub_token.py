"""MFTrainer pushes what a stock Trainer does, and the access token of the hub is in no file."""

import pickle

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from mfwrap.checkpoints.whole import staging_folder
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.hub_token import without_saved_token
from support.hub import TOKEN, client_of, serving
from support.trainer_runs import new_trainer

# The client of the hub uploads large files in a way that its HTTP library deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


class FinishesPushes(TrainerCallback):
    """Wait for each push of a checkpoint: a late push would find the files of the next one."""

    trainer: Trainer

    def on_save(self, *_, **__):
        self.trainer.push_in_progress.wait_until_done()


def pushed(kind, folder, strategy):
    """Train and push to a stand-in for the hub; return its commits."""
    callback = FinishesPushes()
    with serving() as hub, client_of(hub.url):
        callback.trainer = trainer = new_trainer(
            kind,
            folder,
            save_strategy="steps",
            save_steps=2,
            max_steps=4,
            hub_model_id="user/run",
            hub_always_push=True,
            hub_strategy=strategy,
            hub_token=TOKEN,
            push_to_hub=True,
            callbacks=[callback],
        )
        trainer.train()
        trainer.save_model()
        trainer.push_to_hub()
        return hub.commits


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_has_no_token(protocol):
    """Within the block a token can be used and is pickled as None; afterwards all is as before."""
    args = TrainingArguments("run", hub_token=TOKEN, use_cpu=True)
    with without_saved_token(args):
        pickled = pickle.dumps(args, protocol)
        assert f"Bearer {args.hub_token}" == f"Bearer {TOKEN}"

    assert TOKEN.encode() not in pickled
    assert pickle.loads(pickled).hub_token is None  # noqa: S301  (just pickled)
    assert type(args.hub_token) is str
    assert args.hub_token == TOKEN


def test_arguments_without_a_token():
    """Arguments without a token stay without one."""
    args = TrainingArguments("run", use_cpu=True)
    with without_saved_token(args):
        assert args.hub_token is None


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_pushes_are_those_of_the_stock_trainer(tmp_path, strategy):
    """MFTrainer makes the same commits, without the token that a stock Trainer pushes."""
    stock = pushed(Trainer, tmp_path / "stock", strategy)
    ours = pushed(MFTrainer, tmp_path / "ours", strategy)

    own = {f"last-checkpoint/mfwrap_{name}" for name in
           ("manifest.json", "position.json", "step.json", "step.safetensors")}  # fmt: skip
    assert [commit.title for commit in ours] == [commit.title for commit in stock]
    assert [commit.files.keys() - own for commit in ours] == [one.files.keys() for one in stock]
    for mine, theirs in zip(ours, stock, strict=True):
        for name in {"model.safetensors", "config.json"} & mine.files.keys():
            assert mine.files[name] == theirs.files[name]
    holders = [
        {name for commit in commits for name, one in commit.files.items() if TOKEN.encode() in one}
        for commits in (stock, ours)
    ]
    assert "training_args.bin" in holders[0]  # otherwise nothing would need to be left out
    assert holders[1] == set()


def test_pushed_arguments_are_those_of_the_user(tmp_path):
    """The arguments that are pushed with a checkpoint differ from the user's in the token alone."""
    commits = pushed(MFTrainer, tmp_path, "every_save")
    (tmp_path / "pushed.bin").write_bytes(commits[0].files["training_args.bin"])
    found = torch.load(tmp_path / "pushed.bin", weights_only=False)

    assert found.logging_nan_inf_filter
    assert found.hub_model_id == "user/run"


def test_checkpoints_of_earlier_runs_are_not_pushed(tmp_path):
    """As with a stock Trainer, no push has the folders of checkpoints, whatever their state."""
    new_trainer(MFTrainer, tmp_path, save_strategy="steps", save_steps=2, max_steps=4).train()
    staging = staging_folder(tmp_path / "checkpoint-6")
    (staging / "checkpoint-6").mkdir(parents=True)
    (staging / "checkpoint-6" / "model.safetensors").write_bytes(b"cut off")
    commits = pushed(MFTrainer, tmp_path, "every_save")

    assert {path.name for path in tmp_path.glob("*checkpoint-4")} == {
        "checkpoint-4",
        "_abandoned-checkpoint-4",
    }
    assert {name for commit in commits for name in commit.files if "checkpoint" in name} == set()
