"""The results of evaluations are named, and read from a Trainer's metrics and log."""

from transformers import TrainerState
from transformers.modelcard import make_markdown_table, parse_log_history

from mfwrap.records.evaluations import last_evaluation, mark_averages, named, results_of


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

    assert last_evaluation(log) == ({"loss": 2.0, "accuracy": 0.5}, False)
    assert last_evaluation(log[:1]) == ({}, False)


def test_evaluations_of_averaged_weights():
    """A mark in the log tells which results are of averages; transformers can read the log."""
    state = TrainerState(global_step=2)
    log = state.log_history
    log.append({"loss": 4.0, "step": 1, "epoch": 0.5})
    log.append({"eval_loss": 3.0, "step": 1, "epoch": 0.5})
    log.append({"eval_loss": 2.0, "eval_runtime": 1.0, "step": 2, "epoch": 1.0})
    for metrics in ({"loss": 1.0}, {"eval_loss": 1.0}):
        mark_averages(state, metrics)
        assert last_evaluation(log) == ({"loss": 2.0}, False)
    mark_averages(state, {"eval_loss": 2.0, "eval_runtime": 1.0})
    log.append({"train_runtime": 1.0, "train_loss": 3.0, "step": 2, "epoch": 1.0})

    assert last_evaluation(log) == ({"loss": 2.0}, True)
    assert last_evaluation(log[:2]) == ({"loss": 3.0}, False)
    assert named(log) == [
        *log[:2],
        {"ema_eval_loss": 2.0, "eval_runtime": 1.0, "step": 2, "epoch": 1.0},
        log[4],
    ]
    _, lines, results = parse_log_history(log)
    assert make_markdown_table(lines).count("\n") == 4
    assert results == {"Loss": 2.0}
