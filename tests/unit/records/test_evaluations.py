"""The results of evaluations are read from a Trainer's metrics and log."""

from transformers import TrainerState

from mfwrap.records.evaluations import (
    has_averages,
    last_evaluation,
    mark_averages,
    named,
    numbers_of,
    results_of,
)


def test_metrics_without_timings():
    """`results_of` leaves out timings and the epoch."""
    timings = {"eval_runtime": 1.0, "eval_samples_per_second": 2.0, "epoch": 1.0}
    preparation = {"eval_model_preparation_time": 1.0}

    assert results_of({"eval_loss": 1.0} | timings | preparation) == {"eval_loss": 1.0}


def test_the_last_evaluation_of_a_log():
    """The last entry with results counts; logs of the training and texts do not."""
    log = [
        {"loss": 2.0, "step": 1},
        {"eval_loss": 3.0, "step": 1},
        {"eval_loss": 2.0, "eval_accuracy": 0.5, "eval_runtime": 1.0, "step": 2},
        {"eval_note": "a text", "step": 2},
        {"train_runtime": 1.0, "step": 2},
    ]

    assert numbers_of(last_evaluation(log)) == {"loss": 2.0, "accuracy": 0.5}
    assert last_evaluation(log[:1]) == {}


def test_an_entry_of_averaged_weights():
    """A mark in the log tells the results of averaged weights; it is none of the results."""
    state = TrainerState(log_history=[{"eval_loss": 3.0, "step": 1}])
    state.log_history.append({"eval_loss": 2.0, "eval_runtime": 1.0, "step": 2})
    for logs in ({"loss": 1.0}, {"eval_loss": 1.0}, {"eval_loss": 2.0, "eval_runtime": 1.0}):
        assert not has_averages(state.log_history[1])
        mark_averages(state, logs)
    first, second = state.log_history

    assert not has_averages(first)
    assert named(first) == first
    assert has_averages(second)
    assert results_of(second) == {"eval_loss": 2.0}
    assert named(second) == {"ema_eval_loss": 2.0, "eval_runtime": 1.0, "step": 2}
