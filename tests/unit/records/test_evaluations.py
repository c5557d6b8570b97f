"""The results of evaluations are read from a Trainer's metrics and log."""

from mfwrap.records.evaluations import last_results, results_of


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

    assert last_results(log) == {"loss": 2.0, "accuracy": 0.5}
    assert last_results(log[:1]) == {}
