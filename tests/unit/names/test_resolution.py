"""The import of a MindSpore or MindFormers name that mfwrap lacks says what to write instead."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mfwrap
from mfwrap.names import resolution, training
from mfwrap.names.texts import Without

ROWS = training.ROWS["mindformers"] | training.ROWS["nn"] | training.ROWS["mindspore"]
ABSENT = {name: text for name, text in ROWS.items() if not name.startswith("_")}


@pytest.mark.parametrize("name", ABSENT)
def test_an_import_says_what_to_write(name):
    """Importing an absent name is an error that says what to write instead."""
    middle = ", and nothing replaces it: " if isinstance(ABSENT[name], Without) else "; write "
    says = re.escape(f"mfwrap has no `{name}`{middle}{ABSENT[name]}")
    with pytest.raises(ImportError, match=f"^{says}$"):
        exec(f"from mfwrap import {name}", {})  # noqa: S102  (the test's own text)
    with pytest.raises(AttributeError, match=f"^{says}$"):
        getattr(mfwrap, name)
    assert not hasattr(mfwrap, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("EvalCallBack", "mfwrap has no `EvalCallBack`; write `mfwrap.callbacks.EvalCallback`"),
        ("Conv2d", "mfwrap has no `Conv2d`; write `torch.nn.Conv2d`; "),
        ("stop_gradient", "mfwrap has no `stop_gradient`; write `x.detach()`"),
    ],
)
def test_names_of_other_areas(name, says):
    """Callbacks, layers and operators are absent names of `mfwrap`, too."""
    with pytest.raises(ImportError, match=f"^{re.escape(says)}"):
        exec(f"from mfwrap import {name}", {})  # noqa: S102  (the test's own text)


def test_the_import_does_not_load_the_table():
    """`import mfwrap` stays quick: only an absent name loads the table."""
    code = (
        "import sys, mfwrap; print('mfwrap.names.training' in sys.modules); "
        "hasattr(mfwrap, 'PipelineCell'); print('mfwrap.names.training' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("package", resolution.PUBLIC_PACKAGES)
def test_public_names_are_those_of_the_imported_package(package):
    """The names that are read from a package's source are its ``__all__``."""
    for name in importlib.import_module(package).__all__:
        home = resolution.home_of(name)
        assert home is not None
        assert hasattr(importlib.import_module(home), name)
    assert resolution.home_of("no_such_name") is None


def test_any_other_name_is_an_ordinary_error():
    """A misspelled name is an ordinary ImportError or AttributeError."""
    with pytest.raises(ImportError, match="cannot import name 'PipelineCel'"):
        exec("from mfwrap import PipelineCel", {})  # noqa: S102  (the test's own text)
    with pytest.raises(AttributeError, match="module 'mfwrap' has no attribute 'PipelineCel'"):
        mfwrap.PipelineCel  # noqa: B018  (reading the attribute raises)
    assert not hasattr(mfwrap, "PipelineCel")


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("LossMonitor", "mfwrap.callbacks"),
        ("MFLossMonitor", "mfwrap.callbacks"),
        ("ModelCheckpoint", "mfwrap.callbacks"),
        ("CosineWithWarmUpLR", "mfwrap.schedules"),
        ("QKClip", "mfwrap.optimizers"),
        ("MFTrainer", "mfwrap.trainer"),
        ("AttachedStep", "mfwrap.accelerate"),
    ],
)
def test_a_name_of_another_package_says_where_it_is(name, home):
    """MindSpore has most of its names at its top."""
    says = f"^mfwrap has no `{name}`; write `{home}.{name}`$"
    with pytest.raises(ImportError, match=says):
        exec(f"from mfwrap import {name}", {})  # noqa: S102  (the test's own text)
    with pytest.raises(AttributeError, match=says):
        getattr(mfwrap, name)


def test_a_submodule_is_found_as_before():
    """Only what no other finder has found is asked for."""
    found = importlib.util.find_spec("mfwrap.names.resolution")
    assert found.origin == resolution.__file__
    assert importlib.util.find_spec("mfwrap.no_such_module") is None


@pytest.mark.parametrize("name", ["mfwrap.StepConfig", "mfwrap.MFTrainOneStepCell"])
def test_pydoc_finds_names(name, tmp_path):
    """It asks for a module of the name first."""
    command = [sys.executable, "-m", "pydoc", name]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(f"Help on class {name.rpartition('.')[2]} in mfwrap:")


def test_a_source_folder_without_the_other_packages(tmp_path):
    """Python that is started beside the sources imports a folder that lacks some packages."""
    source = shutil.copytree(Path(mfwrap.__file__).parent / "names", tmp_path / "mfwrap" / "names")
    shutil.copy(mfwrap.__file__, source.parent)
    command = [sys.executable, "-c", "from mfwrap import MFTrainer"]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    last = found.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: mfwrap is imported from its source folder ")
    assert "has no mfwrap.callbacks; start Python in another folder" in last


def test_a_module_that_does_not_exist():
    """Code that asks for an optional module catches this error."""
    with pytest.raises(ModuleNotFoundError, match="mfwrap has no `nn`; write "):
        importlib.import_module("mfwrap.nn")
