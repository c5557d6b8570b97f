"""docs/mistakes.md is up to date: each mistake, acted out again, is answered as the page says."""

import shutil
import subprocess
import sys

import pytest

from support.mistakes.acting import act
from support.mistakes.table import (
    MISTAKES,
    PAGE,
    cell_of,
    page,
    present_versions,
    read_cells,
    versions_of,
)
from support.paths import ROOT
from support.versions import needs

TEXT = PAGE.read_text(encoding="utf-8")
CELLS = read_cells(TEXT)

_SLOW = {"disk_full", "unused_parameters"}
"""Mistakes whose acting out starts processes."""


_NEEDED = {
    "targets_of_double_precision": needs("torch", "2.13", "a loss that converts float64 targets"),
    "text_read_as_missing": needs("datasets", "5.2", "it closes the CSV files that it reads"),
}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in _NEEDED:
        return [_NEEDED[name]]
    return [pytest.mark.slow] if name in _SLOW else []


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, id=each.id, marks=_marks(each.id)) for each in MISTAKES]
)
def test_a_mistake(mistake, tmp_path):
    """Its maker is told what is wrong, where, and what to do."""
    if mistake.id == "disk_full" and shutil.which("unshare") is None:
        pytest.skip("needs unshare")

    answer = act(mistake, tmp_path)

    assert answer.ends == mistake.ends, answer.says
    assert [part for part in mistake.says if part not in answer.says] == [], answer.says
    if present_versions() == versions_of(TEXT) and not mistake.theirs:
        assert cell_of(mistake, *answer) == CELLS[mistake.id], "run `make mistakes`"


def test_there_are_a_hundred():
    """Each of a hundred mistakes has a name and a source of its own, or another part of a page."""
    assert len({each.id for each in MISTAKES}) == 100
    assert all(each.source.startswith("https://") for each in MISTAKES)
    assert all(each.says or each.remark for each in MISTAKES)


def test_every_row_of_the_page_is_written_from_its_mistake():
    """The page has the rows that `make mistakes` would write now."""
    assert page(CELLS, versions_of(TEXT)) == TEXT, "run `make mistakes`"


def test_the_command_writes_the_page(tmp_path):
    """The command acts out the mistakes that it is given, and keeps all other rows."""
    pytest.importorskip("peft")  # which it imports in a process of its own
    written = tmp_path / "page.md"
    words = [".ci/mistakes.py", "yaml_tab", "--output", str(written)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)

    assert read_cells(written.read_text(encoding="utf-8")).keys() == CELLS.keys()
