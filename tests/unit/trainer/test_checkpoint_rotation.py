"""MFTrainer keeps the stock Trainer's checkpoints and records the same best checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.callbacks import CheckpointMonitor, TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.resumed_training import PLAIN, StopAfter, new_trainer, resume, trained
from support.trainer_runs import new_trainer as trainer_of
from support.training_state import assert_same_state

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
    # Greater is better and the loss falls, so the first checkpoint stays the best one.
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}


def outcome(trainer):
    """Return all checkpoints' names, and the best checkpoint according to the last checkpoint."""
    folder = Path(trainer.args.output_dir)
    last = Path(get_last_checkpoint(str(folder)))
    state = json.loads((last / "trainer_state.json").read_text())
    best = state["best_model_checkpoint"]
    return {
        "checkpoints": sorted(path.name for path in folder.glob("checkpoint*")),
        "best": best and Path(best).relative_to(folder).as_posix(),
        "best in memory": trainer.state.best_model_checkpoint == best,
        "best step": state["best_global_step"],
        "best metric": state["best_metric"],
    }


KEPT = {
    "all": {},
    "two": {"save_total_limit": 2},
    "one": {"save_total_limit": 1},
    "when best": {"save_strategy": "best"},
    "lower is better": {"greater_is_better": False, "save_total_limit": 2},
    "epoch": {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1},
    "not loaded": {"load_best_model_at_end": False, "save_total_limit": 2},
    "saved less often": {"load_best_model_at_end": False, "save_steps": 4},
}


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(tmp_path, name):
    """MFTrainer keeps the stock Trainer's checkpoints and records the same best checkpoint."""
    arguments = BEST | KEPT[name]
    stock = trained(tmp_path / "stock", PLAIN, kind=Trainer, **arguments)
    ours = trained(tmp_path / "ours", PLAIN, **arguments)

    assert outcome(ours) == outcome(stock)


@pytest.mark.parametrize("limit", [1, 2])
def test_own_copies_are_kept(tmp_path, limit):
    """Only names that a training writes are removed; a stock Trainer removes copies, too."""
    copies = ["checkpoint-backup", "checkpoint-2-copy", "checkpoint-1.old", "my-checkpoint-1"]
    for name in copies:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text("mine")
    trainer = trained(tmp_path, PLAIN, **BEST | {"save_total_limit": limit})

    for name in copies:
        assert (tmp_path / name / "notes.txt").read_text() == "mine"
        shutil.rmtree(tmp_path / name)
    stock = trained(tmp_path / "stock", PLAIN, kind=Trainer, **BEST | {"save_total_limit": limit})
    expected = outcome(stock)
    shutil.rmtree(tmp_path / "stock")
    assert outcome(trainer) == expected


def test_a_run_whose_folder_was_moved(tmp_path):
    """After a run's folder was moved, the best checkpoint is found in the new folder and kept."""
    outcomes = []
    for kind in (Trainer, MFTrainer):
        folder = tmp_path / kind.__name__
        arguments = BEST | {"save_total_limit": 2}
        trained(folder / "before", PLAIN, kind=kind, callbacks=[StopAfter(6)], **arguments)
        (folder / "before").rename(folder / "after")
        again = new_trainer(folder / "after", PLAIN, kind=kind, seed=1, **arguments)
        again.train(resume_from_checkpoint=True)
        outcomes.append(outcome(again))

    assert outcomes[0]["best"] == "checkpoint-2"
    assert outcomes[1] == outcomes[0]


class RaiseRate(TrainerCallback):
    """Raises the learning rate a thousandfold at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **known):
        """Raise it for good."""
        if state.global_step == self.step:
            lr_scheduler.base_lrs = [1000 * rate for rate in lr_scheduler.base_lrs]
            for group in optimizer.param_groups:
                group["lr"] *= 1000


@pytest.mark.parametrize(("rises_at", "kept"), [(20, [20, 50, 60]), (99, [50, 60])])
def test_a_training_that_has_diverged(tmp_path, rises_at, kept):
    """The newest checkpoint from before stays beside those of the limit, if a monitor looks."""
    arguments = {"max_steps": 60, "save_strategy": "steps", "save_steps": 10, "save_total_limit": 2}
    arguments |= {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 1}
    callbacks = [TrainingStateMonitor(local_norm_format="jsonl"), RaiseRate(rises_at)]
    trainer_of(MFTrainer, tmp_path, callbacks=callbacks, **arguments).train()

    folders = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert sorted(folders) == [f"checkpoint-{step}" for step in kept]


def test_a_damaged_record_of_anomalies(tmp_path):
    """It neither ends a save, nor lets a checkpoint go that may be the one to return to."""
    (tmp_path / "anomalies.jsonl").write_text('{"step": 1\n{}\n')
    saved = [tmp_path / f"checkpoint-{step}" for step in (10, 20)]

    assert TrainingStateMonitor().checkpoints_to_keep(saved) == saved


def test_the_best_model_at_the_end(tmp_path):
    """After training, the model has the weights of the best checkpoint."""
    trainer = trained(tmp_path, PLAIN, **BEST)

    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    weights = trainer.model.state_dict()
    assert_same_state(best, {name: weights[name] for name in best})


def test_a_relative_folder(tmp_path, monkeypatch):
    """With a relative ``output_dir``, the path of the best checkpoint is relative, too."""
    monkeypatch.chdir(tmp_path)
    trainer = trained(Path("run"), PLAIN, **BEST)

    assert trainer.state.best_model_checkpoint == "run/checkpoint-2"


def test_a_lower_limit_and_another_spelling(tmp_path, monkeypatch):
    """A resume by another path of the folder, with a lower limit, keeps the best checkpoint."""
    monkeypatch.chdir(tmp_path)
    arguments = BEST | {"load_best_model_at_end": False, "save_steps": 2}
    names = []
    for kind in (Trainer, MFTrainer):
        run = Path(kind.__name__)
        trained(run, PLAIN, kind=kind, callbacks=[StopAfter(8)], **arguments)
        again = new_trainer(run.absolute(), PLAIN, kind=kind, **arguments, save_total_limit=2)
        again.train(resume_from_checkpoint=True)
        assert Path(again.state.best_model_checkpoint) == run.absolute() / "checkpoint-2"
        names.append({path.name for path in run.glob("checkpoint-*")})

    assert names == [{"checkpoint-2", "checkpoint-12"}] * 2


def test_a_callback_that_the_checkpoint_does_not_know(tmp_path):
    """A callback with a state can be added when a run is resumed."""
    trained(tmp_path / "first", PLAIN, callbacks=[StopAfter(4)])
    added, checkpoint = EarlyStoppingCallback(100), tmp_path / "first" / "checkpoint-4"

    resume(checkpoint, tmp_path / "second", PLAIN, callbacks=[added], **BEST)

    text = (tmp_path / "second" / "checkpoint-12" / "trainer_state.json").read_text()
    assert json.loads(text)["stateful_callbacks"]["EarlyStoppingCallback"] == added.state()


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("who", ["Trainer", "CheckpointMonitor"])
def test_a_resume_completes_an_interrupted_rotation(tmp_path, who):
    """A run that is killed between a checkpoint and the deletion of old ones deletes them later."""
    trained(tmp_path, PLAIN, save_steps=2, max_steps=4)
    limit = (
        {"save_steps": 2, "save_total_limit": 1}
        if who == "Trainer"
        else {"save_strategy": "no", "callbacks": [CheckpointMonitor(2, keep_checkpoint_max=1)]}
    )

    resume(tmp_path / "checkpoint-4", tmp_path, PLAIN, max_steps=4, **limit)

    assert [path.name for path in tmp_path.glob("checkpoint*-*")] == ["checkpoint-4"]


def checkpoints(folder):
    """Return the names of all checkpoints in a folder."""
    return sorted(path.name for path in folder.glob("*checkpoint*-*"))


def test_a_resume_from_an_older_checkpoint(tmp_path):
    """Later checkpoints are renamed before any rank goes on; other folders' are left alone."""
    own, other = tmp_path / "own", tmp_path / "other"
    settings = {"max_steps": 1, "save_total_limit": 1, "gradient_accumulation_steps": 1}
    trained(own, PLAIN, **settings)
    for later in ("checkpoint-2", "checkpoint-3"):
        shutil.copytree(own / "checkpoint-1", own / later)
    shutil.copytree(own, other)

    # The training has made its last step, so it saves nothing.
    resume(other / "checkpoint-1", own, PLAIN, **settings)
    names = ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert checkpoints(own) == checkpoints(other) == names

    trainer = new_trainer(own, PLAIN, **settings)
    wait, at_barriers = trainer.accelerator.wait_for_everyone, []

    def noted_wait():
        at_barriers.append(checkpoints(own))
        wait()

    trainer.accelerator.wait_for_everyone = noted_wait
    trainer.train(resume_from_checkpoint=str(own / "checkpoint-1"))
    renamed = ["_abandoned-checkpoint-2", "_abandoned-checkpoint-3", "checkpoint-1"]
    assert at_barriers == [renamed]
    assert checkpoints(own) == renamed


class Own(TrainerCallback):
    """Save a checkpoint in an event of the end of the training."""

    def __init__(self, event):
        self.event = event

    def on_log(self, *_, logs=None, **__):
        """Save after the last log."""
        if self.event == "on_log" and "train_loss" in logs:
            self.trainer._save_checkpoint(self.trainer.model, None)

    def on_train_end(self, *_, **__):
        """Save at the end."""
        if self.event == "on_train_end":
            self.trainer._save_checkpoint(self.trainer.model, None)


@pytest.mark.parametrize("greater_is_better", [True, False])
@pytest.mark.parametrize("event", ["on_log", "on_train_end"])
def test_a_checkpoint_that_a_callback_saves_at_the_end(event, greater_is_better, tmp_path):
    """It is written where a stock Trainer's is, and kept."""
    arguments = BEST | {"save_total_limit": 1, "greater_is_better": greater_is_better}
    found = []
    for kind in (Trainer, MFTrainer):
        callback = Own(event)
        trainer = new_trainer(
            tmp_path / kind.__name__, PLAIN, kind=kind, callbacks=[callback], **arguments
        )
        callback.trainer = trainer
        trainer.train()
        found.append(outcome(trainer)["checkpoints"])

    assert found[1] == found[0]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_method_and_a_callback_find_the_output_folder(tmp_path, limit):
    """They may ask for it at any log, and at the end of the training."""
    folders = []

    class Logging(MFTrainer):
        def log(self, logs, *args, **keywords):
            folders.append(self._get_output_dir(None))
            super().log(logs, *args, **keywords)
            if limit > 1:  # else, the Trainer would look for checkpoints to delete next
                folders.append(self._get_output_dir(None))

    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *_, **__):
            folders.append(trainer._get_output_dir(None))

    arguments = BEST | {"save_total_limit": limit, "max_steps": 4}
    trainer = new_trainer(tmp_path, PLAIN, kind=Logging, callbacks=[AtTheEnd()], **arguments)
    trainer.train()

    assert set(folders) == {str(tmp_path)}
