"""A run folder is read back as it was written."""

import json
import math
import shutil

import pytest

from mfwrap.records import run_record
from mfwrap.records.run_record import Curve, read_facts, read_run, trainer_log
from support.run_folders import GROUPS, write_lines, write_run, write_trainer_run


def test_a_run_of_the_cell(tmp_path):
    """The record of a run has curves, each rank's local norms, and anomalies ordered by step."""
    run = read_run(write_run(tmp_path / "first", num_ranks=3))

    assert run.name == "first"
    assert run.curves["learning_rate"] == Curve(
        list(range(1, 41)), [step / 1000 for step in range(1, 41)]
    )
    assert run.curves["eval_loss"] == Curve([0, 40], [5.0, 1.25])
    assert run.curves["ema_eval_loss"] == Curve([40], [1.125])
    assert math.isnan(run.curves["loss"].values[19])
    assert run.curves["global_norm"].values[19] == math.inf
    assert run.curves["overflow"].values[18:21] == [0.0, 1.0, 0.0]
    assert [list(groups) for groups in run.local_norms.values()] == [list(GROUPS)] * 3
    assert run.local_norms[2]["layers.1"].values[9] == pytest.approx(0.9)
    assert [episode.step for episode in run.episodes] == [12, 30]
    assert run.max_grad_norm == 1.5
    assert run.last_step() == 40
    assert not {"step", "epoch", "local_norm"} & run.curves.keys()


def test_a_run_of_the_trainer(tmp_path):
    """The newest checkpoint's log is read; its values get the names of a step's output."""
    run = read_run(write_trainer_run(tmp_path))

    assert run.curves["loss"] == Curve([2, 4, 6, 8, 10], [3.0 / s for s in (2, 4, 6, 8, 10)])
    assert run.curves["global_norm"].values == [2.0] * 5
    assert run.curves["eval_loss"] == Curve([10], [0.1])
    assert run.local_norms == {0: {"embed": Curve([2, 4, 6, 8, 10], [1.0, 2.0, 3.0, 4.0, 5.0])}}
    # The last entry of the log is a summary of the training, not a step.
    assert "train_loss" not in run.curves


def test_the_state_of_the_folder_itself_comes_first(tmp_path):
    """The state that ``trainer.save_state()`` writes takes precedence over checkpoints."""
    write_trainer_run(tmp_path)
    log = [{"step": 12, "loss": 0.25}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))

    assert read_run(tmp_path).curves == {"loss": Curve([12], [0.25])}


def test_what_was_recorded_last_counts(tmp_path):
    """If a resumed run has recorded a step again, the last complete record of the step is read."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, "loss": s} for s in (1, 2, 3, 2, 3)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 9.0}\n{"step": 4, "lo')

    assert read_run(tmp_path).curves == {"loss": Curve([1, 2, 3], [1.0, 2.0, 9.0])}


def test_the_trainers_log_fills_gaps(tmp_path):
    """The Trainer's log adds only steps, curves and groups that metrics.jsonl does not have."""
    records = [{"step": s, "loss": s, "local_norm": {"z": 1.0, "a": 2.0}} for s in (1, 2)]
    # The Trainer gives results of averaged weights the name of the raw weights.
    records.append({"step": 6, "ema_eval_loss": 1.25, "ema_eval_num_tokens": 7.0})
    write_lines(tmp_path / "metrics.jsonl", records)
    log = [
        # TRL's number of tokens is a count of the training, and no result.
        {"step": 2, "loss": 9.0, "local_norm/a": 9.0, "eval_loss": 1.5, "eval_num_tokens": 7.0},
        # A Trainer that counts tokens logs the time with each step.
        {"step": 4, "loss": 4.0, "local_norm/a": 4.0, "local_norm/b": 5.0, "train_runtime": 1.0},
        {"step": 6, "eval_loss": 1.25},
        {"step": 6, "train_loss": 8.0, "train_runtime": 2.0},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    run = read_run(tmp_path)

    assert run.curves == {
        "loss": Curve([1, 2, 4], [1.0, 2.0, 4.0]),
        "eval_loss": Curve([2], [1.5]),
        "ema_eval_loss": Curve([6], [1.25]),
        "train_runtime": Curve([4], [1.0]),
    }
    assert list(run.local_norms[0]) == ["z", "a", "b"]
    assert run.local_norms[0]["a"] == Curve([1, 2, 4], [2.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, FileNotFoundError, "is not a run folder: neither"),
        ({"run.json": "{}"}, FileNotFoundError, "the run has recorded no step$"),
        (
            {"run.json": "{}", "error_rank_0.txt": ""},
            FileNotFoundError,
            r"recorded no step; it failed: see .*error_rank_0\.txt$",
        ),
        ({"anomalies.jsonl": '{"step": 1}\n'}, FileNotFoundError, "is not a run folder: neither"),
        (
            {"metrics.jsonl": "[1]\n{}\n"},
            ValueError,
            r"metrics\.jsonl:1: expected a JSON object in UTF-8, got b'\[1\]'",
        ),
        ({"trainer_state.json": "{"}, ValueError, r"trainer_state\.json: invalid JSON: "),
        ({"trainer_state.json": "[" * 100_000}, ValueError, r"trainer_state\.json: invalid JSON: "),
        ({"trainer_state.json": "{}"}, ValueError, "whose `log_history` is a list of objects"),
        (
            {"trainer_state.json": '{"log_history": [1]}'},
            ValueError,
            "whose `log_history` is a list of objects",
        ),
    ],
)
def test_a_folder_that_is_no_run(tmp_path, files, error, message):
    """The error names the file and says what was expected."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(error, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize("content", [b"[1]\n[2]\n", b'{\n  "a": 1\n}\n', b"\x00\xff\n\n"])
def test_a_foreign_file(tmp_path, content):
    """A file of another program, whose lines are not records, is left out with one warning."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.warns(UserWarning, match=r"data\.jsonl is left out: its lines are not") as caught:
        run = read_run(tmp_path)

    assert run.curves == {"loss": Curve([1], [2.0])}
    assert len(caught) == 1


def test_no_folder(tmp_path):
    """A folder that does not exist is refused."""
    with pytest.raises(
        FileNotFoundError, match="nothing is not a run folder: there is no such folder"
    ):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "invalid JSON"), ("[1]", "expected an object, got list"), (5000 * "[", "invalid JSON")],
)
def test_damaged_facts(tmp_path, text, says):
    """A damaged file is named in the error; no file means no facts."""
    assert read_facts(tmp_path) == {}
    (tmp_path / "run.json").write_text(text)

    with pytest.raises(ValueError, match=says) as error:
        read_facts(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "run.json"))
    assert str(error.value).endswith("; move the file away to go on without it")


def test_a_checkpoint_that_is_deleted_meanwhile(tmp_path, monkeypatch):
    """The log is read from the checkpoint that the run has kept."""
    run = write_trainer_run(tmp_path / "run")
    expected = trainer_log(run)
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-12")
    find = run_record._trainer_state

    def found_and_deleted(folder):
        monkeypatch.undo()
        found = find(folder)
        shutil.rmtree(found.parent)
        return found

    monkeypatch.setattr(run_record, "_trainer_state", found_and_deleted)
    assert trainer_log(run) == expected
