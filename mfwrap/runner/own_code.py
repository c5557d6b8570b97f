"""Load the classes and functions of the user's own that a recipe names as ``module.Name``."""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, final

from mfwrap.names import hint
from mfwrap.records.run_record import read_facts
from mfwrap.runner.document import Path, RecipeDocument, RecipeError

OBJECT = "object of "
"""Beginning of the ``type`` of a section that `mfwrap.runner.run_recipe` got as an object."""

NEEDS_FLAG = (
    "is Python code that the recipe names; pass --allow-code to run it (in Python: "
    "load_recipe(..., allow_code=True))"
)

_PACKAGE = pathlib.Path(__file__).parents[1]
"""Folder of mfwrap, which lies beside a recipe in a checkout."""


class OwnKind(NamedTuple):
    """What a section accepts as its ``type``."""

    says: str
    """What is expected, for error messages."""

    fits: Callable[[Any], bool]
    """Returns whether an attribute of a module can be used."""


class OwnType(NamedTuple):
    """A class or function of the user's own that a section names."""

    name: str
    """Value of ``type``."""

    found: Any
    """The class or function; ``None`` if the recipe may not run code."""

    settings: dict[str, Any]
    """The other keys of the section."""


@final
class OwnCode:
    """Import modules beside a recipe, or installed ones, and find classes in them.

    A folder beside the recipe is at the end of ``sys.path`` only while `importable` is active, and
    its modules are in ``sys.modules`` only then: no installed module is shadowed, and the modules
    of two recipes may have the same names.

    Args:
        recipe: Path of the recipe's file, or its name: modules are then looked for in the current
            folder. For the copy of a recipe in a run folder, modules are looked for beside the copy
            and then where ``run.json`` says that the run has found them.
        is_allowed: Whether code may be imported. If not, nothing is looked for.
        given: Functions that return the objects that a program passes instead of sections, by the
            path of the section.
    """

    def __init__(
        self,
        recipe: str,
        *,
        is_allowed: bool,
        given: Mapping[Path, Callable[..., Any]] | None = None,
    ) -> None:
        self.is_allowed = is_allowed
        self.given = given or {}
        beside = pathlib.Path(os.path.abspath(recipe)).parent  # noqa: PTH100  (keep symbolic links)
        self._folders = [beside]
        if is_allowed and (folder := _recorded(beside).get("folder")):
            self._folders.append(pathlib.Path(os.path.normpath(beside / str(folder))))
        self._beside: dict[str, ModuleType] = {}
        self._named: dict[str, ModuleType] = {}

    def load(self, document: RecipeDocument, path: Path, name: str, kind: OwnKind) -> Any:
        """Return the class or function that a recipe names; its module is imported.

        Args:
            document: Recipe; supplies the place for errors.
            path: Path of the name in the recipe.
            name: Name of the form ``module.Name``.
            kind: What the section accepts.

        Raises:
            RecipeError: If there is no such module or name, if the module cannot be imported or has
                the name of another one, or if the name is of the wrong kind.
        """
        module_name, _, attribute = name.rpartition(".")
        if not all(part.isidentifier() for part in name.split(".")):
            raise document.error(path, f"expected module.Name, got {name!r}")
        module = self._module(document, path, module_name)
        members = vars(module)
        if attribute not in members and not hasattr(module, attribute):
            known = [one for one, value in members.items() if one[0] != "_" and kind.fits(value)]
            where = f"{module_name} ({getattr(module, '__file__', None) or 'built in'})"
            says = f"expected {kind.says}, but {where} has no {attribute!r}"
            raise document.error(path, f"{says}{hint(attribute, known)}")
        found = getattr(module, attribute)
        if not kind.fits(found):
            base = getattr(found, "__base__", None)  # only classes have one
            got = f"a {type(found).__name__}"
            if base is not None:
                got = f"a subclass of {base.__module__}.{base.__qualname__}"
            raise document.error(path, f"expected {kind.says}, got {name}, {got}")
        self._named[module_name] = module
        return found

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        """Make the modules beside the recipe importable in the block, also in its data workers."""
        added = [str(one) for one in self._folders if not _is_importable_from(one)]
        before = dict(sys.modules)
        if added:
            sys.modules.update(self._beside)
        sys.path.extend(added)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path[:] = [one for one in sys.path if one not in added]
            # A copy: another thread, such as that of the hub's telemetry, may import just now.
            after = dict(sys.modules)
            tops = {name.partition(".")[0] for name in after} - before.keys()
            own = {top for top in tops if self._is_beside(top)}
            self._beside |= {
                name: module for name, module in after.items() if name.partition(".")[0] in own
            }
            for name in self._beside if added else ():
                sys.modules.pop(name, None)
                if name in before:
                    sys.modules[name] = before[name]

    def facts(self, run_folder: pathlib.Path) -> dict[str, Any] | None:
        """Return the entry ``code`` of ``run.json``; ``None`` for a recipe that names no code.

        Args:
            run_folder: Run folder.
        """
        if not self._named:
            return None
        modules = {**self._named, **self._beside}
        folders = [one for one in self._folders if any(_file_in(one, name) for name in modules)]
        return {
            "folder": os.path.relpath(folders[0], run_folder) if folders else None,
            "sha256": {
                name: hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
                for name, module in modules.items()
                if (file := getattr(module, "__file__", None)) is not None
            },
        }

    def changed_since(self, run_folder: pathlib.Path) -> list[str]:
        """Return the files of modules that differ from those of an earlier start of a run."""
        before, now = _recorded(run_folder).get("sha256"), self.facts(run_folder)
        if not isinstance(before, dict) or now is None:
            return []
        digests = now["sha256"].items()
        return [f"{name}.py" for name, one in digests if before.get(name, one) != one]

    def place_of(self, error: BaseException) -> str:
        """Return `` at file:line`` of an error in code beside the recipe; otherwise nothing."""
        if isinstance(error, SyntaxError) and error.filename:
            return f" at {error.filename}:{error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if self._has(one.filename)]
        return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""

    def _module(self, document: RecipeDocument, path: Path, name: str) -> ModuleType:
        top = name.partition(".")[0]
        self._check_name(document, path, top)
        try:
            with self.importable():
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise self._import_error(document, path, name, error) from error
            beside = [file.stem for one in self._folders for file in one.glob("*.py")]
            where = " or ".join(str(one) for one in self._folders)
            says = f"expected a module in {where} or an installed one, got {name!r}"
            raise document.error(path, f"{says}{hint(name, beside)}") from error
        except RecipeError:
            raise
        except (Exception, SystemExit) as error:  # the module may raise anything
            raise self._import_error(document, path, name, error) from error

    def _import_error(
        self, document: RecipeDocument, path: Path, name: str, error: BaseException
    ) -> RecipeError:
        said = f"{type(error).__name__}{self.place_of(error)}: {error}"
        return document.error(path, f"the module {name!r} cannot be imported: {said}")

    def _check_name(self, document: RecipeDocument, path: Path, top: str) -> None:
        """Refuse a module beside the recipe that has the name of another module."""
        beside = [(one, file) for one in self._folders if (file := _file_in(one, top)) is not None]
        if not beside:
            return
        folder, file = beside[0]
        says = f"{file} must have another name, because"
        if top in sys.stdlib_module_names:
            of = "a module of Python's standard library"
            raise document.error(path, f"{says} {top!r} is {of}; rename the file")
        kept = sys.path[:]
        sys.path[:] = [one for one in kept if not _is_same(one, folder)]
        try:
            other = getattr(importlib.util.find_spec(top), "origin", None)
        except (ImportError, ValueError):
            other = None  # nothing, or a module that was made without a file
        finally:
            sys.path[:] = kept
        if other is not None and not _is_same(other, file):
            msg = f"{says} {top!r} is also the module {other}; rename the file"
            raise document.error(path, msg)

    def _is_beside(self, top: str) -> bool:
        """Return whether an imported module or package lies beside the recipe."""
        module = sys.modules.get(top)
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        own = {str(one / top) for one in self._folders} | {
            f"{one / top}.py" for one in self._folders
        }
        return any(str(place) in own for place in places)

    def _has(self, file: str) -> bool:
        """Return whether a file is the user's own code, and not of a library."""
        is_named = any(file == getattr(one, "__file__", None) for one in self._named.values())
        beside = any(pathlib.Path(file).is_relative_to(one) for one in self._folders)
        is_library = "site-packages" in file or pathlib.Path(file).is_relative_to(_PACKAGE)
        return is_named or (beside and not is_library)


def is_own(name: object) -> bool:
    """Return whether a ``type`` names Python code, as ``my_module.MyCallback`` does."""
    return isinstance(name, str) and "." in name


def _recorded(run_folder: pathlib.Path) -> dict[str, Any]:
    """Return the entry ``code`` of a run's ``run.json``; empty without one."""
    try:
        code = read_facts(run_folder).get("code")
    except (OSError, ValueError):
        return {}
    return code if isinstance(code, dict) else {}


def _file_in(folder: pathlib.Path, module: str) -> pathlib.Path | None:
    """Return the file of a module, or of its package, in a folder; ``None`` without one."""
    parts = module.split(".")
    # A folder without __init__.py is a package, too, but only its modules have files.
    bases = (folder / parts[0], folder.joinpath(*parts))
    files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
    return next((one for one in files if one.is_file()), None)


def _is_importable_from(folder: pathlib.Path) -> bool:
    return any(_is_same(one, folder) for one in sys.path)


def _is_same(path: str, other: pathlib.Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)  # "" is the current folder
