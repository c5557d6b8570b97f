"""Settings have dotted names, and those that differ between two starts of a run are named."""

import json

from mfwrap.records.settings import changed_settings, changed_since, flattened


def test_nested_settings_have_dotted_names():
    """Nested settings are flat; a long one is cut."""
    settings = {"a": {"b": {"c": 1}, "d": {}}, "e": [1, {"f": 2}], "g": 400 * "x", "h": [1, 2]}

    assert flattened(settings) == {
        "a.b.c": "1",
        "a.d": "{}",
        "e.0": "1",
        "e.1.f": "2",
        "g": 300 * "x" + "...",
        "h": "[1, 2]",
    }


def test_settings_that_differ():
    """Both values are said; where a run writes is no setting of its training."""
    before = {"reward": [{"type": "a"}, {"type": "b"}], "training": {"output_dir": "x", "seed": 1}}
    now = {"reward": [{"type": "a"}, {"type": "c"}], "training": {"output_dir": "y", "steps": 2}}

    assert changed_settings(before, now) == [
        "reward.1.type b, now c",
        "training.seed 1, now not set",
        "training.steps not set, now 2",
    ]
    assert changed_settings(now, now) == []
    assert changed_settings({"a": 90 * "x"}, {"a": 1}) == [f"a {60 * 'x'}..., now 1"]


def test_the_last_start_of_a_run(tmp_path):
    """Secrets are neither compared nor said; a run without facts, or damaged ones, has no start."""
    settings = {"lr": 2.0, "hub_token": "mine"}
    assert changed_since(tmp_path, settings) == []
    facts = {"configuration": {"lr": 1.0, "hub_token": "***"}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert changed_since(tmp_path, settings) == ["lr 1.0, now 2.0"]
    (tmp_path / "run.json").write_text("{")
    assert changed_since(tmp_path, settings) == []
