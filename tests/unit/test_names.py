"""The import of a MindSpore or MindFormers name that mfwrap lacks says what to write instead."""

import importlib.util
import inspect
import pkgutil
import re

import pytest
from accelerate import Accelerator

import mfwrap
import mfwrap.callbacks
from mfwrap import names
from mfwrap.names import ABSENT_NAMES
from mfwrap.schedules import names as schedules


@pytest.mark.parametrize("name", ABSENT_NAMES)
def test_an_import_says_what_to_write(name):
    """Importing an absent name is an error that says what to write instead."""
    with pytest.raises(ImportError, match=f"^mfwrap has no `{name}`; write ") as raised:
        exec(f"from mfwrap import {name}", {})  # noqa: S102  (the test's own text)
    assert ABSENT_NAMES[name] in str(raised.value)
    with pytest.raises(AttributeError, match=re.escape(ABSENT_NAMES[name])):
        getattr(mfwrap, name)
    assert not hasattr(mfwrap, name)


def test_any_other_name_is_an_ordinary_error():
    """A misspelled name is an ordinary ImportError or AttributeError."""
    with pytest.raises(ImportError, match="cannot import name 'PipelineCel'"):
        exec("from mfwrap import PipelineCel", {})  # noqa: S102  (the test's own text)
    with pytest.raises(AttributeError, match="module 'mfwrap' has no attribute 'PipelineCel'"):
        mfwrap.PipelineCel  # noqa: B018  (reading the attribute raises)
    assert not hasattr(mfwrap, "PipelineCel")


def test_no_name_is_both_absent_and_there():
    """No public name is also in the table of absent names."""
    assert not ABSENT_NAMES.keys() & {
        *mfwrap.__all__,
        *schedules.SCHEDULES,
        *mfwrap.callbacks.__all__,
    }


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
    assert importlib.util.find_spec("mfwrap.names").origin == names.__file__
    assert importlib.util.find_spec("mfwrap.no_such_module") is None


@pytest.mark.parametrize("sentence", ABSENT_NAMES.values(), ids=ABSENT_NAMES)
def test_what_to_write_exists(sentence):
    """Each name and argument that an error suggests exists."""
    for path in re.findall(r"`((?:torch|mfwrap)(?:\.\w+)+)", sentence):
        assert pkgutil.resolve_name(path) is not None
    arguments = [
        *inspect.signature(mfwrap.MFTrainOneStepCell).parameters,
        *inspect.signature(mfwrap.Model).parameters,
        *inspect.signature(mfwrap.AdamWeightDecay).parameters,
        *inspect.signature(Accelerator).parameters,
    ]
    assert set(re.findall(r"(\w+)=", sentence)) <= set(arguments)


def test_a_module_that_does_not_exist():
    """Code that asks for an optional module catches this error."""
    with pytest.raises(ModuleNotFoundError, match="mfwrap has no `nn`; write "):
        importlib.import_module("mfwrap.nn")
