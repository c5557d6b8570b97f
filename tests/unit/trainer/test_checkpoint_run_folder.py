"""A training owns its run folder, and leaves alone what others have written there."""

import contextlib
import types

import pytest
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from mfwrap.callbacks import MetricsRecorder
from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.checkpoints.verification import verify
from mfwrap.checkpoints.whole import staging_folder
from mfwrap.trainer import MFTrainer
from support.programs import Program
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
from support.spoilt.gpt2 import tiny_gpt2
from support.training_state import assert_same_state

EVERY_OTHER = RunSettings(save_steps=2)


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_temporary_folder_of_somebody_else(tmp_path, kind):
    """A training that needs its name is refused when it saves; the files in it stay."""
    other, theirs = tmp_path / "other", staging_folder(tmp_path / "run" / "checkpoint-2")
    theirs.parent.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    if kind == "folder":
        other.rename(theirs)
    elif kind == "file":
        theirs.write_text("mine")
    else:
        theirs.symlink_to(other)

    with pytest.raises(FileExistsError, match=r"_checkpoint-2\.partial is in the way"):
        trained(tmp_path / "run", EVERY_OTHER)

    assert theirs.is_symlink() == (kind == "link")
    assert kind == "file" or [path.name for path in theirs.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("asked_for", [None, "auto"])
def test_a_run_folder_that_is_in_use(tmp_path, asked_for):
    """Another program in the run folder is refused before it writes; other folders are free."""
    program = (
        "import sys; from pathlib import Path; from mfwrap.checkpoints.locks import *\n"
        "with owning(Path(sys.argv[1]) / RUN_LOCK): print(flush=True); sys.stdin.read()"
    )
    own = tmp_path / "own"
    trained(own, EVERY_OTHER, callbacks=[StopAfter(2)])
    before = files(own)
    with Program(program, own) as owner:
        owner.stdout.readline()
        trainer = new_trainer(own, EVERY_OTHER)
        with pytest.raises(BlockingIOError, match=rf"^{own} is in use: process {owner.pid} on"):
            trainer.train(resume_from_checkpoint=asked_for)
        assert set(files(own)) == {*before, "_mfwrap.lock"}
        new_trainer(own, EVERY_OTHER, save_strategy="no").train()
        resume(own / "checkpoint-2", tmp_path / "other", EVERY_OTHER, callbacks=[StopAfter(4)])
        assert set(files(own)) == {*before, "_mfwrap.lock"}

    trainer.train(resume_from_checkpoint=asked_for)
    assert "_mfwrap.lock" not in files(own)


@pytest.mark.parametrize("kind", ["folder", "file", "link", "broken link"])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_checkpoint_of_somebody_else(tmp_path, kind, resume):
    """A training that would move or replace it is refused before it writes, and names it."""
    run, theirs = tmp_path / "run", tmp_path / "run" / "checkpoint-4"
    run.mkdir()
    if kind == "folder":
        theirs.mkdir()
        (theirs / "weights.bin").write_text("mine")
    elif kind == "file":
        theirs.write_text("mine")
    else:
        theirs.symlink_to("." if kind == "link" else "nothing")

    def unread(path):  # a look at a link changes the time of its last access
        status = path.lstat()
        return status.st_mode, status.st_ino, status.st_mtime_ns, status.st_ctime_ns

    before, was = set(tmp_path.rglob("*")), unread(theirs)

    with pytest.raises((FileExistsError, ValueError), match=r"checkpoint-4") as caught:
        new_trainer(run, EVERY_OTHER).train(resume_from_checkpoint=resume)

    assert isinstance(caught.value, FileExistsError) or resume
    assert set(tmp_path.rglob("*")) == before
    assert unread(theirs) == was


def contents(folder):
    """Return the bytes of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Saving(TrainerCallback):
    """Save after a step, whatever the settings say."""

    def on_step_end(self, _args, state, control, **_):
        """Request a checkpoint."""
        control.should_save = state.global_step == 2


@pytest.mark.parametrize("callbacks", [[], [Saving()]])
def test_a_training_without_checkpoints_beside_those_of_a_stock_trainer(tmp_path, callbacks):
    """It leaves them alone, and is refused if a callback saves a checkpoint of the same step."""
    trained(tmp_path, EVERY_OTHER, kind=Trainer, callbacks=[StopAfter(4)])
    before = contents(tmp_path)

    trainer = new_trainer(tmp_path, save_strategy="no", callbacks=callbacks)
    with (
        pytest.raises(FileExistsError, match="checkpoint-2, which mfwrap has not")
        if callbacks
        else contextlib.nullcontext()
    ):
        trainer.train()

    assert contents(tmp_path) == before


@pytest.mark.parametrize("theirs", ["run.json", "checkpoint-2"])
def test_a_trial_beside_files_of_somebody_else(tmp_path, monkeypatch, theirs):
    """A search leaves files in its folder alone, although each trial has a folder of its own."""
    trained(tmp_path, EVERY_OTHER, kind=Trainer, callbacks=[StopAfter(2)])
    if theirs == "run.json":
        (tmp_path / theirs).write_text('{"mine": true}')
    before = contents(tmp_path)
    trainer = new_trainer(tmp_path, EVERY_OTHER, callbacks=[MetricsRecorder(tmp_path)])
    trainer.model_init = lambda: tiny_gpt2(0.0, 0)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    trainer.hp_space = lambda trial: trial.params
    # transformers asks optuna, which may be missing, for the parameters of a trial.
    monkeypatch.setattr("transformers.integrations.hp_params", trainer.hp_space)
    trial = types.SimpleNamespace(number=0, params={"learning_rate": 0.1})

    if theirs == "run.json":
        with pytest.raises(FileExistsError, match=r"run\.json, which mfwrap has not written"):
            trainer.train(trial=trial)
    else:
        trainer.train(trial=trial)
        assert (tmp_path / "run-0" / "checkpoint-2" / MANIFEST).is_file()

    assert before.items() <= contents(tmp_path).items()


@pytest.mark.parametrize("resumes", [False, True])
def test_rollbacks_of_somebody_else(tmp_path, resumes):
    """A training without `rollback` neither deletes nor reads a file of that name."""
    if resumes:
        trained(tmp_path, EVERY_OTHER, callbacks=[StopAfter(2)])
    (tmp_path / "rollbacks.json").write_text("mine")

    new_trainer(tmp_path, EVERY_OTHER, callbacks=[StopAfter(4)]).train(
        resume_from_checkpoint=resumes
    )

    assert (tmp_path / "rollbacks.json").read_text() == "mine"


def test_a_training_from_the_start_renames_earlier_checkpoints(tmp_path, caplog):
    """A training from the start and its resume do not mix with an earlier run of the folder."""
    trained(tmp_path / "run", callbacks=[StopAfter(5)])
    earlier = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    stopped = new_trainer(tmp_path / "run", EVERY_OTHER, seed=1, callbacks=[StopAfter(3)])
    stopped.train()
    renamed = {path.name for path in (tmp_path / "run").glob("_abandoned-checkpoint-*")}
    resumed = new_trainer(tmp_path / "run", EVERY_OTHER, seed=1)
    resumed.train(resume_from_checkpoint="auto")
    alone = new_trainer(tmp_path / "alone", EVERY_OTHER, seed=1)
    alone.train()

    assert {"checkpoint-1", "checkpoint-5"} <= earlier
    assert renamed == {f"_abandoned-{name}" for name in earlier}
    assert f"training from the start in {tmp_path / 'run'}; later checkpoints" in caplog.text
    assert_same_state(end_of(resumed), end_of(alone))


def test_a_training_that_writes_nothing_needs_no_folder(tmp_path):
    """Without checkpoints and records, the run folder may be one that nobody can write to."""
    trainer = new_trainer(tmp_path / "run", PLAIN, save_strategy="no", max_steps=1)
    # A file in its place refuses to be written to as well, also by root.
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("no folder")

    trainer.train()

    assert (tmp_path / "run").read_text() == "no folder"


class OwnSave(MFTrainer):
    """A trainer that writes its checkpoints to the run folder itself."""

    def _save_checkpoint(self, model, trial):
        Trainer._save_checkpoint(self, model, trial)


def test_a_save_of_the_users_own(tmp_path):
    """A checkpoint that a method of the user's own writes has a manifest of all files, too."""
    trained(tmp_path, EVERY_OTHER, kind=OwnSave, callbacks=[StopAfter(2)])

    checkpoint = tmp_path / "checkpoint-2"
    assert verify(checkpoint).num_files == len(files(checkpoint)) - 1
    assert verify(checkpoint).caveat is None


class OwnTrain(MFTrainer):
    """A trainer that begins trainings in a way of its own."""

    def train(self, *args, **keywords):
        """Train without `MFTrainer.train`, which owns the run folder."""
        return Trainer.train(self, *args, **keywords)


def test_a_train_of_the_users_own(tmp_path):
    """Such a training saves and resumes exactly, and renames checkpoints of an earlier run."""
    run, settings = tmp_path / "run", {"max_steps": 4}
    whole = trained(tmp_path / "whole", EVERY_OTHER, **settings)
    for _ in range(2):
        trained(run, EVERY_OTHER, kind=OwnTrain, callbacks=[StopAfter(2)], **settings)
    resumed = resume(run / "checkpoint-2", run, EVERY_OTHER, kind=OwnTrain, **settings)

    assert (run / "_abandoned-checkpoint-2").is_dir()
    assert_same_state(end_of(whole), end_of(resumed))
