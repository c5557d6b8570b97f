"""The page says what each run was, and in which settings the runs differ."""

import json
import re

import pytest

from mfwrap.records.run_record import read_run
from mfwrap.report.about import about, duration
from support.run_folders import write_lines

FACTS = {
    "command": "python train.py --name '<b>'",
    "started": "2026-01-02T03:04:05+00:00",
    "seconds": 200.4,
    "state": "ended at step 5 of 9",
    "model": "LlamaForCausalLM",
    "parameters": {"total": 1_240_000, "trainable": 1_240_000},
    "hardware": {"name": "2 x NVIDIA H200", "device": "cuda", "ranks": 2},
    "versions": {"torch": "2.13.0"},
    "configuration": {"training": {"learning_rate": 0.1, "output_dir": "a"}, "seed": 0},
}


def run(folder, facts=None, records=None):
    """Return the record of a run with some facts."""
    write_lines(folder / "metrics.jsonl", records or [{"step": 1, "loss": 2.0}])
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return read_run(folder)


def summary(text):
    """Return the columns and the cells of the summary's first row."""
    table = re.search(r'<table id="summary".*?</table>', text, re.DOTALL)[0]
    row = re.search(r"<tbody><tr>(.*?)</tr>", table, re.DOTALL)[1]
    names, cells = re.findall(r'data-column="(.*?)"', row), re.findall(r">([^<]*)</td>", row)
    return dict(zip(names, cells, strict=True))


def test_a_run_in_one_line(tmp_path):
    """The summary has result, end, time, parameters and hardware."""
    found = summary(about([run(tmp_path / "one", FACTS)]))

    assert found["Ended"] == "ended at step 5 of 9"
    assert found["Time"] == "3 min 20 s"
    assert found["Parameters"] == "1.24 M"
    assert found["Hardware"] == "2 x NVIDIA H200"
    assert found["Last loss"] == "2"


def test_resumes(tmp_path):
    """The summary has the steps at which a run was resumed, and no column without them."""
    for resumed, shown in (([4, 8], "4, 8"), ([], None), ("x", None)):
        found = summary(about([run(tmp_path / "one", FACTS | {"resumed": resumed})]))
        assert found.get("Resumed at") == shown


def test_what_is_unknown_has_no_column(tmp_path):
    """Without ``run.json`` there are no columns of its facts, and nothing is folded."""
    text = about([run(tmp_path / "one")])

    assert list(summary(text)) == ["Run", "Steps", "Last loss", "Episodes"]
    assert "<details>" not in text


def test_rewards(tmp_path):
    """A training that generates has its reward before its loss."""
    records = [{"step": 1, "loss": 0.5, "reward": 1.0}, {"step": 2, "loss": 0.0, "reward": 3.0}]
    found = summary(about([run(tmp_path / "one", records=records)]))

    assert list(found) == ["Run", "Steps", "Last reward", "Last loss", "Episodes"]
    assert found["Last reward"] == "3"

    evaluations = [
        {"step": step, "eval_loss": -step, "eval_reward": reward}
        for step, reward in ((1, 5.0), (2, 7.0), (3, 6.0))
    ]
    found = summary(about([run(tmp_path / "two", records=records + evaluations)]))
    assert found["Best eval_reward"] == "7"
    assert not [name for name in found if name.startswith("Best e") and "reward" not in name]

    averaged = [
        {"step": step, "ema_eval_loss": -step, "ema_eval_reward": reward}
        for step, reward in ((1, 5.0), (2, 8.0), (3, 6.0))
    ]
    three = run(tmp_path / "three", records=records + evaluations + averaged)
    assert summary(about([three]))["Best eval_reward, averaged weights"] == "8"


@pytest.mark.parametrize(
    ("records", "shown"),
    [
        ([{"skipped": True}, {"skipped": False}, {"skipped": True}], "2"),
        ([{"skipped_updates": 1}, {"skipped_updates": 4}], "4"),
    ],
)
def test_skipped_updates_are_counted(tmp_path, records, shown):
    """The summary counts the steps that were skipped, or uses the count in a Trainer's log."""
    lines = [{"step": step, "loss": 1.0, **each} for step, each in enumerate(records, 1)]

    assert summary(about([run(tmp_path, records=lines)]))["Skipped updates"] == shown


def test_differences(tmp_path):
    """Only settings that differ are in the table, and not the folders of the runs."""
    configuration = {"training": {"learning_rate": 0.2, "output_dir": "b"}, "seed": 0}
    other = {**FACTS, "configuration": configuration, "versions": {"torch": "2.12.0"}}
    runs = [run(tmp_path / "a", FACTS), run(tmp_path / "b", other), run(tmp_path / "c")]
    text = about(runs).replace("<wbr>", "")
    table = re.search(r'<table id="differences".*?</table>', text, re.DOTALL)[0]

    assert re.findall(r"<tr><td class=\"name\">(.*?)</td>", table) == [
        "training.learning_rate",
        "versions.torch",
    ]
    assert re.findall(r'<td class="value" data-column="(.)">(.*?)</td>', table)[:2] == [
        ("a", "0.1"),
        ("b", "0.2"),
    ]
    assert "All recorded settings are the same" in about([runs[0], run(tmp_path / "d", FACTS)])
    assert "Differences" not in about(runs[::2])


def test_a_setting_of_the_script_differs(tmp_path):
    """The commands are compared, but for the folder of the run."""
    commands = {
        name: ["s.py", "--out", f"runs/{name}", "--temperature", value]
        for name, value in (("a", "1"), ("b", "4"), ("c", "1"))
    }
    runs = {
        name: run(tmp_path / name, {**FACTS, "command": command})
        for name, command in commands.items()
    }

    page = about([runs["a"], runs["b"]])
    assert '<td class="value" data-column="b">s.py --out --temperature 4</td>' in page
    assert "All recorded settings are the same" in about([runs["a"], runs["c"]])


def test_details_are_folded_and_no_markup(tmp_path):
    """Command and settings are folded; their text is never interpreted as HTML."""
    facts = FACTS | {"resume_command": "python train.py --resume"}
    text = about([run(tmp_path / "one", facts)]).replace("<wbr>", "")

    assert "<dt>Resumed with</dt><dd><code>python train.py --resume</code></dd>" in text
    assert "<summary>Command, settings, versions and machine</summary>" in text
    assert "python train.py --name &#x27;&lt;b&gt;&#x27;" in text
    assert "<b>" not in text
    assert ">training.learning_rate</td>" in text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.5, "0.5 s"),
        (59.94, "59.9 s"),
        (200.4, "3 min 20 s"),
        (7260, "2 h 1 min"),
        (90000, "1 day 1 h"),
        (None, "\N{EN DASH}"),
        ("x", "\N{EN DASH}"),
    ],
)
def test_durations(seconds, shown):
    """A time has two units at most."""
    assert duration(seconds) == shown


def test_what_a_resume_has_changed(tmp_path):
    """It is listed with the step, and nothing is without a list."""
    changes = [{"step": 4, "settings": ["training.lr 1.0, now <2.0", "ema not set, now 0.9"]}]
    for given, is_shown in ((changes, True), ([], False), ("x", False), ([{"step": 4}], False)):
        found = about([run(tmp_path / "one", FACTS | {"changes": given})])
        said = "<dt>Changed at step 4</dt><dd>training.lr 1.0, now &lt;2.0; ema not set, now 0.9<"
        assert (said in found) == ("Changed at" in found) == is_shown
