"""`TrainingStateRun` writes and judges the values of a step one step later."""

import json
import math

import pytest
import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from mfwrap.callbacks.training_state import TrainingStateSettings
from mfwrap.callbacks.training_state.run import TrainingStateRun
from mfwrap.records.json_lines import read_json_lines
from support.deferral import late_results
from support.monitored_loop import Clock, output


def new_run(*, global_step=0, model=None, args=None, is_main=True, **settings) -> TrainingStateRun:
    """Return a run of ten steps in a hand-written loop."""
    state = TrainerState(max_steps=10, train_batch_size=4)
    state.is_world_process_zero = is_main
    return TrainingStateRun(
        TrainingStateSettings(**settings),
        args=args,
        state=state,
        global_step=global_step,
        model=model,
    )


def end_step(run, step, values, *, scale=1.0) -> None:
    """Do a step with these values."""
    run.begin_step(step)
    run.end_step(step, values, None, scale_before=torch.tensor(scale), model=None, optimizer=None)


def steps_of(path) -> list[int]:
    """Return the steps of the records in a file."""
    return [record["step"] for record in read_json_lines(path)] if path.exists() else []


def test_values_are_written_a_step_later(tmp_path):
    """A step is written once: at the end of the next step or at a flush."""
    run = new_run(local_loss_format="jsonl", folder=tmp_path)
    written = []
    for step in (1, 2):
        end_step(run, step, output(float(step)))
        written.append(steps_of(tmp_path / "training_state.jsonl"))
    run.flush()
    run.flush()
    run.close()
    records = read_json_lines(tmp_path / "training_state.jsonl")

    assert written == [[], [1]]
    assert [(record["step"], record["local_loss"]) for record in records] == [(1, 1.0), (2, 2.0)]


def test_a_step_is_written_before_it_is_judged(tmp_path):
    """An early write has the numbers; the error and the anomaly of the step come with the flush."""
    run = new_run(local_loss_format="jsonl", folder=tmp_path, check_for_nan_in_loss_and_grad=True)
    end_step(run, 1, output(math.nan))
    with late_results():
        run.write(waits=False)
        assert steps_of(tmp_path / "training_state.jsonl") == []
    for _ in range(2):
        run.write(waits=True)
        assert steps_of(tmp_path / "training_state.jsonl") == [1]
    assert steps_of(tmp_path / "anomalies.jsonl") == []
    with pytest.raises(ValueError, match="loss of step 1 is nan"):
        run.flush()
    assert steps_of(tmp_path / "anomalies.jsonl") == [1]


def test_throughput_is_relative_to_the_baseline(tmp_path):
    """At 2 samples per second and a baseline of 8, the throughput linearity is 0.25."""
    clock = Clock()
    run = new_run(local_loss_format="jsonl", folder=tmp_path, throughput_baseline=8.0, clock=clock)
    run.clock.restart()
    clock.now += 2.0
    end_step(run, 1, output())
    run.flush()
    (record,) = read_json_lines(tmp_path / "training_state.jsonl")

    assert record["throughput_linearity"] == 4 / 2.0 / 8.0


@pytest.mark.parametrize("is_main", [True, False])
def test_an_overflow_is_recorded_once_a_bad_loss_by_its_rank(is_main, tmp_path):
    """Only the main process records an overflow; each rank records its own non-finite loss."""
    run = new_run(folder=tmp_path, is_main=is_main)
    end_step(run, 1, output(overflow=True, norm=math.inf))
    end_step(run, 2, output(math.nan))
    run.flush()

    assert steps_of(tmp_path / "anomalies.jsonl") == ([1, 2] if is_main else [2])


def test_a_replay_for_a_logged_step_is_not_exact(tmp_path):
    """A loop that passes no outputs logs after the update, so a replay has later weights."""
    network = nn.Linear(1, 1)
    run = new_run(model=network, folder=tmp_path, replay=True)
    network(torch.full((1, 1), math.nan))
    run.end_step(1, None, None, scale_before=None, model=network, optimizer=None)

    run.log(1, {"loss": math.nan, "grad_norm": math.nan})
    (record,) = read_json_lines(tmp_path / "anomalies.jsonl")

    assert (record["where"], record["is_replay_exact"]) == ("input", False)


@pytest.mark.parametrize(
    ("settings", "logs", "error"),
    [
        ({"check_for_nan_in_loss_and_grad": True}, {"loss": math.nan}, "loss of step 3 is nan"),
        ({"check_for_nan_in_loss_and_grad": True}, {"loss": 1.0}, None),
        (
            {"check_for_global_norm": True},
            {"loss": 1.0, "grad_norm": 3.0},
            "`global_norm` of step 3 must be < 3.0, got 3.0",
        ),
        ({"check_for_global_norm": True}, {"eval_loss": 1.0, "grad_norm": 3.0}, None),
    ],
)
def test_logged_values_are_judged(settings, logs, error, tmp_path):
    """In a loop without outputs, the loss and the norm in the log are judged."""
    run = new_run(folder=tmp_path, **settings)
    if error is None:
        run.log(3, logs)
        return
    with pytest.raises((ValueError, RuntimeError), match=error):
        run.log(3, logs)


def test_state_of_a_resumed_run(tmp_path):
    """Saved counts continue only in a run that starts at the step of the save."""
    settings = {
        "folder": tmp_path,
        "use_skip_data_by_global_norm": True,
        "global_norm_spike_count_threshold": 2,
    }
    first = new_run(**settings)
    end_step(first, 1, output(norm=5.0))
    first.flush()
    state = json.loads(json.dumps(first.state_dict()))
    resumed, elsewhere = new_run(global_step=1, **settings), new_run(**settings)
    for run in (resumed, elsewhere):
        run.load_state_dict(state)
        end_step(run, 2, output(norm=5.0))

    elsewhere.flush()
    with pytest.raises(ValueError, match="in 2 consecutive steps"):
        resumed.flush()


def test_jsonl_needs_a_folder():
    """The format 'jsonl' without a Trainer and without `folder` raises an error."""
    with pytest.raises(ValueError, match="`folder` must be given for the format 'jsonl'"):
        new_run(local_loss_format="jsonl")


def test_the_folder_of_the_trainer(tmp_path):
    """With a Trainer, records are written to its output folder."""
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    run = new_run(local_loss_format="jsonl", args=args)
    end_step(run, 1, output())
    run.flush()

    assert steps_of(tmp_path / "training_state.jsonl") == [1]


def test_a_network_that_cannot_be_replayed(caplog):
    """A compiled network is not replayed; a warning says so."""
    run = new_run(model=torch.compile(nn.Linear(2, 2), backend="eager"), replay=True)

    assert run.finder.recorder is None
    assert [record.getMessage() for record in caplog.records] == [
        (
            "TrainingStateMonitor cannot replay steps of a network that is compiled or sharded, or "
            "that holds a SyncBatchNorm"
        )
    ]
