"""In addition to its steps, a run records throughput, `max_grad_norm` and evaluations."""

import itertools
import math

import pytest
import torch
from transformers import TrainerState, TrainingArguments

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks.metrics_recorder import MetricsRecorder, ThroughputRecorder
from mfwrap.records.evaluations import note_averages
from mfwrap.records.json_lines import read_json_lines
from mfwrap.records.run_record import read_run
from support.small_networks import LinearProbe


def arguments_of(folder, **settings):
    """Return arguments of a training on one process."""
    return TrainingArguments(str(folder), use_cpu=True, report_to="none", **settings)


def test_throughput_is_that_of_training(tmp_path):
    """Throughput counts from the last log, evaluation or checkpoint, whichever came last."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    arguments, state = arguments_of(tmp_path, **settings), TrainerState(train_batch_size=4)
    seconds = itertools.count(0, 2)
    recorder = ThroughputRecorder(tmp_path, clock=lambda: float(next(seconds)))
    recorder.on_train_begin(arguments, state, None)
    for step in (5, 10):
        state.global_step = step
        recorder.on_log(arguments, state, None, logs={"loss": 1.0})
    state.global_step = 12
    recorder.on_log(arguments, state, None, logs={"eval_loss": 1.0})
    recorder.on_evaluate(arguments, state, None)
    state.global_step = 15
    recorder.on_log(arguments, state, None, logs={"loss": 1.0})
    recorder.on_log(arguments, state, None, logs={"train_runtime": 1.0})

    assert read_json_lines(tmp_path / "throughput.jsonl") == [
        {"step": 5, "throughput": 20.0},
        {"step": 10, "throughput": 20.0},
        {"step": 15, "throughput": 12.0},
    ]


def test_throughput_of_a_batch_that_grows(tmp_path):
    """The samples are those of the steps since the last log."""
    arguments, state = arguments_of(tmp_path), TrainerState(train_batch_size=4)
    seconds = itertools.count(0, 2)
    recorder = ThroughputRecorder(tmp_path, clock=lambda: float(next(seconds)))
    recorder.take_samples(lambda step: step * step)
    recorder.on_train_begin(arguments, state, None)
    for step in (3, 5):
        state.global_step = step
        recorder.on_log(arguments, state, None, logs={"loss": 1.0})

    assert read_json_lines(tmp_path / "throughput.jsonl") == [
        {"step": 3, "throughput": 9 / 2},
        {"step": 5, "throughput": (25 - 9) / 2},
    ]


def test_numbers_of_others_are_recorded(tmp_path):
    """The log's numbers are recorded that the steps lack; evaluations are not recorded twice."""
    arguments, state = arguments_of(tmp_path), TrainerState(global_step=5)
    recorder = MetricsRecorder(tmp_path)
    recorder.on_train_begin(arguments, state, None)
    own = {"distillation": 0.5, "entropy": 2.0, "broken": math.nan}
    rewards = {"reward": 0.5, "rewards/short/mean": 0.5, "completions/mean_length": 7.0}
    training = {"loss": 1.0, "learning_rate": 0.1, "loss_scale": 1.0, "entropy": 2.0}
    recorder.on_log(arguments, state, None, logs=training | rewards)
    recorder.on_log(arguments, state, None, logs={"epoch": 0.5, **own})
    recorder.on_log(arguments, state, None, logs={"eval_loss": 1.0, "eval_reward": 0.25})
    recorder.on_log(arguments, state, None, logs={"own_loss": 1.0, "own_runtime": 0.25})
    recorder.on_log(arguments, state, None, logs={"best": "model"})

    records = read_json_lines(tmp_path / "metrics.jsonl")
    assert [one for one in records if "step" in one] == [
        {"step": 5, **rewards},
        {"step": 5, **own, "broken": "nan"},
    ]


def test_a_log_of_each_micro_batch(tmp_path):
    """The last record of a step has the mean of its logs, so a NaN in one of them stays."""
    arguments, state = arguments_of(tmp_path), TrainerState(global_step=5)
    recorder = MetricsRecorder(tmp_path)
    recorder.on_train_begin(arguments, state, None)
    for step, first, second in ((5, 1.0, 2.0), (6, math.nan, 4.0), (7, 3.0, 5.0)):
        state.global_step = step
        for number in (first, second):
            recorder.on_log(arguments, state, None, logs={"distillation": number})

    curve = read_run(tmp_path).curves["distillation"]
    assert curve.steps == [5, 6, 7]
    assert [curve.values[0], curve.values[2]] == [1.5, 4.0]
    assert math.isnan(curve.values[1])


@pytest.mark.parametrize(
    ("logs", "before", "at"),
    [
        ([(1.0, 0.5)] * 8, 0, 5),
        ([(1.0, 0.5)] * 8, 3, 5),
        ([(1.0, 0.5)] * 2, 0, 2),
        ([(0.0, None)] * 2, 0, 2),
        ([(1.0, 0.5)] * 4 + [(0.5, 0.5)] + [(1.0, 0.5)] * 3, 0, None),
        ([(0.5, 0.5)] + [(1.0, 1.0)] * 8, 0, None),
        ([], 0, None),
    ],
)
def test_rewards_that_teach_nothing_are_told_once(tmp_path, caplog, logs, before, at):
    """The first five logs count, also those before a resume; or all of a shorter training."""
    state, recorder = TrainerState(), MetricsRecorder(tmp_path)
    entries = [{"reward": one, "frac_reward_zero_std": alike} for alike, one in logs]
    for state.global_step, entry in enumerate(entries, start=1):
        if state.global_step == before + 1:
            recorder.on_train_begin(arguments_of(tmp_path), state, None)
        state.log_history.append(entry | {"step": state.global_step})
        if state.global_step > before:
            recorder.on_log(arguments_of(tmp_path), state, None, logs=entry)
        state.log_history.append({"eval_frac_reward_zero_std": 1.0, "eval_reward": 0.5})
    recorder.on_train_end(arguments_of(tmp_path), state, None)

    found = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text.partition(": the rewards have taught nothing")[0] for text in found] == [
        f"step {at}" for _ in [at] if at is not None
    ]


def test_rewards_that_have_fallen_and_teach_nothing_any_more(tmp_path, caplog):
    """It is told once, in the third such log."""
    state, recorder = TrainerState(), MetricsRecorder(tmp_path)
    recorder.on_train_begin(arguments_of(tmp_path), state, None)
    for state.global_step, (alike, one) in enumerate([(0.5, 0.4), *[(1.0, 0.1)] * 5], start=1):
        entry = {"reward": one, "frac_reward_zero_std": alike}
        state.log_history.append(entry | {"step": state.global_step})
        recorder.on_log(arguments_of(tmp_path), state, None, logs=entry)

    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert said.startswith("step 4: the rewards teach nothing any more: since step 2, all answers")


def test_an_evaluation_is_recorded_once(tmp_path):
    """Of an evaluation that is repeated after the last step, only other results are written."""
    recorder = MetricsRecorder(tmp_path)
    recorder.on_train_begin(arguments_of(tmp_path), TrainerState(), None)
    raw, averaged = {"eval_loss": 1.0}, {"ema_eval_loss": 2.0}
    for step in (1, 2):
        recorder.write_evaluation(step, raw)
        recorder.write_evaluation(step, averaged)
    recorder.write_evaluation(2, raw | averaged)
    recorder.write_evaluation(2, raw | {"ema_eval_loss": 3.0})
    recorder.write_evaluation(3, raw)
    recorder.write_evaluation(3, raw | averaged)

    found = read_json_lines(tmp_path / "metrics.jsonl")
    assert [one for one in found if "step" in one] == [
        *({"step": step, **one} for step in (1, 2) for one in (raw, averaged)),
        {"step": 2, "ema_eval_loss": 3.0},
        {"step": 3, **raw},
        {"step": 3, **averaged},
    ]


@pytest.mark.parametrize(("limit", "found"), [(0.5, 0.5), (0.0, None)])
def test_the_limit_of_the_norm_is_recorded(tmp_path, limit, found):
    """The record of a run has `max_grad_norm` if gradients are clipped."""
    recorder = MetricsRecorder(str(tmp_path))
    recorder.on_train_begin(arguments_of(tmp_path, max_grad_norm=limit), TrainerState(), None)
    recorder.write({"step": 1, "loss": 1.0})

    assert read_run(tmp_path).max_grad_norm == found


def test_scores_of_spikes_are_recorded_with_a_policy_for_them(tmp_path):
    """The record of a skipped update shows by how much its norm was too high."""
    for policy in ("record", "skip"):
        network = LinearProbe()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=True)
        cell = MFTrainOneStepCell(network, optimizer, spike_policy=policy)
        folder, state = tmp_path / policy, TrainerState()
        folder.mkdir()
        recorder = MetricsRecorder(folder)
        recorder.on_train_begin(None, state, None)
        for state.global_step, norm in enumerate((1.0, 1.0, 1e3), start=1):
            cell(torch.tensor([[norm, 0.0]]))
            recorder.on_step_end(None, state, None, step_report=cell.last_report)
        recorder.write_steps()

    plain, scored = (
        read_json_lines(tmp_path / each / "metrics.jsonl") for each in ("record", "skip")
    )
    assert [record["skipped"] for record in scored] == [False, False, True]
    assert scored[2]["spike_score"] > 6
    assert read_run(tmp_path / "skip").curves["spike_score"].steps == [1, 2, 3]
    assert not any("spike_score" in record for record in plain)


def test_a_resumed_run_keeps_what_it_goes_on_from(tmp_path):
    """A resumed run drops the records after its checkpoint, and has `max_grad_norm` once."""
    arguments, state = arguments_of(tmp_path), TrainerState()
    recorder = MetricsRecorder(tmp_path)
    recorder.on_train_begin(arguments, state, None)
    for step in range(1, 6):
        recorder.write({"step": step, "loss": 1.0})
    state.global_step = 3
    MetricsRecorder(tmp_path).on_train_begin(arguments, state, None)
    records = read_json_lines(tmp_path / "metrics.jsonl")

    assert [record.get("step") for record in records] == [None, 1, 2, 3]


@pytest.mark.parametrize("says", [False, True])
def test_evaluations_are_recorded_and_said(tmp_path, caplog, says):
    """Metrics of averaged weights are recorded with a prefix and without timings."""
    state = TrainerState(global_step=7)
    note_averages(state, are_evaluated=True)
    recorder = MetricsRecorder(tmp_path, says_evaluations=says)
    recorder.on_train_begin(None, TrainerState(), None)
    with caplog.at_level("INFO", logger="mfwrap"):
        recorder.on_evaluate(None, state, None, metrics={"eval_loss": 0.5, "eval_runtime": 3.0})
        recorder.on_train_end()
        recorder.on_evaluate(None, state, None, metrics={"eval_loss": 0.4})

    assert read_json_lines(tmp_path / "metrics.jsonl") == [{"step": 7, "ema_eval_loss": 0.5}]
    said = [record.message for record in caplog.records]
    assert said == ["Eval result: step 7, ema_eval_loss: 0.5"] * says


@pytest.mark.parametrize("says", [False, True])
def test_rewards_are_said(tmp_path, caplog, says):
    """The loss of a training by rewards says little, so the log has the reward, too."""
    recorder = MetricsRecorder(tmp_path, says_evaluations=says)
    recorder.on_train_begin(None, TrainerState(), None)
    with caplog.at_level("INFO", logger="mfwrap"):
        for logs in ({"loss": 1.0}, {"loss": 0.0, "reward": 0.25, "reward_std": 0.5}):
            recorder.on_log(None, TrainerState(global_step=7), None, logs=logs)

    assert [record.message for record in caplog.records] == ["step 7, reward: 0.25"] * says


def test_only_the_main_process_writes(tmp_path):
    """Only the main process writes files."""
    recorder = MetricsRecorder(tmp_path)
    state = TrainerState(is_world_process_zero=False)
    recorder.on_train_begin(arguments_of(tmp_path), state, None)
    recorder.write({"step": 1, "loss": 1.0})
    recorder.on_evaluate(None, state, None, metrics={"eval_loss": 0.5})
    recorder.on_train_end()

    assert list(tmp_path.iterdir()) == []
