"""Resolve public names: import them on first use, and explain absent and misspelled names."""

import ast
import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.abc import InspectLoader, MetaPathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

_MAX_LISTED = 40


def hint(name: object, known: Collection[str]) -> str:
    """Return a suggestion to append to an error message about an unknown name.

    Args:
        name: The unknown name.
        known: The names that are valid in its place.

    Returns:
        ``; did you mean 'x'?`` if a known name is similar, or is the only one with the unknown name
        as its last words. Otherwise ``; known: [...]``, or an empty string if more than 40 names
        are known.

    Example:
        >>> hint("causal_lmm", ["causal_lm", "regression"])
        "; did you mean 'causal_lm'?"
        >>> hint("epochs", ["num_train_epochs", "regression"])
        "; did you mean 'num_train_epochs'?"
        >>> hint("x", ["causal_lm", "regression"])
        "; known: ['causal_lm', 'regression']"
    """
    similar = difflib.get_close_matches(str(name), list(known), n=1)
    longer = [one for one in known if str(one).endswith(f"_{name}")]
    if similar or len(longer) == 1:
        return f"; did you mean {(similar or longer)[0]!r}?"
    return f"; known: {sorted(known)}" if len(known) <= _MAX_LISTED else ""


PUBLIC_PACKAGES = (
    "mfwrap",
    "mfwrap.callbacks",
    "mfwrap.schedules",
    "mfwrap.optimizers",
    "mfwrap.trainer",
    "mfwrap.accelerate",
)
"""Packages with public names of MindSpore and MindFormers, in the order in which to look."""


def home_of(name: str) -> str | None:
    """Return the package that has a public name, or None.

    Example:
        >>> home_of("LossMonitor"), home_of("TrainOneStepCell"), home_of("Momentum")
        ('mfwrap.callbacks', 'mfwrap', None)
    """
    return next((home for home in PUBLIC_PACKAGES if name in _public_names(home)), None)


@functools.cache
def _public_names(package: str) -> frozenset[str]:
    """Return the ``__all__`` of a package, read from its source.

    Importing the packages takes seconds, because they load torch and transformers.
    """
    spec = importlib.util.find_spec(package)
    loader = None if spec is None else spec.loader
    source = loader.get_source(package) if isinstance(loader, InspectLoader) else None
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def package_getattr(
    package: str,
    homes: Mapping[str, str] = MappingProxyType({}),
    *,
    explains: bool = False,
) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, which resolves the package's public names.

    Args:
        package: The package's ``__name__``.
        homes: Maps a public name to the module that defines it. The module is imported when the
            name is first used, so importing the package alone stays quick.
        explains: Whether looking up a name of MindSpore or MindFormers that the package does not
            have raises an AttributeError that says what to write instead, and ``from package
            import name`` an ImportError that does.
    """
    if explains:
        _finder.add(package)

    def getattribute(name: str) -> Any:
        if name in homes:
            found = getattr(importlib.import_module(homes[name]), name)
            vars(sys.modules[package])[name] = found  # no call the next time
            return found
        advice = _advice(package, name) if explains else None
        msg = f"module {package!r} has no attribute {name!r}" if advice is None else advice
        raise AttributeError(msg)

    return getattribute


def _advice(package: str, name: str) -> str | None:
    """Return a sentence about an absent name; ``None`` if it is unknown."""
    if name.startswith("_"):
        return None
    # The table is loaded at the first absent name only, so `import mfwrap` stays quick.
    from mfwrap.names.counterparts import absent_name  # noqa: PLC0415  (see above)

    found = absent_name(name, of_callbacks=package == "mfwrap.callbacks")
    if found is not None:
        return f"{package} has no `{name}`{found.advice('; ', ', and ')}"
    home = home_of(name) if package == "mfwrap" else None
    if home in {None, package}:  # pydoc asks for modules before names
        return None
    return f"{package} has no `{name}`; write `{home}.{name}`"


@final
class _AbsentNames(MetaPathFinder):
    """Say what to write instead of an absent name that is imported from a package.

    Where a package does not have a name, ``from package import name`` asks for a module of this
    name. The answer comes last, where every import has failed before.
    """

    def __init__(self) -> None:
        self._packages: set[str] = set()

    def add(self, package: str) -> None:
        """Explain the absent names of a package."""
        self._packages.add(package)
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> None:
        """Raise a ModuleNotFoundError if a replacement is known; otherwise, find nothing."""
        package, _, name = fullname.rpartition(".")
        if fullname in PUBLIC_PACKAGES:
            source = Path(sys.modules[package].__path__[0]).parent
            msg = (
                f"mfwrap is imported from its source folder {source}, which has no {fullname}; "
                "start Python in another folder, or with the option -P"
            )
            raise ModuleNotFoundError(msg, name=fullname)
        if package in self._packages:
            advice = _advice(package, name)
            if advice is not None:
                raise ModuleNotFoundError(advice, name=package)


_finder = _AbsentNames()
