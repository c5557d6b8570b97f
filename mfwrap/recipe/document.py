"""Read a recipe's YAML as plain values, and remember the place of each value."""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

import yaml

from mfwrap.names import hint

Path = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""


class RecipeError(ValueError):
    """A recipe is invalid. The message is one line that names the key, the problem and its place.

    The place is the file and line number, or the override that set the value.
    """


def read_text(path: str | pathlib.Path) -> str:
    """Return the text of a recipe's file.

    Raises:
        RecipeError: If the file cannot be read as UTF-8.
    """
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: cannot read the recipe: {error}"
        raise RecipeError(msg) from error


@final
@dataclasses.dataclass(frozen=True)
class RecipeDocument:
    """A recipe as plain values, before its sections are checked."""

    name: str
    """Name of the file, for error messages."""

    data: dict[str, Any]
    """Sections: mappings, lists, strings, numbers, bools and ``None``."""

    places: Mapping[Path, str]
    """Place of each value: ``recipe.yaml:3``, or ``--set key`` of the override that set it."""

    @classmethod
    def parse(cls, text: str, name: str) -> "RecipeDocument":
        """Parse the YAML text of a recipe.

        Args:
            text: The YAML text.
            name: Name of the file, for error messages.

        Raises:
            RecipeError: If the text is not a YAML mapping, repeats a key, or has a tag for anything
                but plain values, such as ``!!binary``.
        """
        places: dict[Path, str] = {}
        data = _read(text, name, places, empty={})
        if not isinstance(data, dict):
            msg = f"{name}: expected a mapping of sections, got a {type(data).__name__}"
            raise RecipeError(msg)
        return cls(name, data, places)

    def overridden(self, overrides: Iterable[str]) -> "RecipeDocument":
        """Return a copy of the document with values replaced.

        Args:
            overrides: Entries of the form ``section.key=value`` with the value in YAML. In a list,
                the key is the index of an item: ``callbacks.0.type=LossMonitor``.

        Raises:
            RecipeError: If an override has a different form, a key leads into a value that is
                neither a mapping nor a list, or a list has no item at an index.
        """
        document = self
        for override in overrides:
            document = document._with(override)
        return document

    def _with(self, override: str) -> "RecipeDocument":
        dotted, separator, text = override.partition("=")
        if not separator or not all(dotted.split(".")):
            msg = f"--set: expected section.key=value, got {override!r}"
            raise RecipeError(msg)
        place = f"--set {dotted}"
        value = _read(text, place, {}, empty=None)
        path, data = _replaced(self.data, dotted.split("."), value, place)
        kept = {p: at for p, at in self.places.items() if p[: len(path)] != path}
        made = {path[:length]: place for length in range(1, len(path) + 1)}
        return RecipeDocument(self.name, data, made | kept | {path: place})

    def place(self, path: Path) -> str:
        """Return the place of a value, or of the innermost section that should contain it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.name

    def error(self, path: Path, says: str) -> RecipeError:
        """Return an error about a value: ``training.seed: expected ... (recipe.yaml:3)``.

        Args:
            path: Keys that lead to the value.
            says: What is expected and what was found.
        """
        return RecipeError(f"{_dotted(path)}: {one_line(says)} ({self.place(path)})")

    def unknown_key(self, path: Path, known: Collection[str]) -> RecipeError:
        """Return an error about an unknown key that suggests the most similar known key."""
        kind = "key" if len(path) > 1 else "section"
        return self.error(path, f"unknown {kind}{hint(path[-1], known)}")


def one_line(message: str) -> str:
    """Return a message without line breaks."""
    return " ".join(message.split())


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _replaced(
    data: dict[str, Any], keys: list[str], value: Any, place: str
) -> tuple[Path, dict[str, Any]]:
    """Return the path of `keys`, and a copy of `data` with `value` at that path."""
    changed: Any = dict(data)
    path: list[str | int] = []
    inner = changed
    for depth, key in enumerate(keys):
        at = _position(inner, key, place)
        path.append(at)
        if depth == len(keys) - 1:
            inner[at] = value
            break
        below = inner[at] if isinstance(at, int) else inner.get(at)
        if below is not None and not isinstance(below, (dict, list)):
            msg = f"{_dotted(tuple(path))}: expected a mapping, got {below!r} ({place})"
            raise RecipeError(msg)
        inner[at] = {} if below is None else below.copy()
        inner = inner[at]
    return tuple(path), changed


def _position(container: Any, key: str, place: str) -> str | int:
    if isinstance(container, dict):
        return key
    if not key.isdecimal() or int(key) >= len(container):
        msg = f"{place}: expected an index below {len(container)} for this list, got {key!r}"
        raise RecipeError(msg)
    return int(key)


class _Loader(yaml.SafeLoader):
    """Load plain values by YAML 1.2: ``3e-4`` is a number, ``no`` and ``2026-01-01`` are text."""


_TAG = "tag:yaml.org,2002:"
_KINDS = {"map", "seq", "str", "int", "float", "bool", "null"}
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))

_MAX_VALUES = 10_000
"""Limit above the size of any recipe. Without it, aliases of aliases could expand a short file to
billions of values."""

_MAX_DEPTH = 50
"""Limit above the depth of any recipe. Without it, an alias inside the value that it refers to
would nest without end."""


def _read(text: str, name: str, places: dict[Path, str], *, empty: Any) -> Any:
    """Return the value of a YAML text, or `empty` for an empty text; fill `places`."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = name if mark is None else _place(name, mark.line)
        what = one_line(" ".join(filter(None, (error.context, error.problem))))
        msg = f"{at}: invalid YAML: {what}"
        raise RecipeError(msg) from error
    except yaml.YAMLError as error:
        msg = f"{name}: invalid YAML: {one_line(str(error))}"
        raise RecipeError(msg) from error
    return empty if root is None else _Reader(name, places).value(root, ())


def _place(name: str, line: int) -> str:
    """Return ``file:line`` for a line counted from 0; for an override, return `name` unchanged."""
    return name if name.startswith("--set ") else f"{name}:{line + 1}"


@final
class _Reader:
    """Convert YAML nodes to values, and record the place of each value.

    Args:
        name: Name of the file, for error messages.
        places: Receives the place of each value.
    """

    def __init__(self, name: str, places: dict[Path, str]) -> None:
        self._name = name
        self._places = places
        self._constructor = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of a node."""
        self._places.setdefault(path, self._place(node))
        if len(path) > _MAX_DEPTH:
            raise self._error(node, f"expected at most {_MAX_DEPTH} nested levels, got more")
        if len(self._places) > _MAX_VALUES:
            raise self._error(
                node, f"expected at most {_MAX_VALUES} values with aliases expanded, got more"
            )
        if node.tag.removeprefix(_TAG) not in _KINDS:
            raise self._error(node, f"expected plain values, got the tag {node.tag}")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        written: dict[str, str] = {}
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self._key(key_node)
            if key in written:
                says = f"the key {key!r} is repeated; it was first set at {written[key]}"
                raise self._error(key_node, says)
            written[key] = self._place(key_node)
        self._flatten(node)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            self._places[(*path, key)] = self._place(key_node)
            mapping[key] = self.value(value_node, (*path, key))
        return mapping

    def _flatten(self, node: yaml.MappingNode) -> None:
        """Replace merge keys (``<<``) with the keys of the merged mappings, in place."""
        try:
            self._constructor.flatten_mapping(node)
        except yaml.constructor.ConstructorError as error:
            raise self._error(node, f"invalid merge: {error.problem}") from error

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "expected a string as key, got a list or mapping")
        return str(node.value)

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text = node.value
        try:
            if kind == "int":
                return int(text, 0 if text[:2] in {"0o", "0x"} else 10)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError as error:
            raise self._error(node, f"expected a value of type {kind}, got {text!r}") from error
        if kind == "bool":
            return text.lower() == "true"
        return None if kind == "null" else str(text)

    def _place(self, node: yaml.Node) -> str:
        return _place(self._name, node.start_mark.line)

    def _error(self, node: yaml.Node, says: str) -> RecipeError:
        return RecipeError(f"{self._place(node)}: {says}")
