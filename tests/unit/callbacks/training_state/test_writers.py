"""Metrics are written to the log, curves, records and trackers, each in its own formats."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainingArguments

from mfwrap.callbacks.shared.progress import RunLength
from mfwrap.callbacks.training_state import TrainingStateSettings, writers
from mfwrap.callbacks.training_state.metrics import StateMetric
from mfwrap.callbacks.training_state.writers import MetricWriters
from mfwrap.records.json_lines import read_json_lines

LENGTH = RunLength(num_epochs=2, steps_per_epoch=3, num_steps=6)
METRICS = [
    StateMetric("everywhere", ("jsonl", "log", "tensorboard", "trackers")),
    StateMetric("logged", ("log",)),
    StateMetric("tracked", ("trackers",)),
]


def new_writers(folder, *, is_main=False, max_grad_norm=None, first_step=0, **settings):
    """Return the writers of a run in a folder."""
    arguments = TrainingArguments(output_dir="unused", max_grad_norm=max_grad_norm, report_to=[])
    return MetricWriters(
        TrainingStateSettings(**settings), arguments, folder, is_main=is_main, first_step=first_step
    )


def write(target: MetricWriters, *, step=4) -> None:
    """Write three metrics of a step."""
    target.write(LENGTH.position(step), METRICS, [1.5, 2.0, 3.0], {"loss": 0.25})


def logged(caplog) -> list[str]:
    """Return the lines of the log."""
    return [record.getMessage() for record in caplog.records]


def test_each_format_gets_its_metrics(tmp_path, caplog):
    """Log, curves, records and trackers each get exactly the metrics with their format."""
    tracked = []
    target = new_writers(
        tmp_path,
        is_main=True,
        local_loss_format="jsonl",
        tensorboard_dir=tmp_path / "curves",
        log_to=lambda values, step: tracked.append((step, values)),
    )
    write(target)
    target.close()
    events = EventAccumulator(str(tmp_path / "curves"))
    events.Reload()

    assert logged(caplog) == [
        "Epoch:[  2/  2], step:[    1/    3] everywhere: 1.5",
        "Epoch:[  2/  2], step:[    1/    3] logged: 2.0",
    ]
    assert events.Tags()["scalars"] == ["everywhere"]
    assert [(event.step, event.value) for event in events.Scalars("everywhere")] == [(4, 1.5)]
    assert read_json_lines(tmp_path / "training_state.jsonl") == [
        {"step": 4, "epoch": 2, "loss": 0.25, "everywhere": 1.5}
    ]
    assert tracked == [(4, {"loss": 0.25, "everywhere": 1.5, "tracked": 3.0})]
    assert target.tracked == {}


def test_without_targets_values_for_trackers_are_kept(caplog):
    """Without log, folders and `log_to`, only the newest values for trackers are kept."""
    target = new_writers(None)
    write(target)
    target.close()

    assert target.tracked == {"everywhere": 1.5, "tracked": 3.0}
    assert logged(caplog) == []


def test_the_limit_of_the_norm_is_in_the_first_record_only(tmp_path):
    """Only a file's first record has `max_grad_norm`, also if a resumed training continues it."""
    for step in (1, 2):
        settings = {"local_loss_format": "jsonl", "max_grad_norm": 0.5}
        write(new_writers(tmp_path, first_step=step - 1, **settings), step=step)

    records = read_json_lines(tmp_path / "training_state.jsonl")
    assert [record.get("max_grad_norm") for record in records] == [0.5, None]


def test_evaluations_have_records_of_their_own(tmp_path):
    """The results of an evaluation are one record; without results nothing is written."""
    target = new_writers(tmp_path, local_loss_format="jsonl")
    target.write_evaluation(3, {"eval_loss": 2.0})
    target.write_evaluation(4, {})
    new_writers(None).write_evaluation(5, {"eval_loss": 2.0})

    assert read_json_lines(tmp_path / "training_state.jsonl") == [{"step": 3, "eval_loss": 2.0}]


@pytest.mark.parametrize(
    ("rank", "lines", "curves"),
    [
        (0, "training_state.jsonl", "curves"),
        (2, "training_state_rank2.jsonl", "curves/rank_2"),
    ],
)
def test_files_of_each_rank(rank, lines, curves, tmp_path, monkeypatch, caplog):
    """Every rank has its own files; only the main process logs and calls `log_to`."""
    monkeypatch.setattr(writers, "this_rank", lambda: rank)
    tracked = []
    target = new_writers(
        tmp_path,
        is_main=rank == 0,
        max_grad_norm=0.25,
        local_loss_format=["jsonl", "tensorboard"],
        tensorboard_dir=tmp_path / "curves",
        log_to=lambda values, _: tracked.append(values),
    )
    write(target)
    target.close()
    (record,) = read_json_lines(tmp_path / lines)

    assert record["max_grad_norm"] == 0.25
    assert [path.name[:6] for path in Path(tmp_path, curves).glob("events*")] == ["events"]
    assert (len(tracked), len(logged(caplog))) == ((1, 2) if rank == 0 else (0, 0))


def test_no_records_without_their_format(tmp_path):
    """Without the format 'jsonl', a known folder gets no file."""
    write(new_writers(tmp_path, is_main=True))

    assert list(tmp_path.iterdir()) == []
