"""Examples in docstrings run, and what is public has a docstring."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import mfwrap
import mfwrap.callbacks
import mfwrap.recipes

PACKAGES = (mfwrap, mfwrap.callbacks, mfwrap.recipes)


def module_names() -> list[str]:
    """Name every module of the package, as it is imported by a user.

    An editable install has ``mfwrap.callbacks`` and ``mfwrap.recipes`` outside of mfwrap's own
    path, an ordinary one inside.
    """
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names |= {module.name for module in found}
    return sorted(names)


def examples(name: str) -> list[doctest.DocTest]:
    """Return the docstrings of a module that have examples."""
    tests = doctest.DocTestFinder().find(importlib.import_module(name), name)
    return [test for test in tests if test.examples]


@pytest.mark.parametrize("name", module_names())
def test_examples_run(name, tmp_path, monkeypatch):
    """The examples of each module print what they say."""
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(name):
        runner.run(test, out=report.append)

    assert runner.failures == 0, "".join(report)


def test_there_are_examples():
    """The search for examples finds some."""
    assert sum(len(examples(name)) for name in module_names()) > 0


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_public_names_are_documented(package):
    """Each public class and function has a docstring, each public method its own or its base's."""
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
