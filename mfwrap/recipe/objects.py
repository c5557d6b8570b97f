"""From a recipe's plain values to checked objects."""

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, final, get_type_hints

from datasets.exceptions import DatasetsError
from huggingface_hub.errors import StrictDataclassError
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from mfwrap.recipe.document import Path, RecipeDocument, RecipeError, one_line

__all__ = ["REFUSALS", "RecipeObjects"]

T = TypeVar("T")

REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    DatasetsError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What constructors of other libraries raise about arguments."""

_NAMED_FIRST = re.compile(r"`(?P<key>\w[\w.]*)` (?P<says>.*)")
_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}
_MISSING = {"missing", "missing_argument", "missing_keyword_only_argument"}


@final
class RecipeObjects:
    """Builds objects from the sections of a document.

    Args:
        document: Where the sections stand.
    """

    def __init__(self, document: RecipeDocument) -> None:
        self.document = document
        self.without_meaning: list[str] = []
        """Dotted names of MindFormers' keys that were read and have no meaning here."""

    def parse(self, path: Path, section: type[T], value: Any) -> T:
        """Return a section as its dataclass.

        Raises:
            RecipeError: If it does not fit.
        """
        try:
            # JSON, because strictly read Python values may be neither dataclasses nor tuples.
            adapter = _adapter(section)  # type: ignore[arg-type] # mypy: a class is not hashable
            parsed: T = adapter.validate_json(_as_json(value))
        except ValidationError as error:
            raise self._invalid(path, value, error, section) from error
        return parsed

    def build(
        self,
        path: Path,
        make: Callable[..., T],
        settings: Mapping[str, Any],
        *,
        hidden: Collection[str] = (),
        meaningless: Collection[str] = (),
        known: Collection[str] | None = None,
    ) -> T:
        """Return what `make` makes of settings as keywords.

        Args:
            path: Where the settings stand.
            make: A class or a function.
            settings: Values by keyword.
            hidden: Keywords that a recipe cannot give.
            meaningless: Keys that are MindFormers' own, noted and left out.
            known: Keywords of `make`, where its signature does not say.

        Raises:
            RecipeError: If a key is unknown or missing, or `make` refuses.
        """
        names = (set(_keywords(make)) if known is None else set(known)) - set(hidden)
        kept = self.kept(path, settings, names, meaningless)
        required = {name for name, needed in _keywords(make).items() if needed} - set(hidden)
        for name in sorted(required - kept.keys()):
            raise self.document.error((*path, name), "must be given, got nothing")
        for name, value in kept.items():
            self.check_type((*path, name), make, name, value)
        try:
            return make(**kept)
        except RecipeError:
            raise
        except REFUSALS as error:
            raise self.refusal(path, kept, error) from error

    def kept(
        self,
        path: Path,
        settings: Mapping[str, Any],
        known: Collection[str],
        meaningless: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the settings with meaning; note the others.

        Raises:
            RecipeError: If a key is neither known nor MindFormers'.
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
        """Raise `RecipeError` unless a value has the type of a dataclass's field."""
        if not is_dataclass(owner):
            return
        adapter = _field_adapter(owner, name)  # type: ignore[arg-type] # mypy: not hashable
        if adapter is None:
            return
        try:
            adapter.validate_json(_as_json(value), strict=True)
        except ValidationError as error:
            raise self._invalid(path, value, error, None) from error

    def refusal(self, path: Path, settings: Mapping[str, Any], error: Exception) -> RecipeError:
        """Return the error for what a constructor raised, at the key that it speaks of."""
        text = one_line(str(error)) or type(error).__name__
        named = _NAMED_FIRST.fullmatch(text)
        if named is not None and named["key"].split(".")[0] in settings:
            return self.document.error((*path, *named["key"].split(".")), named["says"])
        mentioned = [key for key in settings if _position(text, key) >= 0]
        if mentioned:
            path = (*path, max(mentioned, key=len))
        else:  # some name only the value
            places = {k: _position(text, str(v)) for k, v in settings.items() if v}
            named_values = [key for key, place in places.items() if place >= 0]
            path = (*path, *sorted(named_values, key=places.__getitem__)[:1])
        return self.document.error(path, f"was refused: {text[:300]}")

    def _invalid(
        self, path: Path, value: Any, error: ValidationError, section: type[Any] | None
    ) -> RecipeError:
        # A misspelt key is the reason why another one is missing.
        problems = sorted(
            error.errors(include_url=False), key=lambda one: one["type"] not in _UNKNOWN_KEY
        )
        problem = problems[0]
        at = _existing(problem["loc"], value)
        if problem["type"] in _UNKNOWN_KEY:
            known = {f.name for f in fields(section)} if section is not None else set()
            return self.document.unknown_key((*path, *at), known)
        if problem["type"] in _MISSING:
            return self.document.error((*path, *problem["loc"]), "must be given, got nothing")
        if problem["type"] == "value_error":
            inner = problem["ctx"]["error"]
            settings = value if isinstance(value, dict) else {}
            return self.refusal((*path, *at), settings, inner)
        wanted = dict.fromkeys(
            one["msg"].removeprefix("Input should be ")
            for one in problems
            if _existing(one["loc"], value) == at
        )
        got = _found(value, at)
        return self.document.error((*path, *at), f"must be {' or '.join(wanted)}, got {got!r:.80}")


def _position(text: str, word: str) -> int:
    """Return where a word stands in a text; -1 if it does not."""
    found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    return -1 if found is None else found.start()


def _as_json(value: Any) -> str:
    return json.dumps(value)


@cache
def _adapter(section: Any) -> TypeAdapter[Any]:
    return TypeAdapter(section)


@cache
def _field_adapter(owner: Any, name: str) -> TypeAdapter[Any] | None:
    try:
        hint = get_type_hints(owner).get(name)
        return None if hint is None else TypeAdapter(hint)
    except (NameError, TypeError, PydanticSchemaGenerationError):
        return None  # a type that cannot be read; the class itself has the say


def _keywords(make: Callable[..., Any]) -> dict[str, bool]:
    """Return the keywords of a callable, and whether each must be given."""
    return {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    }


def _existing(location: tuple[str | int, ...], value: Any) -> Path:
    """Return as much of a location as leads to a value; the rest are names of types."""
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


def _found(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value
