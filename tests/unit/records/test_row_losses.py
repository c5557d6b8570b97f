"""The files of rows are whole, and a resumed training removes those of later steps."""

import numpy as np
import pytest

from mfwrap.records import row_losses
from mfwrap.records.row_losses import RowLossFiles, check_pyarrow, read_row_losses


def columns(steps, source=None):
    """Return two rows for each step, of which the second has no target."""
    number = 2 * len(steps)
    found = {
        "step": np.repeat(steps, 2),
        "epoch": np.zeros(number),
        "position": np.arange(number),
        "index": np.arange(number)[::-1],
        "loss": np.linspace(0, 1, number),
        "targets": np.tile([3.0, 0.0], len(steps)),
    }
    return found if source is None else found | {"source": [source] * number}


def files_in(folder):
    """Return the names of the files."""
    return sorted(path.name for path in (folder / "row_losses").glob("*"))


def test_rows_are_read_as_they_were_written(tmp_path):
    """All files make one table; a row without a target has no loss."""
    files = RowLossFiles(tmp_path)
    files.begin(0, sets_aside=True)
    files.write(columns([1, 2], "web"))
    files.write(columns([3], "code"))
    table = read_row_losses(tmp_path)

    assert table["step"].to_pylist() == [1, 1, 2, 2, 3, 3]
    assert table["loss"].to_pylist() == pytest.approx([0, None, 2 / 3, None, 0, None])
    assert table["source"].to_pylist() == ["web"] * 4 + ["code"] * 2
    assert files_in(tmp_path) == [
        "steps_00000001_00000002_rank_0.parquet",
        "steps_00000003_00000003_rank_0.parquet",
    ]


@pytest.mark.parametrize(
    ("step", "kept"),
    [(2, [1, 1, 2, 2]), (1, [1, 1]), (3, [1, 1, 2, 2, 3, 3]), (9, [1, 1, 2, 2, 3, 3])],
)
def test_a_resume_removes_the_rows_of_later_steps(tmp_path, step, kept):
    """So it does if a file has steps before and after the checkpoint."""
    files = RowLossFiles(tmp_path)
    files.begin(0, sets_aside=True)
    files.write(columns([1, 2]))
    files.write(columns([3]))
    (tmp_path / "row_losses" / "notes.parquet").write_text("not ours")
    RowLossFiles(tmp_path).begin(step, sets_aside=True)

    assert read_row_losses(tmp_path)["step"].to_pylist() == kept
    assert "notes.parquet" in files_in(tmp_path)


def test_a_folder_of_others_is_kept(tmp_path):
    """A folder that mfwrap has not written is refused; that of an earlier run is renamed."""
    own, other = tmp_path / "own", tmp_path / "other"
    (other / "row_losses").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="row_losses, which mfwrap has not written"):
        RowLossFiles(other).begin(0, sets_aside=True)
    RowLossFiles(own).begin(0, sets_aside=True)
    RowLossFiles(own).write(columns([1]))
    RowLossFiles(own).begin(0, sets_aside=False)
    assert files_in(own)
    with pytest.warns(UserWarning, match=r"names of its files now end in \.1$"):
        RowLossFiles(own).begin(0, sets_aside=True)

    assert not files_in(own)
    assert len(list((own / "row_losses.1").glob("*.parquet"))) == 1


def test_what_cannot_be_read(tmp_path):
    """A folder without rows, and a damaged file, are named."""
    pytest.importorskip("pyarrow")
    with pytest.raises(FileNotFoundError, match="has no losses of rows: there is no Parquet file"):
        read_row_losses(tmp_path)
    folder = tmp_path / "row_losses"
    folder.mkdir()
    (folder / "steps_1_2_rank_0.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"steps_1_2_rank_0\.parquet is damaged: "):
        read_row_losses(tmp_path)


def test_without_pyarrow(monkeypatch):
    """One sentence says what is missing."""
    pytest.importorskip("pyarrow")
    check_pyarrow("`row_losses`")
    monkeypatch.setattr(row_losses, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="`row_losses` needs pyarrow, which is not installed"):
        check_pyarrow("`row_losses`")
