"""mypy and pyright see the types of mfwrap, in an editable install and in a wheel."""

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT

USERS_FILE = """
from mfwrap import MFTrainOneStepCell, Model
from mfwrap.accelerate import attach
from mfwrap.callbacks import MFLossMonitor, TrainingStateMonitor
from mfwrap.runner import load_recipe
from mfwrap.trainer import MFTrainer

reveal_type(MFLossMonitor(per_print_times=2))
reveal_type(TrainingStateMonitor(step_interval=2))
reveal_type(attach)
reveal_type(load_recipe)
MFTrainOneStepCell(1, 2, nonsense=3)
Model(optimiser=None)
MFTrainer(nonsense=1)
"""
WRONG_LINES = {12, 13, 14}

OTHER_LIBRARIES = """
[mypy]
[mypy-torch.*,transformers.*,accelerate.*,safetensors.*,numpy.*,pydantic.*,yaml.*]
follow_imports = skip
ignore_missing_imports = True
"""
"""Configuration that makes mypy skip other libraries: checking them takes most of a minute."""


@pytest.fixture(scope="module", params=["editable", "wheel"])
def interpreter(request, tmp_path_factory) -> Path:
    """Return the Python of an environment in which mfwrap is installed."""
    if request.param == "editable":
        return Path(sys.executable)
    built = request.getfixturevalue("wheel")
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    )
    zipfile.ZipFile(built).extractall(packages)
    # Take the dependencies from the environment of the tests, but not its editable install of
    # mfwrap. That install is a .pth file, and Python ignores .pth files in a folder that is itself
    # added by a .pth file.
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    return folder / "bin" / "python"


@pytest.fixture
def users_file(tmp_path) -> Path:
    """Write a file as a user of mfwrap would, outside of the repository."""
    path = tmp_path / "train.py"
    path.write_text(USERS_FILE)
    return path


def wrong_lines(output: str) -> set[int]:
    """Return the lines of the user's file in which a type checker reports an error."""
    return {int(number) for number in re.findall(r"train\.py:(\d+)[:\d]*(?: -)? error", output)}


def check_output(output: str) -> None:
    """Check that types of all packages are known, and that each mistake is found."""
    for name in ("MFLossMonitor", "TrainingStateMonitor", "AttachedStep", "Recipe"):
        assert re.search(rf"[^\n]*eveal[^\n]*{name}|Type of[^\n]*{name}", output), (name, output)
    assert wrong_lines(output) == WRONG_LINES, output


@pytest.mark.slow
def test_mypy_sees_the_types(interpreter, users_file, tmp_path):
    """The types of mfwrap are known to mypy, which reports wrong arguments."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(OTHER_LIBRARIES)
    command = [sys.executable, "-m", "mypy", "--config-file", settings]
    command += ["--cache-dir", tmp_path / "cache", "--python-executable", interpreter, users_file]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    check_output(result.stdout + result.stderr)


@pytest.mark.slow
def test_pyright_sees_the_types(interpreter, users_file, tmp_path):
    """The types of mfwrap are known to pyright, which reports wrong arguments."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", interpreter, users_file]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    check_output(result.stdout + result.stderr)


def test_the_package_says_that_it_is_typed():
    """The package has ``py.typed``, so that type checkers read its annotations (PEP 561)."""
    assert (ROOT / "mfwrap" / "py.typed").exists()
