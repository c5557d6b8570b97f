"""MFTrainer says in the run folder what the run was, if a monitor writes records there."""

import functools
import inspect
import signal
from pathlib import Path

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.callbacks import MetricsRecorder, TrainingStateMonitor
from mfwrap.records import read_json_lines
from mfwrap.records.run_record import read_facts
from mfwrap.trainer import MFTrainer
from support.trainer_runs import Counting, new_trainer

MONITOR = {"local_norm_format": "jsonl"}


def test_settings_time_and_tokens(tmp_path):
    """The files have settings of Trainer and step, time and tokens; a resume counts on."""
    options = {"gradient_accumulation_steps": 2, "logging_steps": 2, "save_steps": 2}
    options |= {"include_num_input_tokens_seen": "all"}
    options |= {"save_strategy": "steps", "extras": {"step": StepConfig(local_norm=True)}}
    callbacks = [TrainingStateMonitor(**MONITOR)]
    new_trainer(MFTrainer, tmp_path, max_steps=4, callbacks=callbacks, **options).train()

    facts = read_facts(tmp_path)
    assert facts["state"] == "finished"
    assert facts["configuration"]["training"]["gradient_accumulation_steps"] == 2
    assert facts["configuration"]["step"]["local_norm"] is True
    assert "gradient_accumulation_steps" not in facts["configuration"]["step"]
    assert facts["configuration"]["training"]["hub_token"] is None
    assert "resumed" not in facts
    callbacks = [TrainingStateMonitor(**MONITOR)]
    trainer = new_trainer(MFTrainer, tmp_path, max_steps=6, callbacks=callbacks, **options)
    trainer.train(resume_from_checkpoint="auto")

    lines = read_json_lines(tmp_path / "progress.jsonl")
    counted = {
        each["step"]: each["num_input_tokens_seen"]
        for each in trainer.state.log_history
        if "num_input_tokens_seen" in each
    }
    assert {line["step"]: line["tokens"] for line in lines} == counted
    assert list(counted) == [2, 4, 6]
    times = [line["seconds"] for line in lines]
    assert times == sorted(times)
    assert read_facts(tmp_path)["resumed"] == [4]


def test_what_the_run_gets_beside_arguments(tmp_path):
    """The average and the rows left out are settings too; a resume leaves out its run's rows."""
    average = functools.partial(ExponentialMovingAverage, decay=0.9, warmup=True)
    options = {"save_strategy": "steps", "save_steps": 2}
    told = []
    for extras in ({"ema": average}, {"ema": average, "skip_rows": [(0, 3)]}, {"ema": average}):
        callbacks = [TrainingStateMonitor(**MONITOR)]
        steps = {"max_steps": 2 + 2 * len(told)}
        trainer = new_trainer(
            MFTrainer, tmp_path, callbacks=callbacks, extras=extras, **steps, **options
        )
        trainer.train(resume_from_checkpoint="auto")
        told.append(read_facts(tmp_path)["configuration"])

    averages = [one["ema"] for one in told]
    assert averages == [{"decay": 0.9, "warmup": True, "update_every": 1}] * 3
    rows = [one.get("skip_rows", "") for one in told]
    assert rows[0] == ""
    assert rows[1].startswith("1 with checksum")
    assert rows[2] == rows[1]


def test_a_resume_after_the_last_update(tmp_path):
    """A training that resumes where it ended makes no update, and records its end again."""
    options = {"logging_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    records = []
    for _ in range(2):
        callbacks = [TrainingStateMonitor(**MONITOR)]
        trainer = new_trainer(MFTrainer, tmp_path, callbacks=callbacks, **options)
        trainer.train(resume_from_checkpoint="auto")
        lines = read_json_lines(tmp_path / "progress.jsonl")
        records.append([(line["step"], line["tokens"]) for line in lines])

    assert records[0] == records[1]
    assert [step for step, _ in records[0]] == [4, 6]


def test_a_training_that_ends_early(tmp_path):
    """The file says at which of how many steps a callback has ended the training."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    new_trainer(
        MFTrainer,
        tmp_path,
        max_steps=9,
        callbacks=[TrainingStateMonitor(**MONITOR), EarlyStoppingCallback(1, 1e9)],
        **options,
    ).train()

    assert read_facts(tmp_path)["state"] == "stopped early at step 2 of 9"


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal(tmp_path, number, error):
    """The file says that a signal has stopped the training, until a resumed one finishes it."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                signal.raise_signal(number)

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 9}
    monitor = TrainingStateMonitor(**MONITOR)
    with pytest.raises(error):
        new_trainer(MFTrainer, tmp_path, callbacks=[monitor, Stop()], **options).train()

    # The signal is seen at the end of a step, by when the next one may have begun.
    step = get_last_checkpoint(tmp_path).rpartition("-")[2]
    assert read_facts(tmp_path)["state"] == f"stopped by a signal at step {step} of 4"
    monitor = TrainingStateMonitor(**MONITOR)
    new_trainer(MFTrainer, tmp_path, callbacks=[monitor], **options).train("auto")

    assert read_facts(tmp_path)["state"] == "finished"


def test_another_process_writes_no_facts(tmp_path):
    """A process that is not the main one may write records, but the facts are the main one's."""

    class Other(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            state.is_world_process_zero = False

    callbacks = [TrainingStateMonitor(**MONITOR), Other()]
    new_trainer(MFTrainer, tmp_path, max_steps=2, callbacks=callbacks).train()

    assert read_facts(tmp_path) == {}


def test_without_records_there_are_no_facts(tmp_path):
    """A training whose callbacks write no records writes no file."""
    new_trainer(MFTrainer, tmp_path, max_steps=2).train()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_monitor(tmp_path):
    """The file is where the records are."""
    monitor = TrainingStateMonitor(**MONITOR, folder=tmp_path / "records")
    new_trainer(MFTrainer, tmp_path / "run", max_steps=2, callbacks=[monitor]).train()

    assert read_facts(tmp_path / "records")["state"] == "finished"
    assert read_facts(tmp_path / "run") == {}


def test_an_error(tmp_path, monkeypatch):
    """The file says after which step and in which line, if it is the user's, and has the steps."""
    monkeypatch.chdir(Path(__file__).parent)

    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                msg = "by a callback"
                raise ArithmeticError(msg)

    callbacks = [MetricsRecorder(tmp_path), Fail()]
    trainer = new_trainer(MFTrainer, tmp_path, max_steps=9, callbacks=callbacks)
    with pytest.raises(ArithmeticError, match="by a callback"):
        trainer.train()

    facts = read_facts(tmp_path)
    assert facts["state"] == "failed after step 3 (ArithmeticError)"
    raising = inspect.getsourcelines(Fail.on_step_end)[1] + 3
    assert facts["error"] == f"ArithmeticError: by a callback; in test_run_facts.py:{raising}"
    records = read_json_lines(tmp_path / "metrics.jsonl")
    assert [one["step"] for one in records if "loss" in one] == [1, 2, 3]


def test_the_tokens_of_the_last_steps(tmp_path):
    """They count although an evaluation comes before the Trainer has counted them."""
    data = Counting(64)
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        data=data,
        callbacks=[TrainingStateMonitor(**MONITOR)],
        max_steps=5,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        include_num_input_tokens_seen="all",
    )
    trainer.train()

    last = read_json_lines(tmp_path / "progress.jsonl")[-1]
    assert (last["step"], last["tokens"]) == (5, trainer.state.num_input_tokens_seen)
