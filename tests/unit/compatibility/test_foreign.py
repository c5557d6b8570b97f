"""The listed names of other libraries are there in the versions that should have them."""

import ast
import contextlib
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from mfwrap.compatibility import (
    accelerate,
    fully_shard,
    gradient_dtypes,
    graphs,
    other_trainers,
    pipelining,
    torch,
    transformers,
)
from mfwrap.compatibility.foreign import ForeignName, is_installed
from support.paths import ROOT

MODULES = (accelerate, fully_shard, gradient_dtypes, graphs, pipelining, torch, transformers)
NAMES = [name for module in MODULES for name in module.NAMES]

PUBLIC = {
    *("_asdict", "_fields", "_make", "_replace"),
    *(
        "_raw_saved_self",
        "_saved_ignore_index",
        "_saved_pos_weight",
        "_saved_self",
        "_saved_target",
        "_saved_weight",
    ),
}
"""Documented names of named tuples, and of what torch's autograd keeps for the backward ("Saved
tensors" in its notes): only the nodes of a graph have these, and no class in Python does."""

OF_PYTHON = {"_current_frames", "_getframe"}
"""Names of Python's own ``sys``."""


def is_private(name: str) -> bool:
    """Return whether a name is private and no special method."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def exists(name: ForeignName) -> bool:
    """Return whether an installed library has a name.

    An attribute that only instances have is looked up in the source of its class, and an attribute
    that a function sets on another object in the source of the function.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # deprecations of the library itself
            owner = importlib.import_module(name.module)
    except ImportError:
        return False
    *parents, last = name.attribute.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or hasattr(owner, last):
        return owner is not None
    owned = "self" if inspect.isclass(owner) else r"\w+"
    with contextlib.suppress(OSError, TypeError):  # a class of C has no source
        return re.search(rf"\b{owned}\.{last}\b", inspect.getsource(owner)) is not None
    return False


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.module}:{name.attribute}")
def test_a_name_is_where_it_should_be(name):
    """A name exists from its first version on, and until its last.

    If this fails with a new release of a library: find out what replaces the name, set `before` or
    `since`, and teach the function that uses it.
    """
    library = name.module.partition(".")[0]
    has_come = name.since is None or is_installed(library, name.since)
    has_gone = name.before is not None and is_installed(library, name.before)

    assert exists(name) == (has_come and not has_gone), version(library)


def test_no_name_is_listed_twice():
    """Each name has one entry."""
    places = [(name.module, name.attribute) for name in NAMES]

    assert len(set(places)) == len(places)


def test_a_missing_name_is_found_out():
    """`exists` sees that a module, a class, a method or an attribute is not there."""
    assert exists(ForeignName("torch.nn", "Module._modules"))
    for module, attribute in (
        ("torch.absent", "Module"),
        ("torch.nn", "Absent._modules"),
        ("torch.nn", "Module._absent"),
        ("torch.nn", "absent"),
    ):
        assert not exists(ForeignName(module, attribute))


FILES = [
    path
    for folder in ("mfwrap", "callbacks", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
INSIDE = ROOT / "mfwrap" / "compatibility"


@functools.cache
def tree_of(path: Path) -> ast.AST:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def is_of_itself(value: ast.AST) -> bool:
    """Return whether an expression is self, cls or super()."""
    if isinstance(value, ast.Call):
        value = value.func
        return isinstance(value, ast.Name) and value.id == "super"
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, variables, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if is_of_itself(node.value) else []


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of what may be another library's.

    These are attributes, except those of self and super(), imports, and strings.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_of_itself(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("mfwrap"):
            names = (*(node.module or "").split("."), *(alias.name for alias in node.names))
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield node.lineno, str(node.value)


LISTED = {name.attribute.split(".")[-1] for name in NAMES}

OF_TRAINERS = {
    name
    for lists in (other_trainers.KEPT, other_trainers.OF_RANK)
    for names in lists.values()
    for name in names
}
"""Attributes that are looked up on a Trainer, and may be absent."""


@functools.cache
def own_names() -> set[str]:
    """Return the names that mfwrap defines, and those of Python that it may use."""
    return {name for path in FILES for name in defined(tree_of(path))} | PUBLIC | OF_PYTHON


def private_names_in(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the lines and private names of other libraries that a file uses."""
    listed = [(line, name) for line, name in used(tree) if is_private(name) and name in LISTED]
    unknown = [
        (node.lineno, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and node.attr not in own_names()
    ]
    return sorted({*listed, *unknown})


def test_private_names_are_used_in_one_place():
    """Only `mfwrap.compatibility` uses private names of other libraries.

    A class may override a private method and call the method of its super(): both must have the
    name of what is overridden.
    """
    used_elsewhere = {
        str(path.relative_to(ROOT)): names
        for path in FILES
        if INSIDE not in path.parents and (names := private_names_in(tree_of(path)))
    }

    assert used_elsewhere == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch._foreach_norm(gradients)",
        "optimizer._a_private_name_of_no_library",
        "getattr(module, '_orig_mod', None)",
        "vars(trainer)['_save_checkpoint'] = save",
        "names = ('_models', '_optimizers')",
        "from torch.utils import _pytree",
        "from torch._compile import anything\nfrom torch.utils import _pytree as pytree",
    ],
)
def test_a_private_name_elsewhere_is_found(source):
    """A private name is found as an attribute, as a string and in an import."""
    assert private_names_in(ast.parse(source))


@pytest.mark.parametrize("path", sorted(INSIDE.glob("*.py")), ids=lambda path: path.name)
def test_what_is_used_inside_is_listed(path):
    """Each private name that the package itself uses has an entry."""
    own = set(defined(tree_of(path)))
    found = {
        name
        for _, name in used(tree_of(path))
        if is_private(name) and name not in own and not name.startswith("_distributed_c10d")
    }

    assert found - LISTED - OF_TRAINERS - {"_compile", "_C"} == set()


@pytest.mark.parametrize(
    ("installed", "release", "expected"),
    [
        ("2.9.0+cu130", "2.9", True),
        ("2.11.0", "2.9", True),
        ("2.9.1", "2.10", False),
        ("2.10.0a0+git1", "2.10", True),
        ("5.5.0.dev0", "5.5", True),
        ("5.4.9", "5.5", False),
        ("4.57.6", "5.5", False),
    ],
)
def test_versions_are_compared_by_their_numbers(monkeypatch, installed, release, expected):
    """A pre-release and a build count as their release."""
    monkeypatch.setattr("mfwrap.compatibility.foreign.version", lambda _: installed)

    assert is_installed("library", release) == expected
