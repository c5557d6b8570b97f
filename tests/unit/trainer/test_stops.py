"""A stopped training says how to continue, hangs nowhere, and stays ended if it has ended."""

import signal
import sys

import pytest
from transformers import EarlyStoppingCallback

from mfwrap.trainer import MFTrainer
from mfwrap.trainer.stops import had_ended, program_words, stop
from support.ranks.processes import run_ranks
from support.ranks.stops import train_until_one_dies
from support.trainer_runs import new_trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dead", "says"),
    [
        (0, "the process that hosts the key-value store of torch.distributed did not answer"),
        (1, "rank 1 did not answer within 10 s"),
    ],
)
def test_a_signal_after_a_death(tmp_path, dead, says):
    """The rank that remains fails with an error, and leaves the last complete checkpoint."""
    statuses = run_ranks(tmp_path, train_until_one_dies, dead)

    assert (statuses[dead], statuses[1 - dead]) == (-signal.SIGKILL, 1)
    assert (tmp_path / "error").read_text().startswith(f"training was asked to stop, but {says}")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("num_machines", "words"),
    [
        (None, "mfwrap"),
        ("1", "torchrun --standalone --nproc-per-node 2 -m mfwrap"),
        ("2", "mfwrap"),
    ],
)
def test_the_words_of_the_program(monkeypatch, num_machines, words):
    """Under torchrun on one machine, the program starts again on as many ranks."""
    variables = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}
    variables["GROUP_WORLD_SIZE"] = num_machines or ""
    for name, value in variables.items():
        if num_machines is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    assert " ".join(program_words()) == words


def test_the_end_by_ctrl_c_has_no_traceback(tmp_path, monkeypatch, capsys):
    """The line about the stop is all that the process prints; other errors are printed."""
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error))
    trainer = new_trainer(MFTrainer, tmp_path)
    with pytest.raises(KeyboardInterrupt) as stopped:
        stop(trainer, None, is_interrupted=True)
    errors = [stopped.value, KeyboardInterrupt(), OSError("no more")]
    for error in errors:
        sys.excepthook(type(error), error, None)

    assert [error for _, error, _ in printed] == errors[1:]
    assert capsys.readouterr().err.startswith("mfwrap: stopped by Ctrl-C after step 0")


def early_stopped(folder, patience=1, **arguments):
    """Return a trainer whose loss never improves enough for early stopping."""
    return new_trainer(
        MFTrainer,
        folder,
        callbacks=[EarlyStoppingCallback(patience, early_stopping_threshold=100.0)],
        **{
            "max_steps": 12,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        }
        | arguments,
    )


@pytest.mark.parametrize("restores", [True, False])
def test_auto_leaves_an_early_stopped_training_alone(tmp_path, restores):
    """``"auto"`` makes no update after early stopping has ended a training."""
    keys = {"restore_callback_states_from_checkpoint": restores}
    first = early_stopped(tmp_path, **keys)
    first.train(resume_from_checkpoint="auto")
    again = early_stopped(tmp_path, **keys)
    again.train(resume_from_checkpoint="auto")

    assert first.state.global_step == again.state.global_step == 4
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert again.state.best_metric == first.state.best_metric
    again.train()  # from the start
    assert again.state.global_step == 4


def test_more_patience_or_another_word_trains_on(tmp_path):
    """With more patience, with ``True``, and from the start, the training makes updates."""
    early_stopped(tmp_path).train()
    patient = early_stopped(tmp_path, patience=3)
    patient.train(resume_from_checkpoint="auto")
    explicit = early_stopped(tmp_path)
    explicit.train(resume_from_checkpoint=True)
    same = early_stopped(tmp_path / "other")
    same.train(resume_from_checkpoint="auto")
    same.train()

    assert patient.state.global_step > 4
    assert explicit.state.global_step > patient.state.global_step
    assert same.state.global_step == 4


def test_patience_of_several_callbacks():
    """Each callback is compared with its own state; the present patience counts."""
    callbacks = [EarlyStoppingCallback(3), EarlyStoppingCallback(2)]
    states = [{"attributes": {"early_stopping_patience_counter": n}} for n in (2, 1)]

    assert not had_ended({"EarlyStoppingCallback": states}, callbacks)
    assert had_ended({"EarlyStoppingCallback": states[::-1]}, callbacks)
    assert had_ended({"EarlyStoppingCallback": states[0]}, callbacks[1:])
    assert not had_ended({}, callbacks)
