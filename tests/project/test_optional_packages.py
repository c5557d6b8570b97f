"""Tests that need an optional package are skipped on a machine that lacks it, with the reason."""

import os
import subprocess
import sys
import tomllib
from xml.etree import ElementTree as ET

import pytest

from support.optional_packages import OPTIONAL_PACKAGES, absent_package
from support.paths import ROOT, TESTS

HIDE = """
import importlib.machinery

find_spec = importlib.machinery.PathFinder.find_spec.__func__

def without(cls, name, path=None, target=None):
    return None if name in {"click", "datasets"} else find_spec(cls, name, path, target)

importlib.machinery.PathFinder.find_spec = classmethod(without)
"""

FILES = {
    "at_the_top": "import datasets",
    "of_the_command_line": "from mfwrap.cli import main",
    "in_a_fixture": "import pytest\n@pytest.fixture\ndef rows():\n    import datasets",
    "in_a_test": "",
    "of_another_package": "import no_such_package",
    "of_a_name": "from torch import no_such_name",
    "of_a_module": "import yaml.no_such_module",
}
TESTS_OF = {
    "in_a_fixture": "def test_a(rows): pass\ndef test_b(): pass",
    "in_a_test": "def test_a():\n    import datasets.exceptions\ndef test_b(): pass",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run a file for each failing import, on a machine without click and datasets."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    for name, imports in FILES.items():
        tests = TESTS_OF.get(name, "def test_a(): pass")
        (folder / f"test_{name}.py").write_text(f"{imports}\n{tests}\n", encoding="utf-8")
    path = [str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["-p", "conftest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    options += ["-c", os.devnull, "--continue-on-collection-errors", "--junit-xml=report.xml"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "."],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        cwd=folder,
        check=False,
        capture_output=True,
    )
    found = {}
    for case in ET.parse(folder / "report.xml").iter("testcase"):  # noqa: S314  (our own)
        outcomes = [(child.tag, f"{child.get('message')} {child.text}") for child in case]
        place = (case.get("classname") or case.get("name") or "").removeprefix("test_")
        found.setdefault(place, []).extend(outcomes or [("passed", None)])
    return found


@pytest.mark.parametrize(
    ("file", "package"), [("at_the_top", "datasets"), ("of_the_command_line", "click")]
)
def test_a_file_that_needs_it_is_skipped(report, file, package):
    """A file whose import fails is one skip, whose reason names the package."""
    [(outcome, reason)] = report[file]

    assert outcome == "skipped"
    assert f"needs {package}" in reason


@pytest.mark.parametrize("file", ["in_a_fixture", "in_a_test"])
def test_a_test_that_needs_it_is_skipped(report, file):
    """A test that imports the package itself, or whose fixture does, is skipped alone."""
    [(outcome, reason), other] = report[file]

    assert (outcome, other) == ("skipped", ("passed", None))
    assert "needs datasets" in reason


@pytest.mark.parametrize("file", ["of_another_package", "of_a_name", "of_a_module"])
def test_any_other_import_that_fails_is_an_error(report, file):
    """A name that is missing in an installed package, or a package that is not listed, fails."""
    assert [outcome for outcome, _ in report[file]] == ["error"]


def test_a_listed_package_that_is_installed_is_not_absent():
    """Only an error of a package that cannot be found counts."""
    assert absent_package(ModuleNotFoundError("", name="yaml.nothing")) is None
    assert absent_package(ImportError("", name="trl")) is None
    assert absent_package(None) is None


def test_each_listed_package_belongs_to_an_extra():
    """No package that is installed with mfwrap itself may be missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = {"scikit_learn": "sklearn", "pillow": "PIL", "PyYAML": "yaml", "ipython": "IPython"}
    modules |= {"mlflow_skinny": "mlflow"}
    of_datasets = {"pandas", "pyarrow"}
    extras = {
        entry.partition(">=")[0].partition("[")[0].replace("-", "_")
        for entries in project["optional-dependencies"].values()
        for entry in entries
    }

    assert {modules.get(name, name) for name in extras} | of_datasets >= OPTIONAL_PACKAGES
