"""The rollbacks of a run are read."""

import json

import pytest

from mfwrap.records.rollbacks import ROLLBACKS_FILE, RollbackRecord, read_rollbacks


def test_rollbacks(tmp_path):
    """The file that a trainer writes is read; a run without the file has no rollbacks."""
    assert read_rollbacks(tmp_path) == []

    done = {
        "kind": "spike",
        "first_step": 5,
        "last_step": 6,
        "checkpoint": "checkpoint-4",
        "rows": [[0, 16], [0, 17]],
        "description": "step 5: gradient norm spike",
    }
    content = {"format_version": 1, "pending": None, "rollbacks": [done]}
    (tmp_path / ROLLBACKS_FILE).write_text(json.dumps(content))
    assert read_rollbacks(tmp_path) == [
        RollbackRecord("spike", 5, 6, "checkpoint-4", 2, "step 5: gradient norm spike")
    ]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rollbacks": [{}]}', '{"rollbacks": 1}'])
def test_a_damaged_file(tmp_path, text):
    """The error names the file."""
    (tmp_path / ROLLBACKS_FILE).write_text(text)

    with pytest.raises(ValueError, match=r"rollbacks\.json is damaged .* expected a list"):
        read_rollbacks(tmp_path)
