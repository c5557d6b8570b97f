"""A checkpoint that is written in the background is the one that is written at once."""

import json
import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.callbacks import CheckpointMonitor
from mfwrap.checkpoints import host_copies
from mfwrap.checkpoints.manifest import MANIFEST, write_manifest
from mfwrap.checkpoints.verification import verify
from mfwrap.records import checkpoint_requests
from mfwrap.trainer import MFTrainer, deferred_files
from support.resumed_training import RunSettings, end_of, new_trainer, resume
from support.training_state import assert_same_state

SETTINGS = RunSettings(save_steps=4)
ASYNC = {"async_save": True}


def writing_threads():
    """Return the threads that write a checkpoint."""
    return [each for each in threading.enumerate() if each.name == "mfwrap-checkpoint"]


class Held(TrainerCallback):
    """Hold the writer of the first checkpoint until a later step has ended.

    Args:
        monkeypatch: Pytest's.
        until: Step at whose end the writer goes on, and has written; ``None`` to hold no writer.
        error: Error of the first writer.
    """

    def __init__(self, monkeypatch, until=None, error=None):
        self.told, self.step = [], 0
        self._until, self._may_write = until, threading.Event()
        real = deferred_files.save_object

        def save(value, path):
            step = int(path.parent.name.partition("-")[2])
            self.told.append(("writes", step))
            if until is not None and step == SETTINGS.save_steps:
                assert self._may_write.wait(60)
            if error is not None and step == SETTINGS.save_steps:
                raise error
            return real(value, path)

        monkeypatch.setattr(deferred_files, "save_object", save)

    def on_step_end(self, _args, state, _control, **_):
        """Let the writer go on, and wait for it."""
        self.step = state.global_step
        if self.step == self._until:
            self._may_write.set()
            for thread in writing_threads():
                thread.join()

    def on_save(self, args, state, _control, **_):
        """Note which checkpoint it is, and in which step; the checkpoint is there."""
        verify(Path(args.output_dir, f"checkpoint-{state.global_step}"))
        self.told.append(("saved", state.global_step, self.step))


def run(folder, *callbacks, kind=MFTrainer, settings=SETTINGS, **arguments):
    """Return a trainer that saves in the background."""
    return new_trainer(
        folder,
        settings,
        kind=kind,
        callbacks=callbacks,
        trainer_settings=ASYNC,
        **arguments,
    )


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """Return the folder of a run that saves at once, and its final state."""
    folder = tmp_path_factory.mktemp("at_once")
    trainer = new_trainer(folder, SETTINGS)
    trainer.train()
    return folder, end_of(trainer)


def assert_same_checkpoint(folder, other):
    """Check that the files of two checkpoints hold the same, and that the manifests list it."""
    names = sorted(path.relative_to(other) for path in other.rglob("*"))
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == names
    # These files have the name of the run folder, or of an archive.
    different = {"training_args.bin", "optimizer.pt", MANIFEST}
    for name in names:
        if name.name not in different and (folder / name).is_file():
            assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    own, expected = (
        torch.load(each / "optimizer.pt", weights_only=True) for each in (folder, other)
    )
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert_same_state(state, own["state"][number])
    listed = [json.loads((each / MANIFEST).read_text())["files"] for each in (folder, other)]
    assert list(listed[0]) == list(listed[1])


def assert_read_manifest(checkpoint, folder):
    """Check that the manifest is, byte for byte, the one that reading all files gives."""
    copied = shutil.copytree(checkpoint, folder / checkpoint.name)
    write_manifest(copied)
    assert (checkpoint / MANIFEST).read_bytes() == (copied / MANIFEST).read_bytes()


@pytest.mark.parametrize("until", [None, 5, 7])
def test_the_same_checkpoints(at_once, tmp_path, monkeypatch, until):
    """The training changes its weights before the thread writes, and resumes from it bitwise."""
    held = Held(monkeypatch, until)
    trainer = run(tmp_path / "run", held)
    trainer.train()

    expected, end = at_once
    assert_same_state(end, end_of(trainer))
    for step in (4, 8, 12):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        assert_same_checkpoint(checkpoint, expected / checkpoint.name)
        assert_read_manifest(checkpoint, tmp_path / "read")
    if until is not None:
        assert held.told[:3] == [("writes", 4), ("saved", 4, until), ("writes", 8)]
        again = resume(tmp_path / "run/checkpoint-4", tmp_path / "again", SETTINGS)
        assert_same_state(end, end_of(again))
    assert held.told[-2:] == [("writes", 12), ("saved", 12, 12)]
    assert writing_threads() == []


def test_never_two_at_once(tmp_path, monkeypatch):
    """The next save waits for the writer: each checkpoint is saved before the next is written."""
    held = Held(monkeypatch)
    run(tmp_path, held, save_steps=1, max_steps=5).train()
    assert [each[:2] for each in held.told] == [
        (what, step) for step in range(1, 6) for what in ("writes", "saved")
    ]


def test_a_request_is_for_one_checkpoint(tmp_path, monkeypatch):
    """While the thread writes it, the steps that end do not save again."""
    monkeypatch.setattr(checkpoint_requests, "_SECONDS_BETWEEN_LOOKS", 0.0)
    held = Held(monkeypatch, 7)

    class Asks(TrainerCallback):
        def on_step_begin(self, _args, state, _control, **_):
            if state.global_step == SETTINGS.save_steps - 1:
                checkpoint_requests.request_checkpoint(tmp_path)

    run(tmp_path, Asks(), held, save_steps=100, max_steps=9).train()
    assert [each[1] for each in held.told if each[0] == "writes"] == [4, 9]


def test_all_of_an_evaluated_run(tmp_path):
    """The best model is loaded, old checkpoints go, and the states of callbacks are the same."""
    settings = RunSettings(evaluates=True)
    ends = []
    for name, extras in (("at_once", {}), ("later", ASYNC)):
        trainer = new_trainer(
            tmp_path / name, settings, trainer_settings=extras, save_total_limit=2
        )
        trainer.train()
        ends.append(end_of(trainer))
    assert_same_state(*ends)
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("at_once", "later")]
    assert names[0] == names[1]
    for checkpoint in (tmp_path / "later").glob("checkpoint-*"):
        state, other = (
            json.loads((each / checkpoint.name / "trainer_state.json").read_text())
            for each in (tmp_path / "later", tmp_path / "at_once")
        )
        assert state["stateful_callbacks"] == other["stateful_callbacks"]


@pytest.mark.parametrize("until", [5, None])
def test_an_error_of_the_writer(tmp_path, monkeypatch, until):
    """An error of the thread is raised at the next step, and there is no checkpoint."""
    held = Held(monkeypatch, until, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint-4/optimizer\.pt'"):
        run(tmp_path, held).train()
    assert held.told == [("writes", 4)]
    assert held.step == until or until is None
    assert not (tmp_path / "checkpoint-4").exists()
    assert writing_threads() == []
    # What is left is cleaned, and the run begins again.
    again = run(tmp_path)
    monkeypatch.undo()
    again.train(resume_from_checkpoint="auto")
    assert {path.name for path in tmp_path.glob("*checkpoint*")} == {
        f"checkpoint-{step}" for step in (4, 8, 12)
    }


def test_a_folder_that_was_replaced(tmp_path, monkeypatch):
    """Somebody deletes the folder that is being written: an error, and no checkpoint."""

    class Deletes(Held):
        def on_step_begin(self, *_, **__):
            if self.step == 4:
                shutil.rmtree(tmp_path / "_checkpoint-4.partial")

    with pytest.raises(OSError, match="checkpoint-4"):
        run(tmp_path, Deletes(monkeypatch, 5)).train()
    assert not (tmp_path / "checkpoint-4").exists()


def test_an_error_of_the_training(tmp_path, monkeypatch, caplog):
    """An error of the training waits for the checkpoint, which is there; it is the error raised."""

    class Fails(Held):
        def on_step_begin(self, *_, **__):
            if self.step == 4:
                self._may_write.set()
                message = "of the user"
                raise ZeroDivisionError(message)

    with pytest.raises(ZeroDivisionError, match="of the user"):
        run(tmp_path, Fails(monkeypatch, 99)).train()
    verify(tmp_path / "checkpoint-4")
    assert caplog.messages == []

    with pytest.raises(ZeroDivisionError, match="of the user"):
        run(tmp_path / "other", Fails(monkeypatch, 99, OSError("disk"))).train()
    assert caplog.messages == ["checkpoint-4 could not be written: disk"]


def test_a_signal(tmp_path, monkeypatch):
    """At SIGTERM, the training waits for the writer, and saves its last step at once."""

    class Stops(Held):
        def on_step_begin(self, *_, **__):
            if self.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                self._may_write.set()

    held = Stops(monkeypatch, 99)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, held).train()
    assert caught.value.code == 75
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-5")
    for step in (4, 5):
        verify(tmp_path / f"checkpoint-{step}")
    assert ("saved", 4, 5) in held.told


class SavesItself(MFTrainer):
    """A trainer that looks at the checkpoint that it has saved."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        assert not writing_threads()


class SavesWeightsItself(MFTrainer):
    """A trainer that saves its weights."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)


class SavesOptimizerItself(MFTrainer):
    """A trainer that saves its optimizer."""

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (SavesItself, "SavesItself has a `_save_checkpoint` of its own, which may read what is"),
        (SavesWeightsItself, "the weights are saved by a method of SavesWeightsItself's or the"),
        (SavesOptimizerItself, "SavesOptimizerItself saves or loads its optimizer by a method of"),
    ],
)
def test_what_is_saved_at_once(at_once, tmp_path, monkeypatch, caplog, kind, says):
    """Methods of the user's own find the files as before; one sentence says so."""
    held = Held(monkeypatch)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, held, kind=kind).train()
    said = [message for message in caplog.messages if "in the background" in message]
    assert [message.startswith(f"checkpoints are not written in the background: {says}")
            for message in said] == [True]  # fmt: skip
    assert held.told == [("saved", step, step) for step in (4, 8, 12)]
    assert_same_checkpoint(tmp_path / "checkpoint-4", at_once[0] / "checkpoint-4")


def test_a_callback_asks_for_it(tmp_path, monkeypatch):
    """`CheckpointMonitor(async_save=True)` makes the trainer save in the background."""
    held = Held(monkeypatch, 5)
    monitor = CheckpointMonitor(4, keep_checkpoint_max=1, async_save=True)
    new_trainer(tmp_path, SETTINGS, callbacks=[held, monitor], save_strategy="no").train()
    assert held.told[:2] == [("writes", 4), ("saved", 4, 5)]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]


def test_outside_of_a_training(tmp_path):
    """A checkpoint that is saved by hand after the training is there when the call returns."""
    trainer = run(tmp_path, max_steps=2, save_strategy="no")
    trainer.train()
    trainer._save_checkpoint(trainer.model, None)
    verify(tmp_path / "checkpoint-2")
    assert writing_threads() == []


def test_too_little_memory(tmp_path, monkeypatch):
    """What cannot be copied is refused before the first step, or at the save."""
    monkeypatch.setattr(host_copies, "available_memory", lambda: 1000)
    said = r"a checkpoint in the background needs a copy of 0\.\d MB .* save without `async_save`"
    with pytest.raises(RuntimeError, match=said):
        run(tmp_path).train()

    class Takes(TrainerCallback):
        def on_step_end(self, *_, **__):
            monkeypatch.setattr(host_copies, "available_memory", lambda: 1000)

    monkeypatch.setattr(host_copies, "available_memory", lambda: None)
    with pytest.raises(MemoryError, match=said):
        run(tmp_path, Takes()).train()
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_the_argument(tmp_path):
    """`async_save` must be a bool."""
    with pytest.raises(TypeError, match="`async_save` must be a bool, got 1"):
        new_trainer(tmp_path, trainer_settings={"async_save": 1})
