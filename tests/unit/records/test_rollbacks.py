"""The rollbacks of a run are written and read."""

import pytest

from mfwrap.records.rollbacks import ROLLBACKS_FILE, RollbackRecord, read_rollbacks, rollbacks_text
from mfwrap.records.skipped_rows import SkippedRow


def test_rollbacks(tmp_path):
    """What was written is read; a run without the file has no rollbacks."""
    assert read_rollbacks(tmp_path) == ([], None)

    done = RollbackRecord(
        kind="spike",
        first_step=5,
        last_step=6,
        checkpoint="checkpoint-4",
        rows=(SkippedRow(0, 16), SkippedRow(0, 17)),
        description="step 5: gradient norm spike",
        rate_factor=0.5,
        slow_updates=3,
    )
    for pending in (None, "checkpoint-4"):
        (tmp_path / ROLLBACKS_FILE).write_text(rollbacks_text([done], pending))
        assert read_rollbacks(tmp_path) == ([done], pending)
    assert [done.slows(step) for step in (4, 5, 7, 8)] == [False, True, True, False]


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"rollbacks": [{}]}', '{"rollbacks": 1}', "[" * 100_000),
        '{"format_version": 1, "pending": "../a", "rollbacks": []}',
    ],
)
def test_a_damaged_file(tmp_path, text):
    """The error names the file and says what to do."""
    (tmp_path / ROLLBACKS_FILE).write_text(text)

    with pytest.raises(ValueError, match=r"rollbacks\.json is damaged .* give the rows"):
        read_rollbacks(tmp_path)


def test_another_format(tmp_path):
    """A file of a later release is refused."""
    text = '{"format_version": 2, "pending": null, "rollbacks": []}'
    (tmp_path / ROLLBACKS_FILE).write_text(text)

    with pytest.raises(ValueError, match="expected format_version 1, got 2"):
        read_rollbacks(tmp_path)
