"""The import of a MindSpore or MindFormers name that mfwrap lacks says what to write instead."""

import inspect
import pkgutil
import re

import pytest
import torch
from accelerate import Accelerator

import mfwrap
import mfwrap.callbacks
from mfwrap.names import ABSENT_NAMES
from mfwrap.schedules import names as schedules


@pytest.mark.parametrize("name", ABSENT_NAMES)
def test_an_import_says_what_to_write(name):
    """Importing an absent name is an error that says what to write instead."""
    with pytest.raises(ImportError, match=f"^mfwrap has no `{name}`; write ") as raised:
        exec(f"from mfwrap import {name}", {})  # noqa: S102  (the test's own text)
    assert ABSENT_NAMES[name] in str(raised.value)
    with pytest.raises(ImportError, match=re.escape(ABSENT_NAMES[name])):
        getattr(mfwrap, name)


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


def test_no_function_of_torch_has_an_absent_name():
    """No absent name is the name of a function of torch.

    Pickle looks for torch's functions in every module. It expects an AttributeError if a module
    does not have the function, but an absent name raises an ImportError.
    """
    assert {name for name in ABSENT_NAMES if hasattr(torch, name)} == {"Tensor"}
    # `Tensor` is allowed, because it is a class: a class has a `__module__`, so pickle does not
    # search other modules.
    assert isinstance(torch.Tensor, type)


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
