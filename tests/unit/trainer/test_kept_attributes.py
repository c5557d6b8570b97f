"""What a Trainer of another library counts in its attributes continues after a resume."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mfwrap.checkpoints.manifest import write_manifest
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from support.other_trainers import new_trainer
from support.ranks.other_trainers import count_tokens
from support.trainer_runs import assert_same_weights, logged, messages_of, train
from support.trainer_runs import new_trainer as new_plain_trainer

# The libraries raise warnings about their own code, which cannot be fixed here.
pytestmark = pytest.mark.filterwarnings("ignore")

SAVING = {"save_strategy": "steps", "save_steps": 3}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3}
FILE = "mfwrap_attributes.safetensors"


def runs(name, folder, forget=(), **settings):
    """Return an uninterrupted run, and one that resumes from the middle of a logging interval.

    Args:
        name: Name of the trainer.
        folder: Folder for both runs.
        forget: Files to remove from the checkpoint first.
        settings: Further training arguments.
    """
    settings = SAVING | settings
    whole = train(new_trainer(name, folder / "run", MFTrainerMixin, **settings))
    checkpoint = folder / "run" / "checkpoint-3"
    for file in forget:
        (checkpoint / file).unlink()
        write_manifest(checkpoint)
    again = new_trainer(name, folder / "again", MFTrainerMixin, **settings)
    return whole, train(again, checkpoint)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SFT", EVALUATING),
        pytest.param("DPO", EVALUATING, marks=pytest.mark.slow),
        pytest.param("KTO", {}, marks=pytest.mark.slow),
        pytest.param("Reward", EVALUATING, marks=pytest.mark.slow),
        ("GRPO", {"num_iterations": 2}),
        pytest.param("RLOO", {}, marks=pytest.mark.slow),
        pytest.param("CPO", {}, marks=pytest.mark.slow),
        ("SparseEncoder", {}),
    ],
)
def test_counts_and_metrics_continue(tmp_path, name, settings):
    """Counts since the start, metrics since the last log and completions in use are restored."""
    whole, resumed = runs(name, tmp_path, **settings)

    assert logged(resumed, after=3) == logged(whole, after=3)
    assert_same_weights(whole, resumed)
    assert kept_rewards(resumed) == kept_rewards(whole)


def kept_rewards(run):
    """Return the rewards of the last completions, and how many of them TRL keeps."""
    rewards = vars(run.trainer).get("_logs", {}).get("rewards", {})
    return {name: (list(values), values.maxlen) for name, values in rewards.items()}


@pytest.mark.parametrize(
    ("name", "settings"), [("DPO", {}), ("GRPO", {"beta": 0.5}), ("RLOO", {"beta": 0.5})]
)
def test_a_reference_that_follows_the_model(tmp_path, name, settings):
    """A reference model that is synchronized with the trained one is restored."""
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    whole, resumed = runs(name, tmp_path, **follows, **settings)

    assert logged(resumed, after=3) == logged(whole, after=3)
    assert_same_weights(whole, resumed)
    references = [run.trainer.ref_model.state_dict() for run in (whole, resumed)]
    for key, expected in references[0].items():
        assert torch.equal(references[1][key], expected), key


def test_a_checkpoint_without_the_file(tmp_path):
    """An older checkpoint can be resumed; counts then begin anew, as without the mixin."""
    whole, resumed = runs("SFT", tmp_path, forget=[FILE])
    counts = [logged(run, after=5)[0]["num_tokens"] for run in (whole, resumed)]

    assert 0 < counts[1] < counts[0]
    assert_same_weights(whole, resumed)


def test_a_checkpoint_without_the_reference(tmp_path):
    """A resume from an older checkpoint says that the reference starts again."""
    missing = ["mfwrap_reference_models.safetensors"]
    with messages_of("mfwrap.trainer.kept_attributes") as messages:
        runs("DPO", tmp_path, missing, sync_ref_model=True, ref_model_sync_steps=2)

    (message,) = messages
    assert "does not hold the reference model" in message


def test_two_ranks_and_fewer(two_ranks, tmp_path):
    """Counts continue on each rank, and if a training continues on one rank."""
    for whole, resumed in two_ranks.run(count_tokens, str(tmp_path)):
        assert len(whole) == 3
        assert resumed == whole

    settings = {"gradient_accumulation_steps": 4}
    alone = new_trainer("SFT", tmp_path / "alone", MFTrainerMixin, **settings)
    counts = logged(train(alone, tmp_path / "run" / "checkpoint-3"))
    assert [entry["num_tokens"] for entry in counts if "num_tokens" in entry] == whole


def test_what_belongs_to_the_process_is_not_saved(tmp_path):
    """TRL's note of the weights that a server has is not saved, nor what cannot be loaded."""
    trainer = new_trainer("GRPO", tmp_path, MFTrainerMixin, **SAVING)
    vars(trainer)["_last_loaded_step"] = 3
    vars(trainer)["_logs"]["images"].append(object())
    vars(trainer)["_step"] = np.int64(0)
    train(trainer)
    with safe_open(tmp_path / "checkpoint-3" / FILE, "pt") as file:
        saved = json.loads(file.metadata()["record"])["attributes"]

    assert saved.keys() >= {"_metrics", "_step", "_buffered_inputs"}
    assert not saved.keys() & {"_last_loaded_step", "_logs"}


class Counter(MFTrainer):
    """A trainer with a count of the user's own, under a name that TRL has, too."""

    _step = 0

    def training_step(self, *args, **kwargs):
        self._step += 1
        return super().training_step(*args, **kwargs)


def test_attributes_of_a_user_are_left_alone(tmp_path):
    """Only attributes of the listed libraries are saved and restored."""
    run = train(new_plain_trainer(Counter, tmp_path, save_strategy="steps", save_steps=2))

    assert vars(run.trainer)["_step"] == 16
    assert not (tmp_path / "checkpoint-2" / FILE).exists()
