"""The results of evaluations are named, and read from a Trainer's metrics and log."""

import copy

from transformers import TrainerState
from transformers.modelcard import make_markdown_table, parse_log_history

from mfwrap.records.evaluations import (
    ends_with_averages,
    last_has_averages,
    mark_averages,
    named,
    note_averages,
    note_loaded_averages,
    note_results,
    noted_results,
    prefix_of,
    results_of,
)


def test_metrics_without_timings():
    """`results_of` leaves out timings, the epoch, a count of TRL, and what was not measured."""
    timings = {"eval_runtime": 1.0, "eval_samples_per_second": 2.0, "epoch": 1.0}
    preparation = {"eval_model_preparation_time": 1.0}

    unknown = {"eval_rewards/short/mean": None}
    count = {"eval_num_tokens": 2253.0}
    everything = {"eval_loss": 1.0} | timings | preparation | unknown | count
    assert results_of(everything) == {"eval_loss": 1.0}


def test_the_mean_reward_is_first():
    """Of the many metrics of a training by rewards, it is what the model learns."""
    metrics = {"eval_loss": 0.0, "eval_rewards/short/mean": 0.5, "eval_reward": 0.5}

    assert list(results_of(metrics, "ema_")) == [
        "ema_eval_reward",
        "ema_eval_loss",
        "ema_eval_rewards/short/mean",
    ]


def test_evaluations_of_averaged_weights():
    """A mark in the log tells which results are of averages; transformers can read the log."""
    state = TrainerState(global_step=2)
    log = state.log_history
    log.append({"loss": 4.0, "step": 1, "epoch": 0.5})
    log.append({"eval_loss": 3.0, "step": 1, "epoch": 0.5})
    log.append({"eval_loss": 2.0, "eval_runtime": 1.0, "step": 2, "epoch": 1.0})
    for metrics in ({"loss": 1.0}, {"eval_loss": 1.0}):
        mark_averages(state, metrics)
        assert not last_has_averages(log)
    mark_averages(state, {"eval_loss": 2.0, "eval_runtime": 1.0})
    log.append({"train_runtime": 1.0, "train_loss": 3.0, "step": 2, "epoch": 1.0})

    assert last_has_averages(log)
    assert not last_has_averages(log[:2])
    assert named(log) == [
        *log[:2],
        {"ema_eval_loss": 2.0, "eval_runtime": 1.0, "step": 2, "epoch": 1.0},
        log[4],
    ]
    _, lines, results = parse_log_history(log)
    assert make_markdown_table(lines).count("\n") == 4
    assert results == {"Loss": 2.0}


def test_notes_put_nothing_on_the_state():
    """A note is of one state at one step, and neither the state nor its copies have it."""
    state = TrainerState(global_step=7)
    note_averages(state, are_evaluated=True)
    note_loaded_averages(state, are_loaded=True)

    assert (prefix_of(state), ends_with_averages(state)) == ("ema_", True)
    assert vars(state) == vars(TrainerState(global_step=7))
    copied = copy.copy(state)
    assert (prefix_of(copied), ends_with_averages(copied)) == ("", False)
    state.global_step = 8
    assert prefix_of(state) == ""


def test_results_are_of_a_step_and_its_weights():
    """Results that were noted are those of the same step, the same kind and the same weights."""
    state = TrainerState(global_step=2)
    assert noted_results(state, "", "a") is None
    metrics = {"eval_loss": 1.0, "eval_runtime": 2.0}
    note_results(state, metrics, "a")

    assert noted_results(state, "", "a") == metrics
    assert noted_results(state, "ema_", "a") is None
    assert noted_results(state, "", "b") is None
    state.global_step = 3
    assert noted_results(state, "", "a") is None
