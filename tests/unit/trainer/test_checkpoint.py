"""A checkpoint is complete or does not exist, wherever writing it is interrupted."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.callbacks import MetricsRecorder
from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.checkpoints.verification import verify
from mfwrap.checkpoints.whole import staging_folder
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from support.resumed_training import (
    PLAIN,
    RunSettings,
    StopAfter,
    end_of,
    files,
    new_trainer,
    resume,
    trained,
)
from support.trainer_runs import new_trainer as new_tiny_trainer
from support.trainer_runs import tiny_llama
from support.training_state import assert_same_state

EVERY_OTHER = RunSettings(save_steps=2)
WHOLE = [
    "config.json",
    "generation_config.json",
    "mfwrap_manifest.json",
    "mfwrap_position.json",
    "mfwrap_step.json",
    "mfwrap_step.safetensors",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]
NUM_PICKLED = 4
"""Number of files that torch.save writes: arguments, optimizer, schedule, random states."""


class Interrupted(Exception):  # noqa: N818  (a simulated interruption, not an error)
    """A simulated interruption in the middle of writing."""


def assert_whole(folder):
    """Fail unless each ``checkpoint-*`` folder has all files, as its manifest lists them."""
    for path in folder.glob("checkpoint-*"):
        assert files(path) == WHOLE, path.name
        assert verify(path).num_files == len(WHOLE) - 1
        assert verify(path).caveat is None


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the folder and the final state of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("unbroken")
    return folder, end_of(trained(folder, EVERY_OTHER))


class FailingAt:
    """A callable that replaces a function and raises `Interrupted` at one of the calls.

    Args:
        function: Function to replace.
        call: Number of the call that fails, from 1.
        first: Called with the arguments of the failing call, just before the error is raised.
    """

    def __init__(self, function, call, first=lambda *_: None) -> None:
        self._function, self._left, self._first = function, call, first

    def __call__(self, *args, **keywords):
        """Raise at the chosen call; otherwise call the function."""
        self._left -= 1
        if self._left == 0:
            self._first(*args)
            raise Interrupted
        return self._function(*args, **keywords)


def write_a_part(_content, path) -> None:
    """Leave a partial file behind, as a full disk does."""
    Path(path).write_bytes(b"PK")


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("file", range(NUM_PICKLED))
@pytest.mark.parametrize("number", [1, 3])
def test_a_checkpoint_that_breaks_off(unbroken, tmp_path, monkeypatch, number, file):
    """A partial checkpoint has no ``checkpoint-*`` name, so the newest complete one is resumed."""
    call = (number - 1) * NUM_PICKLED + file + 1
    trainer = new_trainer(tmp_path, EVERY_OTHER)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", FailingAt(torch.save, call, write_a_part))
        with pytest.raises(Interrupted):
            trainer.train()

    assert_whole(tmp_path)
    last = get_last_checkpoint(str(tmp_path))
    assert last == (None if number == 1 else str(tmp_path / "checkpoint-4"))
    again = new_trainer(tmp_path, EVERY_OTHER, seed=0 if last is None else 1)
    again.train(resume_from_checkpoint=last)
    assert_same_state(unbroken[1], end_of(again))
    assert_whole(tmp_path)


def test_what_a_killed_run_left_does_not_get_into_a_checkpoint(tmp_path):
    """A file that a killed process has left in the temporary folder is not in a new checkpoint."""
    left = staging_folder(tmp_path / "checkpoint-2") / "checkpoint-2" / "left.bin"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left")

    trained(tmp_path, EVERY_OTHER, callbacks=[StopAfter(2)])

    assert "left.bin" not in files(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_resume_from_the_folder_of_another_run(tmp_path, is_damaged):
    """A run that resumes from a checkpoint of a live run, or is refused, leaves that run alone."""
    other, own = tmp_path / "other", tmp_path / "own"
    refused = []

    class Live(MFTrainer):
        """Another run resumes from this run's first checkpoint while it writes its second."""

        def _save_optimizer_and_scheduler(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)
            if self.state.global_step == 4:
                if is_damaged:
                    (other / "checkpoint-2" / "scheduler.pt").write_bytes(b"damaged")
                again = new_trainer(own, EVERY_OTHER, seed=1, callbacks=[StopAfter(4)])
                try:
                    again.train(resume_from_checkpoint=str(other / "checkpoint-2"))
                except ValueError as error:
                    refused.append(error)

    new_trainer(other, EVERY_OTHER, kind=Live, callbacks=[StopAfter(4)]).train()

    assert len(refused) == is_damaged
    assert files(other / "checkpoint-4") == files(other / "checkpoint-2")
    assert verify(other / "checkpoint-4").caveat is None


def test_settings_after_a_checkpoint_that_broke_off(tmp_path, monkeypatch):
    """After an interrupted save, the user's arguments are restored and training can continue."""
    trainer = new_trainer(tmp_path, EVERY_OTHER, save_total_limit=3)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", FailingAt(torch.save, NUM_PICKLED + 2))
        with pytest.raises(Interrupted):
            trainer.train()

    assert trainer.args.save_total_limit == 3
    assert trainer.args.logging_nan_inf_filter
    trainer.train(resume_from_checkpoint=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-10", "checkpoint-12", "checkpoint-8"]


BEST_IS_FIRST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}
"""Greater is better and the loss falls, so the first checkpoint stays the best one."""


@pytest.mark.parametrize(
    ("deleted", "arguments"),
    [("checkpoint-2", {}), ("checkpoint-12", BEST_IS_FIRST)],
    ids=["too old", "not the best, at the end"],
)
def test_a_deletion_that_breaks_off(unbroken, tmp_path, monkeypatch, deleted, arguments):
    """A partly deleted checkpoint has no ``checkpoint-*`` name."""
    delete_all = shutil.rmtree

    def delete(path, **keywords) -> None:
        within = [p for p in Path(path).rglob("*") if p.is_file()]
        if not any(deleted in p.parts for p in within):
            delete_all(path, **keywords)
            return
        for name in within[:5]:
            name.unlink()
        raise Interrupted

    trainer = new_trainer(tmp_path, EVERY_OTHER, save_total_limit=1, **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete)
        with pytest.raises(Interrupted):
            trainer.train()

    assert_whole(tmp_path)
    assert not (tmp_path / deleted).exists()
    assert trainer.args.save_total_limit == 1
    if not arguments:
        again = new_trainer(tmp_path, EVERY_OTHER, seed=1, save_total_limit=1)
        again.train(resume_from_checkpoint=True)
        assert_same_state(unbroken[1], end_of(again))
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-12"]


def test_a_replacement_that_breaks_off(unbroken, tmp_path, monkeypatch):
    """If replacing a checkpoint is interrupted, resuming uses the new checkpoint."""
    trained(tmp_path, EVERY_OTHER, callbacks=[StopAfter(4)])
    rename = os.rename

    class GiveNameBack(TrainerCallback):
        """Give the checkpoint of the earlier training, which was renamed, its name back."""

        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                (tmp_path / "_abandoned-checkpoint-4").rename(tmp_path / "checkpoint-4")

    trainer = new_trainer(tmp_path, EVERY_OTHER, callbacks=[GiveNameBack()])

    def rename_away(source, target) -> None:
        rename(source, target)
        if Path(source) == tmp_path / "checkpoint-4" and "abandoned" not in str(target):
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_away)
        with pytest.raises(Interrupted):
            trainer.train()
    assert not (tmp_path / "checkpoint-4").exists()

    again = new_trainer(tmp_path, EVERY_OTHER, seed=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_state(unbroken[1], end_of(again))
    assert_whole(tmp_path)


def test_what_is_on_the_disk_when_a_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """All files are synced before the rename, so a power failure cannot lose any."""
    happened = []
    sync, rename = os.fsync, os.rename

    def noted_sync(opened) -> None:
        happened.append(Path(f"/proc/self/fd/{opened}").readlink())
        sync(opened)

    def noted_rename(source, target) -> None:
        happened.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    trained(tmp_path, PLAIN, save_steps=2, callbacks=[StopAfter(2)])

    written = tmp_path / "_checkpoint-2.partial" / "checkpoint-2"
    before, after = (happened[: happened.index("renamed")], happened[happened.index("renamed") :])
    names = files(tmp_path / "checkpoint-2")
    synced = {path for path in before if path.suffix != ".partial"}
    assert {written / name for name in names} | {written} == synced
    assert before[-1] == written
    assert after == ["renamed", tmp_path]


def test_a_step_that_is_saved_again(unbroken, tmp_path):
    """A checkpoint replaces an older folder of the same step, including all its files."""
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "stale.txt").write_text("from another run")
        (tmp_path / f"checkpoint-{step}" / MANIFEST).touch()

    trainer = trained(tmp_path, EVERY_OTHER)

    assert_whole(tmp_path)
    assert_same_state(unbroken[1], end_of(trainer))


@pytest.mark.filterwarnings("ignore:.*; resuming from .*checkpoint-2$")
@pytest.mark.parametrize("kept", ["mfwrap_position.json", "mfwrap_step.safetensors"])
@pytest.mark.parametrize("asked_for", [None, "auto"])
def test_a_checkpoint_that_has_lost_files(unbroken, tmp_path, kept, asked_for):
    """It is still mfwrap's: it has been deleted in part, or a node's disk never had the rest."""
    trained(tmp_path, EVERY_OTHER, callbacks=[StopAfter(4)])
    last = tmp_path / "checkpoint-4"
    for path in set(last.iterdir()) - {last / kept}:
        path.unlink()

    trainer = new_trainer(tmp_path, EVERY_OTHER)
    trainer.train(resume_from_checkpoint=asked_for)

    assert_whole(tmp_path)
    assert_same_state(unbroken[1], end_of(trainer))


@pytest.mark.parametrize("spelling", ["link", "run/../run"])
def test_a_resume_by_another_spelling_of_the_folder(unbroken, tmp_path, spelling):
    """A checkpoint of the run folder is that, by whatever path it is given."""
    callbacks = [MetricsRecorder(tmp_path / "run")]
    trained(tmp_path / "run", EVERY_OTHER, callbacks=[*callbacks, StopAfter(5)])
    (tmp_path / "link").symlink_to("run")

    trainer = new_trainer(tmp_path / "run", EVERY_OTHER, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=str(tmp_path / spelling / "checkpoint-2"))

    assert (tmp_path / "run" / "_abandoned-checkpoint-4").is_dir()
    records = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == sorted(set(steps))
    assert_same_state(unbroken[1], end_of(trainer))


def test_what_lies_in_the_folder_at_the_end(unbroken):
    """The run folder contains checkpoints only, and no temporary files."""
    names = sorted(path.name for path in unbroken[0].iterdir())

    assert names == sorted(f"checkpoint-{step}" for step in range(2, 13, 2))
    assert_whole(unbroken[0])


def test_only_the_model_is_saved(tmp_path):
    """With ``save_only_model``, a checkpoint has no step state, but its manifest is checked."""
    trained(tmp_path, PLAIN, save_only_model=True, save_steps=4, callbacks=[StopAfter(4)])
    folder = tmp_path / "checkpoint-4"

    assert files(folder) == [
        "config.json",
        "generation_config.json",
        "mfwrap_manifest.json",
        "model.safetensors",
        "trainer_state.json",
        "training_args.bin",
    ]
    with pytest.warns(UserWarning, match="no state of the step"):
        resumed = resume(folder, tmp_path / "resumed", PLAIN)
    assert resumed.state.global_step == 12
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4: config\.json is missing; there is no"):
        resume(folder, tmp_path / "resumed", PLAIN)


class _Wrapped(torch.nn.Module):
    """A module that has a model with tied weights, and is no model of transformers itself."""

    def __init__(self):
        super().__init__()
        self.student = tiny_llama()
        self.student.lm_head.weight = self.student.get_input_embeddings().weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        return {"loss": self.student(input_ids, attention_mask, labels=labels).loss}


@pytest.mark.parametrize("async_save", [False, True])
def test_tied_weights_in_a_module_of_the_users_own(tmp_path, async_save):
    """They have a checkpoint, with both names, from which a run resumes to the same end."""
    settings = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps"}

    def run(folder, resume=None):
        extras = {"async_save": async_save}
        trainer = new_tiny_trainer(MFTrainer, folder, model=_Wrapped(), extras=extras, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.student

    whole = run(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = run(tmp_path / "resumed", str(checkpoint))
    saved = load_file(checkpoint / "model.safetensors")

    assert resumed.lm_head.weight is resumed.get_input_embeddings().weight
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name])
    tied = ("student.lm_head.weight", "student.model.embed_tokens.weight")
    assert torch.equal(*(saved[name] for name in tied))


class Pushing(MFTrainer):
    """Record what would be pushed to the hub."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        folder = Path(checkpoint_folder)
        self.pushed = [*getattr(self, "pushed", []), (folder.name, files(folder))]


def test_pushed_checkpoints(tmp_path):
    """A checkpoint is pushed from its final folder, when it is complete."""
    trainer = new_trainer(tmp_path, EVERY_OTHER, kind=Pushing)
    trainer.args.push_to_hub = True

    trainer.train()

    assert trainer.pushed == [(f"checkpoint-{step}", WHOLE) for step in range(2, 13, 2)]
    assert trainer.args.push_to_hub


def test_the_arguments_that_are_saved(unbroken):
    """A checkpoint contains the user's arguments, not the temporary ones used while saving."""
    path = unbroken[0] / "checkpoint-2" / "training_args.bin"
    saved = torch.load(path, weights_only=False)

    assert saved.logging_nan_inf_filter
    assert Path(saved.output_dir) == unbroken[0]


def test_no_token_is_saved(tmp_path):
    """No file of a checkpoint or a saved model holds the hub's token; the trainer keeps it."""
    trainer = new_trainer(tmp_path, EVERY_OTHER, hub_token="hf_SECRET", max_steps=2)  # noqa: S106  (not a real token)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    saved = [path for path in tmp_path.rglob("*") if path.is_file()]

    assert trainer.args.hub_token == "hf_SECRET"  # noqa: S105  (not a real token)
    assert {"training_args.bin"} <= {path.name for path in saved}
    assert not any(b"hf_SECRET" in path.read_bytes() for path in saved)
