"""Fixtures for the tests of tasks, models and data."""

import json

import pytest


@pytest.fixture
def json_lines(tmp_path, monkeypatch):
    """Return a function that writes rows to a file and returns the section ``data`` for it."""
    monkeypatch.chdir(tmp_path)

    def write(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
        return {"type": "json_lines", "path": name, "eval_fraction": 0.5}

    return write
