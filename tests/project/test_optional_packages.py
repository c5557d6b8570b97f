"""Tests that need an optional package are skipped on a machine that lacks it, with the reason."""

import os
import subprocess
import sys
import tomllib

import pytest

from support.optional_packages import OPTIONAL_PACKAGES, absent_package
from support.paths import ROOT, TESTS

HIDE = """
import importlib.machinery

find_spec = importlib.machinery.PathFinder.find_spec.__func__

def without(cls, name, path=None, target=None):
    return None if name == {package!r} else find_spec(cls, name, path, target)

importlib.machinery.PathFinder.find_spec = classmethod(without)
"""

FILE = """
{import_}
import pytest

@pytest.fixture
def needed():
    import datasets

def test_with_a_fixture(needed):
    pass

def test_with_an_import():
    import datasets.exceptions

def test_without():
    pass
"""


def outcomes(folder, import_="", *, package="datasets"):
    """Run a test file on a machine without a package; return the last lines and the errors."""
    (folder / "sitecustomize.py").write_text(HIDE.format(package=package), encoding="utf-8")
    (folder / "test_file.py").write_text(FILE.format(import_=import_), encoding="utf-8")
    command = ["-m", "pytest", "-q", "-rsE", "-p", "conftest", "-p", "no:cacheprovider"]
    path = [str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = subprocess.run(
        [sys.executable, *command, "--import-mode=importlib", "-c", os.devnull, "test_file.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    return found.stdout


@pytest.mark.parametrize("import_", ["import datasets", "from mfwrap.cli import main"])
def test_a_file_that_needs_it_is_skipped(tmp_path, import_):
    """A file whose import fails is one skip, whose reason names the package."""
    package = "click" if "cli" in import_ else "datasets"

    found = outcomes(tmp_path, import_, package=package)

    assert f"needs {package}" in found
    assert found.strip().splitlines()[-1].startswith("1 skipped")


def test_a_test_that_needs_it_is_skipped(tmp_path):
    """Tests that import the package themselves, or whose fixtures do, are skipped alone."""
    found = outcomes(tmp_path)

    assert "needs datasets" in found
    assert found.strip().splitlines()[-1].startswith("1 passed, 2 skipped")


@pytest.mark.parametrize(
    "import_", ["import no_such_package", "from torch import no_such_name", "import yaml.nothing"]
)
def test_any_other_import_that_fails_is_an_error(tmp_path, import_):
    """A name that is missing in an installed package, or a package that is not listed, fails."""
    found = outcomes(tmp_path, import_)

    assert found.strip().splitlines()[-1].startswith("1 error")


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
    extras = {
        entry.partition(">=")[0].partition("[")[0].replace("-", "_")
        for entries in project["optional-dependencies"].values()
        for entry in entries
    }

    assert {modules.get(name, name) for name in extras} >= OPTIONAL_PACKAGES
