"""Build checked objects from a recipe's plain values."""

import difflib
import functools
import inspect
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, final, get_args, get_type_hints

from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from mfwrap.checkpoints.whole import check_writable
from mfwrap.collectives import start_failure
from mfwrap.runner.document import Path, RecipeDocument, RecipeError, one_line, shown
from mfwrap.runner.own_code import OBJECT, OwnCode, OwnKind, OwnType, is_own

T = TypeVar("T")

REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    DatasetsError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""Errors that the constructors of other libraries raise for wrong arguments."""

_NAMED_FIRST = re.compile(r"`(?P<key>\w[\w.]*)` (?P<says>.*)")
_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}
_MISSING = {"missing", "missing_argument", "missing_keyword_only_argument"}
_IS_MISSING = "required, but missing"
_PLAIN_TYPES = {
    "a valid array": "a list",
    "a valid boolean": "true or false",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid string": "a string",
    "an object": "a mapping",
}
"""Word for each type in a recipe, by pydantic's phrase for it in an error about JSON."""


@final
class RecipeObjects:
    """Build checked objects from the sections of a document.

    Args:
        document: Recipe that the sections are part of.
        code: Finds the classes that the recipe names; by default, no code may run.
    """

    def __init__(self, document: RecipeDocument, code: OwnCode | None = None) -> None:
        self.document = document
        self.code = OwnCode(document.name, is_allowed=False) if code is None else code
        self.unchecked: dict[Path, str] = {}
        """Names of classes that were not loaded because the recipe may not run code, by path."""

        self.without_meaning: list[str] = []
        """Dotted names of the MindFormers keys that were read and have no effect in mfwrap."""

    def parse(self, path: Path, section: type[T], value: Any) -> T:
        """Return a section as an object of its dataclass.

        Args:
            path: Path of the section.
            section: Dataclass of the section.
            value: Content of the section.

        Raises:
            RecipeError: If a key or a value does not fit the dataclass.
        """
        if isinstance(value, dict):
            value = without_nulls(section, value)
        try:
            # Validate JSON instead of Python values: in strict mode, pydantic converts mappings to
            # dataclasses and lists to tuples only if they come from JSON.
            adapter = _adapter(section)  # type: ignore[arg-type]  # (mypy: a class is not hashable)
            parsed: T = adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            raise self._invalid(path, value, error, section) from error
        except Exception as error:  # a section of the user's own may raise anything
            settings = value if isinstance(value, dict) else {}
            raise self.refusal(path, settings, error) from error
        return parsed

    def build(
        self,
        path: Path,
        make: Callable[..., T],
        settings: Mapping[str, Any],
        *,
        known: Collection[str] | None = None,
    ) -> T:
        """Call `make` with the settings of a section as keywords, and return the result.

        Args:
            path: Path of the section.
            make: Class or function to call.
            settings: Values by keyword.
            known: Keywords that a recipe may set; by default all parameters of `make`.

        Raises:
            ConnectionError: If `make` sets up the process group, and this rank cannot join it.
            RecipeError: If a key is unknown or missing, or `make` raises an error about a value.
        """
        keywords = keywords_of(make)
        settings = without_nulls(make, settings)
        self.kept(path, settings, keywords if known is None else known)
        for name, is_required in keywords.items():
            if is_required and name not in settings:
                raise self.document.error((*path, name), _IS_MISSING)
        for name, value in settings.items():
            self.check_type((*path, name), make, name, value)
        try:
            return make(**settings)
        except RecipeError:
            raise
        except REFUSALS as error:
            if (failure := start_failure(error)) is not None:
                raise failure from error
            # Call `make` again only after an error that a setting must have caused. After any other
            # error the other processes may not call `make` again, but `make` may wait for them, for
            # example to set up the process group.
            is_by_settings = not isinstance(error, (MemoryError, OSError, RuntimeError))
            retry = (lambda others: make(**others)) if is_by_settings else None
            raise self.refusal(path, settings, error, retry) from error

    def own_type(self, path: Path, settings: Mapping[str, Any], kind: OwnKind) -> OwnType | None:
        """Return the class or function of the user's own that a section names by its ``type``.

        Args:
            path: Path of the section.
            settings: Content of the section.
            kind: What the section accepts.

        Returns:
            The class or function; without it, if the recipe may not run code, which is noted in
            `unchecked`. ``None`` if the section names none.

        Raises:
            RecipeError: If the class or function is missing or of the wrong kind.
        """
        name = settings.get("type")
        if not is_own(name):
            return None
        others = {key: value for key, value in settings.items() if key != "type"}
        at = (*path, "type")
        if (given := self.code.given.get(path)) is not None:
            return OwnType(str(name), given, others)
        if str(name).startswith(OBJECT):
            says = "must be passed to run_recipe again, by the program that started the run"
            raise self.document.error(at, f"{says}, got {name!r}")
        if not self.code.is_allowed:
            self.unchecked[at] = str(name)
            return OwnType(str(name), None, others)
        return OwnType(str(name), self.code.load(self.document, at, str(name), kind), others)

    def checked_arguments(
        self,
        path: Path,
        make: Callable[..., Any],
        settings: Mapping[str, Any],
        *,
        num_passed: int = 0,
        implied: Collection[str] = (),
    ) -> dict[str, Any]:
        """Check arguments against the signature of a class or function, without a call of it.

        A value gets the type that the signature declares: a string becomes a ``pathlib.Path`` or a
        member of an enumeration, a mapping a dataclass, and a list a tuple or a set.

        Args:
            path: Path of the section.
            make: Class or function.
            settings: Values by keyword.
            num_passed: Number of leading arguments that mfwrap passes.
            implied: Keywords that mfwrap sets if the recipe does not.

        Returns:
            The arguments by keyword.

        Raises:
            RecipeError: If a key is unknown or missing, or a value does not have the type that the
                signature declares.
        """
        try:
            keywords = dict([*keywords_of(make).items()][num_passed:])
        except ValueError as error:
            raise self.document.error((*path, "type"), f"has no signature: {error}") from error
        if not takes_any(make):
            self.kept(path, settings, {*keywords, "type"})
        for name, is_required in keywords.items():
            if is_required and name not in settings and name not in implied:
                raise self.document.error((*path, name), _IS_MISSING)
        return {
            name: self._converted((*path, name), make, name, value)
            for name, value in settings.items()
        }

    def call(self, path: Path, make: Callable[..., T], /, *args: Any, **settings: Any) -> T:
        """Call a class or function of the user's own once, and convert its error.

        Args:
            path: Path of the section.
            make: Class or function to call.
            args: Positional arguments.
            settings: Arguments by keyword.

        Raises:
            RecipeError: If the call raises an error.
        """
        try:
            return make(*args, **settings)
        except RecipeError:
            raise
        except Exception as error:  # code of the user's own may raise anything
            raise self.refusal(path, settings, error) from error

    def choice(self, path: Path, value: object, known: Collection[str]) -> str:
        """Return a value if it is one of the known names, else raise `RecipeError`."""
        if not isinstance(value, str) or value not in known:
            similar = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
            suggestion = f"; did you mean {similar[0]!r}?" if similar else ""
            says = f"expected one of {sorted(known)}, got {shown(value)}{suggestion}"
            raise self.document.error(path, says)
        return value

    def named_type(
        self, path: Path, settings: Mapping[str, Any], known: Collection[str]
    ) -> tuple[str, dict[str, Any]]:
        """Return the ``type`` of a section, and its other settings.

        Args:
            path: Path of the section.
            settings: Content of the section.
            known: Names that ``type`` may have.

        Raises:
            RecipeError: If ``type`` is missing or is not one of the names. If another key may be a
                misspelled ``type``, the error names that key.
        """
        others = {key: value for key, value in settings.items() if key != "type" or value}
        if "type" not in others:
            for misspelled in difflib.get_close_matches("type", others, n=1):
                raise self.document.unknown_key((*path, misspelled), ["type"])
            says = f"{_IS_MISSING}; expected one of {sorted(known)}"
            raise self.document.error((*path, "type"), says)
        return self.choice((*path, "type"), others.pop("type"), known), others

    def kept(
        self,
        path: Path,
        settings: Mapping[str, Any],
        known: Collection[str],
        meaningless: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the settings that have an effect, and note the others in `without_meaning`.

        Args:
            path: Path of the section.
            settings: Values by key.
            known: Keys that have an effect.
            meaningless: Keys of MindFormers that have no effect.

        Raises:
            RecipeError: If a key is neither in `known` nor in `meaningless`.
        """
        kept = {}
        for key, value in settings.items():
            if key in known:
                kept[key] = value
            elif key in meaningless:
                self.without_meaning.append(".".join(map(str, (*path, key))))
            else:
                raise self.document.unknown_key((*path, key), known)
        return kept

    def check_type(self, path: Path, owner: Any, name: str, value: Any) -> None:
        """Raise `RecipeError` if a value does not have the type of its field in a dataclass.

        Args:
            path: Path of the value.
            owner: Class or function that takes the value. If `owner` is not a dataclass, the value
                is not checked.
            name: Name of the field.
            value: The value.
        """
        if is_dataclass(owner):
            self._converted(path, owner, name, value)

    def _converted(self, path: Path, owner: Any, name: str, value: Any) -> Any:
        adapter = _field_adapter(owner, name)
        if adapter is None:
            return value
        try:
            found = adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            raise self._invalid(path, value, error, None) from error
        # For Iterable, pydantic makes an iterator, which could be read only once.
        return value if isinstance(found, Iterator) else found

    def check_folder(self, path: Path, value: object) -> None:
        """Raise `RecipeError` if a path is not a writable folder and cannot become one.

        Args:
            path: Path of the value in the recipe.
            value: Path of a folder, which may be missing. ``None`` is accepted.
        """
        if value is None:
            return
        folder = pathlib.Path(str(value)).absolute()
        try:
            # Use `lexists`: for a link whose target is missing, `exists` returns False.
            existing = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
            if existing.is_dir():
                check_writable(existing)
                return
            says = f"{str(existing)!r} is not a folder"
        except OSError as error:  # also for a name that is longer than the file system allows
            says = str(error.strerror)
        expected = "expected a writable folder, or a path where one can be made"
        raise self.document.error(path, f"{expected}, got {shown(value)}: {says}")

    def refusal(
        self,
        path: Path,
        settings: Mapping[str, Any],
        error: Exception,
        retry: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> RecipeError:
        """Convert an error of a constructor to a `RecipeError` that names the key and its place.

        A key is named only if it is certain to be the cause: if the message begins with the key in
        backticks, if the value of the key is the file that cannot be read or written, or if the
        construction succeeds without the key. Otherwise the error names the section.

        Args:
            path: Path of the section.
            settings: Arguments of the constructor.
            error: Error that the constructor raised.
            retry: Function that calls the constructor with some of the settings; ``None`` if the
                constructor must not be called again.
        """
        text = one_line(str(error)) or type(error).__name__
        named = _NAMED_FIRST.fullmatch(text)
        if named is not None and named["key"].split(".")[0] in settings:
            return self.document.error((*path, *named["key"].split(".")), named["says"])
        key = _of_file(settings, error)
        if key is None and retry is not None:
            key = _cause(settings, text, retry)
        if key is not None:
            return self.document.error((*path, key), f"invalid: {text[:300]}")
        failed = f"failed with {type(error).__name__}{self.code.place_of(error)}"
        return self.document.error(path, f"{failed}: {text[:300]}")

    def _invalid(
        self, path: Path, value: Any, error: ValidationError, section: type[Any] | None
    ) -> RecipeError:
        # Report an unknown key first: if it is a misspelled required key, pydantic also reports the
        # required key as missing.
        problems = sorted(
            error.errors(include_url=False), key=lambda each: each["type"] not in _UNKNOWN_KEY
        )
        problem = problems[0]
        at = _existing(problem["loc"], value)
        if problem["type"] in _UNKNOWN_KEY:
            known = {f.name for f in fields(section)} if section is not None else set()
            return self.document.unknown_key((*path, *at), known)
        if problem["type"] in _MISSING:
            return self.document.error((*path, *problem["loc"]), _IS_MISSING)
        if problem["type"] == "value_error":
            inner = problem["ctx"]["error"]
            settings = value if isinstance(value, dict) else {}
            return self.refusal((*path, *at), settings, inner)
        said = [
            each["msg"].removeprefix("Input should be ")
            for each in problems
            if _existing(each["loc"], value) == at
        ]
        wanted = " or ".join(dict.fromkeys(_PLAIN_TYPES.get(words, words) for words in said))
        got = functools.reduce(lambda inner, key: inner[key], at, value)
        return self.document.error((*path, *at), f"expected {wanted}, got {shown(got)}")


def without_nulls(owner: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without nulls that mean nothing: such a setting has its default instead.

    A null is kept if ``None`` is a value of the setting, such as ``max_consecutive_skips``, or if
    the setting is required or unknown.

    Args:
        owner: Class or function that takes the settings.
        settings: Values by keyword.
    """
    parameters = inspect.signature(owner).parameters

    def is_removed(name: str) -> bool:
        parameter = parameters.get(name)
        if settings[name] is not None or parameter is None or parameter.default is None:
            return False
        return parameter.default is not parameter.empty and not _takes_none(parameter.annotation)

    return {name: value for name, value in settings.items() if not is_removed(name)}


def _takes_none(annotation: Any) -> bool:
    """Return whether ``None`` is a value of a type, or the type is unknown."""
    if isinstance(annotation, str):
        return re.search(r"\b(None|Optional|Any)\b", annotation) is not None
    return annotation in {Any, inspect.Parameter.empty} or type(None) in get_args(annotation)


def _of_file(settings: Mapping[str, Any], error: Exception) -> str | None:
    """Return the key whose value is the file in an `OSError`; ``None`` if there is no such key."""
    file = getattr(error, "filename", None)
    if not isinstance(error, OSError) or file is None:
        return None
    keys = [
        key
        for key, value in settings.items()
        if str(file) in (value if isinstance(value, list) else [value])
    ]
    return keys[0] if len(keys) == 1 else None


def _cause(
    settings: Mapping[str, Any], text: str, retry: Callable[[Mapping[str, Any]], object]
) -> str | None:
    """Return the key without which a failed construction succeeds; ``None`` if it is uncertain.

    If the construction succeeds without any one of several keys, the key that the message names
    counts, the longest first, or else the key whose value the message contains.
    """

    def is_cause(key: str) -> bool:
        try:
            retry({other: value for other, value in settings.items() if other != key})
        except Exception:  # noqa: BLE001  (an optimizer of the user's own may raise anything)
            return False
        return True

    places = {key: _position(text, str(value)) for key, value in settings.items() if value}
    mentioned = sorted((key for key in settings if _position(text, key) >= 0), key=len)[::-1]
    mentioned += sorted((key for key in places if places[key] >= 0), key=places.__getitem__)
    for key in dict.fromkeys(mentioned):
        if is_cause(key):
            return key
    causes = [key for key in settings if key not in mentioned and is_cause(key)]
    return causes[0] if len(causes) == 1 else None


def _position(text: str, word: str) -> int:
    """Return the position of a whole word in a text; -1 if the text does not contain it."""
    found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    return -1 if found is None else found.start()


@functools.cache
def _adapter(section: Any) -> TypeAdapter[Any]:
    return TypeAdapter(section)


@functools.cache
def _field_adapter(owner: Any, name: str) -> TypeAdapter[Any] | None:
    try:
        is_plain = isinstance(owner, type) and not is_dataclass(owner)
        hint = get_type_hints(owner.__init__ if is_plain else owner).get(name)
        return None if hint is None else TypeAdapter(hint)
    except (AttributeError, NameError, TypeError, PydanticSchemaGenerationError):
        return None  # pydantic does not know the type; the class checks the value itself


def keywords_of(make: Callable[..., Any]) -> dict[str, bool]:
    """Return the keywords of a callable, and whether each is required."""
    return {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    }


def takes_any(make: Callable[..., Any]) -> bool:
    """Return whether a callable takes keywords that its signature does not name."""
    kinds = {parameter.kind for parameter in inspect.signature(make).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def taken(make: Callable[..., Any], names: Collection[str]) -> list[str]:
    """Return the names that a callable has as keywords."""
    return [name for name in keywords_of(make) if name in names]


def _existing(location: tuple[str | int, ...], value: Any) -> Path:
    """Return the longest leading part of pydantic's `location` that is a path in `value`.

    For a union, pydantic appends the name of the type to the location. That name is not a key of
    the recipe.
    """
    path: list[str | int] = []
    for part in location:
        if isinstance(value, dict) and part in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            break
        path.append(part)
    return tuple(path)
