"""`make matrix` counts what the tests did, writes its table, and refuses rows that do not exist."""

import importlib.util
import subprocess
import sys

import pytest

from support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
matrix = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(matrix)

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError

def test_passes(): ...
def test_passes_too(): ...
def test_fails(): assert False
def test_has_an_error(broken): ...
@pytest.mark.skip("no chromium on this machine")
def test_is_skipped(): ...
@pytest.mark.parametrize("case", range(2))
@pytest.mark.skip("needs torch 2.10: Tensor.grad_dtype")
def test_needs_another_version(case): ...
@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""
SKIPPED_FILE = 'import pytest\npytest.skip("needs datasets", allow_module_level=True)'


def test_tests_are_counted(tmp_path):
    """An error in a fixture is a failure; skips count if they are because of the versions."""
    (tmp_path / "test_all.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_absent.py").write_text(SKIPPED_FILE, encoding="utf-8")
    path = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={path}"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)

    results = matrix.results_in(path)
    assert (results.passed, results.failed, results.num_skipped) == (2, 2, 2)
    assert results.reasons == {
        "needs torch 2.10: Tensor.grad_dtype": 2,
        "needs datasets": 1,
        "no chromium on this machine": 1,
        "": 1,  # the test that is known to fail
    }


def row(name, passed):
    """Return the cells of a row of the table."""
    return [name, "3.11.7", "2.9.0", "5.5.0", "1.12.0", "1.26.0", "everything", passed, "0", "3"]


def test_the_table_keeps_rows_that_were_not_run():
    """New rows replace those of the same name; the order is that of ROWS."""
    page = f"before\n{matrix.BEGIN}\n{matrix.END}\nafter\n"

    page = matrix.written(page, [row("newest", "1")])
    page = matrix.written(page, [row("core", "2")])
    page = matrix.written(page, [row("newest", "3")])

    assert page.startswith(f"before\n{matrix.BEGIN}\n| row | Python | torch |")
    assert page.endswith(f"{matrix.END}\nafter\n")
    _, _, *rows = page.partition(matrix.BEGIN)[2].partition(matrix.END)[0].strip().splitlines()
    assert rows == [f"| {' | '.join(row(*each))} |" for each in (("core", "2"), ("newest", "3"))]


def test_the_page_has_rows_of_the_matrix_alone():
    """README has the table, whose rows are in the order of ROWS."""
    text = matrix.PAGE.read_text(encoding="utf-8")
    _, _, *rows = text.partition(matrix.BEGIN)[2].partition(matrix.END)[0].strip().splitlines()

    names = [line.split(" | ")[0].strip("| ") for line in rows]
    assert names
    assert names == [name for name in matrix.ROWS if name in names]


def test_an_absent_python_is_not_available(monkeypatch):
    """The row of a Python that uv does not find has no results, and is no error."""
    finds_nothing = (sys.executable, "-c", "raise SystemExit(2)")
    monkeypatch.setattr(matrix, "UV", finds_nothing)

    cells, is_right = matrix.run_row("newest")
    assert is_right
    assert cells == ["newest", "3.14", "", "", "", "", "everything", "not available", "", ""]


def test_an_unknown_row_is_refused(monkeypatch, capsys):
    """The error names the rows that there are."""
    monkeypatch.setattr(sys, "argv", ["matrix.py", "oldest"])
    with pytest.raises(SystemExit):
        matrix.main()

    said = capsys.readouterr().err
    assert "unknown row 'oldest'; the rows are core, trainer, torch-2.11, pinned" in said
