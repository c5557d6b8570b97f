"""Checkpoints contain averages: of runs, of the trials of a search, and of every kind of model."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    HfArgumentParser,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import HPSearchBackend

from mfwrap.callbacks import EMACallback
from mfwrap.callbacks.average.files import load_exported, resumed_checkpoint, saved_checkpoint
from mfwrap.trainer import MFTrainer
from support.averaged_training import KINDS, STEPS, WEIGHT, Follower, evaluated_by_hand, weights_of
from support.resumed_training import PLAIN, StopAfter, new_trainer, trained
from support.spoilt.gpt2 import Rows, padded, tiny_gpt2
from support.training_state import assert_same_state

SAVING = STEPS | {"max_steps": 4, "eval_strategy": "no", "load_best_model_at_end": False}
IN_STEP = ["its average", "own average"]


def trainer_of(folder, kind, *, before=(), after=(), model=None, **keywords):
    """Return an untrained trainer, its `Follower` and the tested callback."""
    trainer_kind, callback_arguments, extras = KINDS[kind]
    follower, callback = Follower(), EMACallback(**callback_arguments)
    callbacks = [follower, *before, callback, *after]
    keywords = SAVING | keywords
    trainer = new_trainer(
        folder, PLAIN, kind=trainer_kind, callbacks=callbacks, model=model, **extras, **keywords
    )
    return trainer, follower, callback


class AtBegin(TrainerCallback):
    """Keep the averages at the start of a training, and end the training.

    Add it after the tested callback, which loads the averages.
    """

    def __init__(self) -> None:
        self.callback, self.averages = None, {}

    def on_train_begin(self, *_, **__) -> None:
        """Keep copies of the averages and end the training."""
        named_averages = self.callback.ema.named_averages()
        self.averages = {name: average.clone() for name, average in named_averages}
        raise KeyboardInterrupt


def begun(folder, kind, checkpoint, **keywords):
    """Resume a run and return the averages that it starts with."""
    at_begin = AtBegin()
    resumed, _, at_begin.callback = trainer_of(folder, kind, after=[at_begin], seed=1, **keywords)
    with pytest.raises(KeyboardInterrupt):
        resumed.train(resume_from_checkpoint=checkpoint if checkpoint is True else str(checkpoint))
    return at_begin.averages


@pytest.mark.parametrize("kind", IN_STEP)
def test_they_are_part_of_the_checkpoint(tmp_path, kind):
    """A new checkpoint of an `MFTrainer` has the averages, and its manifest lists them."""
    listed = []

    class Looking(TrainerCallback):
        """Record the listed files of averages before the tested callback's ``on_save``."""

        def on_save(self, _args, state, _control, **_) -> None:
            folder = tmp_path / f"checkpoint-{state.global_step}"
            manifest = json.loads((folder / "mfwrap_manifest.json").read_text())
            names = [name for name in manifest["files"] if "ema" in name]
            assert all((folder / name).is_file() for name in names)
            listed.append(sorted(names))

    trainer, _, _ = trainer_of(tmp_path, kind, before=[Looking()])
    trainer.train()

    own = ["mfwrap_ema.safetensors"] if kind == "own average" else []
    model = ["ema/config.json", "ema/generation_config.json", "ema/model.safetensors"]
    assert listed == [model + own] * 2


@pytest.mark.parametrize("kind", IN_STEP)
def test_an_end_right_after_a_checkpoint(tmp_path, kind):
    """A checkpoint is complete even if the run ends before the callback's ``on_save``."""

    class Ending(TrainerCallback):
        def on_save(self, *_, **__) -> None:
            raise KeyboardInterrupt

    ended, follower, _ = trainer_of(tmp_path, kind, before=[Ending()])
    with pytest.raises(KeyboardInterrupt):
        ended.train()

    assert_same_state(follower.averages[2], begun(tmp_path, kind, checkpoint=True))


@pytest.mark.parametrize("name", ["mfwrap_ema.safetensors", "ema/model.safetensors"])
def test_a_damaged_file_is_refused(tmp_path, name):
    """Resuming an `MFTrainer` raises an error that names a damaged file, and loads nothing."""
    trainer, _, _ = trainer_of(tmp_path, "own average")
    trainer.train()
    path = tmp_path / "checkpoint-4" / name
    path.write_bytes(path.read_bytes()[:-5])
    resumed, _, _ = trainer_of(tmp_path, "own average", seed=1)
    before = weights_of(resumed.model)

    with pytest.raises(ValueError, match=re.escape(f"checkpoint-4: {name} is damaged")):
        resumed.train(resume_from_checkpoint=True)

    assert_same_state(before, weights_of(resumed.model))


@pytest.mark.parametrize("kind", ["own average", "stock"])
def test_a_run_that_goes_on_elsewhere(tmp_path, kind):
    """A run that is resumed in another folder starts with the average of its checkpoint."""
    first, follower, _ = trainer_of(tmp_path / "first", kind)
    first.train()
    other, _, _ = trainer_of(tmp_path / "other", kind, learning_rate=1e-4)
    other.train()
    checkpoint = tmp_path / "first" / "checkpoint-2"
    # In a stock Trainer, callbacks can find a checkpoint in another folder only through this
    # argument.
    told = {"resume_from_checkpoint": str(checkpoint)} if kind == "stock" else {}

    averages = begun(tmp_path / "other", kind, checkpoint, **told)

    assert_same_state(follower.averages[2], averages)


def test_an_average_of_another_run_is_not_taken(tmp_path):
    """The average in a checkpoint of another run is ignored, because its log differs."""
    for name, rate in (("first", 1e-2), ("other", 1e-4)):
        trainer, _, _ = trainer_of(tmp_path / name, "stock", learning_rate=rate)
        trainer.train()
    checkpoint = tmp_path / "first" / "checkpoint-2"

    with pytest.warns(UserWarning, match="the checkpoint to resume from was not found"):
        averages = begun(tmp_path / "other", "stock", checkpoint)

    assert_same_state(load_file(checkpoint / "model.safetensors"), averages)


def test_the_state_that_a_checkpoint_holds(tmp_path):
    """The checkpoint with the same step and log is found, even if the log has a NaN."""
    trainer = trained(tmp_path, PLAIN, kind=Trainer, **SAVING)
    trainer.state.log_history.append({"loss": float("nan")})
    for step in (2, 4):
        trainer.state.global_step = step
        trainer.state.save_to_json(str(tmp_path / f"checkpoint-{step}" / "trainer_state.json"))

    assert resumed_checkpoint(trainer.args, trainer.state) == tmp_path / "checkpoint-4"
    trainer.state.log_history.append({"loss": 1.0})
    assert resumed_checkpoint(trainer.args, trainer.state) is None


def searching_trainer(folder, kind, **keywords):
    """Return a trainer with a new model for each trial, its `FollowerOfTrials` and the callback."""
    trainer_kind, callback_arguments, extras = KINDS[kind]
    follower, callback = FollowerOfTrials(), EMACallback(**callback_arguments)
    template = new_trainer(folder, PLAIN, **(SAVING | keywords))
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(
        template.args.to_dict() | {"report_to": []}, allow_extra_keys=True
    )
    trainer = trainer_kind(
        model_init=lambda _trial: tiny_gpt2(0.1, 0),
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        data_collator=padded,
        callbacks=[follower, callback],
        **extras.get("trainer_settings", {}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, follower, callback


class FollowerOfTrials(Follower):
    """Keep the averages of each trial separately."""

    def __init__(self) -> None:
        super().__init__()
        self.trials = []

    def on_train_begin(self, _args, _state, _control, model=None, **_) -> None:
        """Start a new trial."""
        super().on_train_begin(_args, _state, _control, model=model)
        self.averages = {}
        self.trials.append(self.averages)


def assert_exported(run_folder, averages, *, is_own):
    """Check that each checkpoint of a trial has the averages of its step."""
    folders = sorted(run_folder.glob("checkpoint-*"))
    assert [folder.name for folder in folders] == ["checkpoint-2", "checkpoint-4"]
    for folder in folders:
        expected = averages[int(folder.name[-1])]
        assert_same_state(expected, weights_of(type(tiny_gpt2()).from_pretrained(folder / "ema")))
        assert (folder / "mfwrap_ema.safetensors").exists() == is_own


SEARCHES = [("its average", None), ("own average", None), ("stock", None), ("stock", "named")]


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(("kind", "name"), SEARCHES)
@pytest.mark.filterwarnings("ignore")  # (warnings of optuna, not ours)
def test_a_search(tmp_path, kind, name):
    """A search chooses the best trial by averages; each checkpoint has its trial's averages."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trainer, follower, _ = searching_trainer(tmp_path, kind, eval_strategy="steps")
    rates = iter([1e-2, 3e-3])

    def space(trial):
        rate = next(rates)
        return {"learning_rate": trial.suggest_float("learning_rate", rate, rate)}

    best = trainer.hyperparameter_search(
        space,
        n_trials=2,
        direction="minimize",
        backend="optuna",
        hp_name=name and (lambda trial: f"{name}-{trial.number}"),
    )

    assert not list(tmp_path.glob("checkpoint-*"))
    for number, averages in enumerate(follower.trials):
        run_folder = tmp_path / f"{name or 'run'}-{number}"
        assert_exported(run_folder, averages, is_own=kind != "its average")
    assert not torch.equal(*(averages[4][WEIGHT] for averages in follower.trials))
    expected = evaluated_by_hand(tmp_path / "hand", follower.trials[int(best.run_id)][4])
    assert best.objective == expected


def test_a_trial_that_is_resumed(tmp_path):
    """A resumed trial of a stock Trainer starts with the average in the trial's folder."""
    optuna = pytest.importorskip("optuna")
    trainer, follower, _ = searching_trainer(tmp_path, "stock")
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0, 1)}
    for number, rate in enumerate([1e-2, 3e-3]):
        trainer.train(trial=optuna.trial.FixedTrial({"learning_rate": rate}, number))

    for number in (0, 1):
        averages = begun(tmp_path, "stock", tmp_path / f"run-{number}" / "checkpoint-2")
        assert_same_state(follower.trials[number][2], averages)


def test_the_newest_trial_is_what_was_just_saved(tmp_path):
    """If several trials have the same step and log, the newest trial is the one just saved."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    state = TrainerState(global_step=2, is_hyper_param_search=True)
    assert saved_checkpoint(arguments, state) is None
    for age, (name, log) in enumerate([("a", []), ("c", []), ("b", []), ("d", [{"loss": 1.0}])]):
        folder = tmp_path / name / "checkpoint-2"
        folder.mkdir(parents=True)
        saved = replace(state, log_history=log)
        saved.save_to_json(str(folder / "trainer_state.json"))
        os.utime(folder / "trainer_state.json", ns=(age, age))

    assert saved_checkpoint(arguments, state) == tmp_path / "b" / "checkpoint-2"


class Counter(nn.Module):
    """A plain module, without ``save_pretrained`` and without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, input_ids=None, labels=None, factor=None, **_):
        """Predict each token from the token before."""
        scores = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss * factor.prod(), "logits": scores}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_module(tmp_path, kind):
    """The averaged weights of a plain module are exported and loaded at the end."""
    trainer, follower, _ = trainer_of(
        tmp_path, kind, model=Counter(), eval_strategy="steps", load_best_model_at_end=True
    )
    trainer.train()

    for step in (2, 4):
        exported = load_file(tmp_path / f"checkpoint-{step}" / "ema" / "model.safetensors")
        assert_same_state(follower.averages[step], exported)
    best = trainer.state.best_global_step
    assert_same_state(follower.averages[best], weights_of(trainer.model))


@pytest.mark.filterwarnings("ignore")  # (warnings of peft, not ours)
def test_an_adapter(tmp_path):
    """The adapter of a PEFT model is averaged, exported and loaded at the end."""
    model = get_peft_model(
        tiny_gpt2(),
        LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )
    trainer, follower, _ = trainer_of(
        tmp_path, "own average", model=model, eval_strategy="steps", load_best_model_at_end=True
    )
    trainer.train()

    averages = follower.averages[trainer.state.best_global_step]
    ended = weights_of(trainer.model)
    adapted = [name for name in averages if "lora" in name]
    assert adapted
    for name in adapted:
        assert torch.equal(averages[name], ended[name])


def test_weights_in_several_files(tmp_path):
    """An export in several files is loaded completely."""
    model, other = tiny_gpt2(seed=1), tiny_gpt2(seed=2)
    model.save_pretrained(tmp_path / "ema", max_shard_size="4KB", save_original_format=False)
    assert len(list((tmp_path / "ema").glob("*.safetensors"))) > 1

    load_exported(other, tmp_path)

    assert_same_state(weights_of(model), weights_of(other))


def test_a_damaged_export(tmp_path):
    """A damaged export raises an error that names the file."""
    tiny_gpt2().save_pretrained(tmp_path / "ema")
    path = tmp_path / "ema" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])

    with pytest.raises(ValueError, match=f"cannot load the average: {path} is damaged"):
        load_exported(tiny_gpt2(), tmp_path)


def test_nothing_to_load(tmp_path):
    """Without an export, loading warns and leaves the model unchanged."""
    model = tiny_gpt2()
    before = weights_of(model)

    with pytest.warns(UserWarning, match="ema has no averaged weights; the model keeps"):
        load_exported(model, tmp_path)

    assert_same_state(before, weights_of(model))


def test_a_checkpoint_that_has_gone(tmp_path):
    """If a stock Trainer's checkpoint is missing, a warning names it and nothing is written."""

    class Removing(TrainerCallback):
        def on_save(self, *_, **__) -> None:
            shutil.rmtree(tmp_path / "checkpoint-2")

    trainer, _, _ = trainer_of(tmp_path, "stock", before=[Removing()], after=[StopAfter(2)])

    with pytest.warns(UserWarning, match="the checkpoint of step 2 was not found in"):
        trainer.train()
    assert not list(tmp_path.rglob("*ema*"))


def test_files_are_written_once(tmp_path):
    """The first ``on_save`` after ``save_into`` writes nothing; the second ``on_save`` writes."""
    trainer, _, callback = trainer_of(tmp_path, "own average", max_steps=2)
    trainer.train()
    assert isinstance(trainer, MFTrainer)
    folder = tmp_path / "checkpoint-2"
    (folder / "mfwrap_ema.safetensors").unlink()
    callback.save_into(tmp_path, trainer.args, trainer.model)
    for is_written in (False, True):
        callback.on_save(trainer.args, trainer.state, trainer.control, model=trainer.model)
        assert (folder / "mfwrap_ema.safetensors").exists() == is_written
