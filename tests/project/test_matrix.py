"""`make matrix` counts what the tests did, and refuses rows that do not exist."""

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
@pytest.mark.skip
def test_is_skipped(): ...
@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""


def test_tests_are_counted(tmp_path):
    """An error in a fixture is a failure; tests that are skipped do not count."""
    (tmp_path / "test_all.py").write_text(TESTS, encoding="utf-8")
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={results}", "test_all.py"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)

    assert matrix.passed_and_failed(results) == ("2", "2")
    assert matrix.passed_and_failed(tmp_path / "absent.xml") == ("", "did not end")


def test_an_absent_python_is_not_available(monkeypatch):
    """The row of a Python that uv does not find has no results, and is no error."""
    finds_nothing = (sys.executable, "-c", "raise SystemExit(2)")
    monkeypatch.setattr(matrix, "UV", finds_nothing)

    cells = matrix.run_row("3.14-newest")
    assert cells == ["3.14", "newest", "", "", "", "", "not available", ""]


def test_an_unknown_row_is_refused(monkeypatch, capsys):
    """The error names the rows that there are."""
    monkeypatch.setattr(sys, "argv", ["matrix.py", "3.10-oldest"])
    with pytest.raises(SystemExit):
        matrix.main()

    said = capsys.readouterr().err
    assert "unknown row '3.10-oldest'; the rows are 3.11-oldest, 3.11-pinned" in said
