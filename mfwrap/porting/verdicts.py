"""Judge a name or an attribute by the table of names and by mfwrap's public names."""

import contextlib
import pkgutil

import numpy as np

from mfwrap.names.counterparts import AREAS, Counterpart, find
from mfwrap.names.resolution import home_of
from mfwrap.porting.modules import Imported

_WITH_OUR_NAMES = {"mindspore", "nn", "ops", "mindformers"}
"""Areas in which a name that mfwrap has, too, means the same."""


def of_name(imported: Imported) -> Counterpart | None:
    """Return what stands for an imported name or module; None if that is unknown."""
    if imported.name is None:
        return find("module", imported.area)  # what it has is judged where it is used
    if imported.name == "*":
        return None
    if imported.area in {"mint", "experimental"}:
        return _of_torch(imported)
    if imported.area == "mindspore.numpy":
        return _of_numpy(imported.name)
    for area in AREAS.get(imported.area, ()):
        found = find(area, imported.name)
        if found is not None:
            return found
    home = home_of(imported.name) if imported.area in _WITH_OUR_NAMES else None
    return None if home is None else Counterpart("same", f"`{home}.{imported.name}`")


def _of_torch(imported: Imported) -> Counterpart | None:
    """Return torch's name for one of a package that is modeled on torch, if torch has it."""
    _, _, inside = imported.module.split(".", 2) if imported.module.count(".") > 1 else ("", "", "")
    path = ".".join(filter(None, ("torch", inside, imported.name)))
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(path)
        return Counterpart("write", f"`{path}`")
    return None


def _of_numpy(name: str) -> Counterpart | None:
    """Return NumPy's name for one of the package that is modeled on NumPy, if NumPy has it."""
    if not hasattr(np, name):
        return None
    text = f"`numpy.{name}` for arrays, and torch's function for tensors, which may differ"
    return Counterpart("write", text)
