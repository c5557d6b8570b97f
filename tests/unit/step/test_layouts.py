"""Each layout of ranks agrees with one process, as the table in docs/ranks.md says."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.layouts.layouts import LAYOUTS
from support.layouts.page import PAGE, Pools, cells_of, read_cells, with_table
from support.paths import ROOT


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Share the ranks among all layouts."""
    with Pools() as opened:
        yield opened


def _rows() -> list[tuple[str, ...]]:
    return read_cells(PAGE.read_text(encoding="utf-8"))


def test_the_table_has_a_row_for_each_layout_and_no_empty_cell():
    """Rows are in the order of `LAYOUTS`, and no cell is empty or reports a difference."""
    rows = _rows()

    assert [row[0] for row in rows] == [layout.name for layout in LAYOUTS]
    assert all(cell and not cell.startswith("differs") for row in rows for cell in row)


def test_writing_the_table_again_changes_nothing():
    """The page is what `with_table` writes."""
    page = PAGE.read_text(encoding="utf-8")

    assert with_table(page, _rows()) == page


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_row_is_what_is_measured(pools, layout):
    """A new measurement gives the cells of the document."""
    assert cells_of(layout, pools) in _rows()


@pytest.mark.slow
def test_the_command_writes_the_table(tmp_path):
    """The command measures the rows that it is given, and keeps the rest of the page."""
    path = tmp_path / "page.md"
    command = [sys.executable, ".ci/layout_table.py", "Distributed", "--output", str(path)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)

    assert done.stdout.startswith("`DistributedDataParallel` | 2 | equal | ")
    assert path.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
