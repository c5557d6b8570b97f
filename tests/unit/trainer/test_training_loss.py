"""The mean loss of a whole training, resumed or not, equals the mean of its steps' losses."""

from dataclasses import replace

import pytest
from transformers import Trainer, TrainerCallback

from support.resumed_training import (
    NUM_STEPS,
    PLAIN,
    RunSettings,
    StopAfter,
    logged,
    new_trainer,
    resume,
    trained,
)

UNLOGGED = replace(PLAIN, logging_steps=500)


def losses(trainer):
    """Return the loss of each log."""
    return [entry["loss"] for entry in logged(trainer)]


def training_loss(trainer):
    """Return the mean loss in the last entry of the log."""
    return trainer.state.log_history[-1]["train_loss"]


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("step", [5, 8, NUM_STEPS])
@pytest.mark.parametrize("logging_steps", [1, 3, 500])
def test_after_a_resume_it_is_the_mean_of_all_steps(tmp_path, step, logging_steps):
    """After a resume, result, metrics and log have an uninterrupted stock Trainer's mean loss."""
    settings = replace(PLAIN, logging_steps=logging_steps)
    stock = trained(tmp_path / "stock", settings, kind=Trainer, save_strategy="no")
    trained(tmp_path / "first", settings)
    trainer = new_trainer(tmp_path / "second", settings, seed=1)

    result = trainer.train(resume_from_checkpoint=str(tmp_path / "first" / f"checkpoint-{step}"))

    found = [result.training_loss, result.metrics["train_loss"], training_loss(trainer)]
    assert found == [training_loss(stock)] * 3


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("step", [4, 8])
def test_with_other_data_after_a_resume_it_is_the_mean_of_what_was_met(tmp_path, step):
    """With ``ignore_data_skip``, the training loss is the mean over the batches that were used."""
    keywords = {"ignore_data_skip": True, "save_strategy": "no"}
    checkpoints = []
    for name, settings in (("each", PLAIN), ("none", UNLOGGED)):
        trained(tmp_path / name, settings)
        checkpoints.append(tmp_path / name / f"checkpoint-{step}")
    each = resume(checkpoints[0], tmp_path / "a", PLAIN, **keywords)

    resumed = resume(checkpoints[1], tmp_path / "b", UNLOGGED, **keywords)

    expected = sum(losses(each)) / NUM_STEPS
    assert len(losses(each)) == NUM_STEPS
    assert training_loss(resumed) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:no state of the step")
def test_after_a_stock_checkpoint_it_is_the_mean_of_the_steps_since(tmp_path):
    """After resuming a stock checkpoint, the training loss is the mean of the later steps.

    The checkpoint does not hold the earlier losses. Resuming once more does not change the mean.
    """
    stock = trained(tmp_path / "stock", PLAIN, kind=Trainer)
    trained(tmp_path / "unlogged", UNLOGGED, kind=Trainer, callbacks=[StopAfter(5)])
    first = resume(tmp_path / "unlogged" / "checkpoint-5", tmp_path / "ours", UNLOGGED)
    again = resume(tmp_path / "ours" / "checkpoint-8", tmp_path / "again", UNLOGGED)

    expected = sum(losses(stock)[5:]) / (NUM_STEPS - 5)
    assert training_loss(first) == pytest.approx(expected, rel=1e-6)
    assert training_loss(again) == training_loss(first)


def test_what_the_user_logs_as_a_training_s_loss_stays_as_it_is(tmp_path):
    """A ``train_loss`` that the user logs is not replaced."""
    trainer = trained(tmp_path, PLAIN, save_strategy="no")

    trainer.log({"train_loss": 7.0})

    assert training_loss(trainer) == 7.0


class Ends(TrainerCallback):
    """End a training after step 5, without saving."""

    def on_step_end(self, _args, state, control, **_):
        """Request the end of the training."""
        control.should_training_stop = state.global_step == 5


def test_a_checkpoint_after_the_end_goes_on_as_if_there_were_none(tmp_path):
    """A run resumed from a checkpoint written after a training counts each loss once."""
    settings = RunSettings(logging_steps=500)
    keywords = {"save_strategy": "no"}
    whole = trained(tmp_path / "whole", settings, **keywords)
    ended = trained(tmp_path / "ended", settings, callbacks=[Ends()], **keywords)
    # Write the checkpoint after the training, as MFTrainer does after a SIGTERM during the last
    # step.
    ended._save_checkpoint(ended.model, None)

    resumed = resume(tmp_path / "ended" / "checkpoint-5", tmp_path / "more", settings, **keywords)

    assert ended._MFTrainerMixin__losses.step_log.state_dict()["left_out"] > 0
    assert training_loss(resumed) == training_loss(whole)


def test_the_metrics_are_those_of_a_stock_trainer(tmp_path):
    """The metrics that ``train`` returns have the same keys and, apart from times, values."""
    stock = new_trainer(tmp_path / "stock", PLAIN, kind=Trainer, save_strategy="no").train()
    ours = new_trainer(tmp_path / "ours", PLAIN, save_strategy="no").train()
    times = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}

    assert ours.metrics.keys() == stock.metrics.keys()
    assert all(ours.metrics[key] == stock.metrics[key] for key in stock.metrics.keys() - times)
