"""Examples in docstrings run, and every public name has a docstring."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import mfwrap
import mfwrap.callbacks
import mfwrap.recipes
from mfwrap.compatibility.transformers import TRAINER_RELEASE
from support.versions import needs

PACKAGES = (mfwrap, mfwrap.callbacks, mfwrap.recipes)


def module_names() -> list[str]:
    """Return the import name of every module, sorted.

    In an editable install, ``mfwrap.callbacks`` and ``mfwrap.recipes`` are outside of the folder
    mfwrap/, so all three packages are searched. In an ordinary install they are inside.
    """
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names |= {module.name for module in found}
    return sorted(names)


def examples(name: str) -> list[doctest.DocTest]:
    """Return the docstrings of a module that contain examples."""
    tests = doctest.DocTestFinder().find(importlib.import_module(name), name)
    return [test for test in tests if test.examples]


NEEDED = {
    "mfwrap.optimizers.expert_bias": needs("transformers", "5.0", "the experts of a layer"),
    "mfwrap.trainer.trainer": needs("transformers", TRAINER_RELEASE, "what MFTrainer overrides"),
}
"""What the examples of a module need of a library."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDED.get(name, ())) for name in module_names()]
)
def test_examples_run(name, tmp_path, monkeypatch):
    """The examples in a module's docstrings print the output that they show."""
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(name):
        runner.run(test, out=report.append)

    assert runner.failures == 0, "".join(report)


def test_there_are_examples():
    """At least one docstring contains an example, so the test above runs something."""
    assert sum(len(examples(name)) for name in module_names()) > 0


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_are_documented(package):
    """Every public class and function has a docstring; a method may inherit its docstring."""
    public = {name: getattr(package, name) for name in getattr(package, "__all__", ())}
    for name, value in list(public.items()):
        if inspect.isclass(value):
            members = vars(value).items()
            public |= {
                f"{name}.{key}": getattr(value, key)
                for key, member in members
                if not key.startswith("_")
                and (inspect.isroutine(member) or isinstance(member, property | classmethod))
            }

    assert [name for name, value in public.items() if not inspect.getdoc(value)] == []
