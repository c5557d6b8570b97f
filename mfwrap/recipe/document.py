"""Reading a recipe's YAML: plain values only, and where each of them stands."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

import yaml

__all__ = ["Path", "RecipeDocument", "RecipeError", "nearest"]

Path = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""

_MAX_VALUES = 10_000
"""More than any recipe has; aliases of aliases can make a short file endless."""

_MAX_DEPTH = 50
"""Deeper than any recipe; an alias may lie within what it names."""


class RecipeError(ValueError):
    """What is wrong with a recipe, and where, in one line."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: ``3e-4`` is a number, ``no`` and ``2026-01-01`` are strings."""


_TAG = "tag:yaml.org,2002:"
_KINDS = {"map", "seq", "str", "int", "float", "bool", "null"}
_Loader.yaml_implicit_resolvers = {}
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


@final
@dataclasses.dataclass(frozen=True)
class RecipeDocument:
    """A recipe as it was written.

    Args:
        name: Name of the file, for errors.
        data: What it says: mappings, lists, strings, numbers, bools and ``None``.
        places: Where each value stands: ``line 3``, or the override that set it.
    """

    name: str
    data: dict[str, Any]
    places: Mapping[Path, str]

    @classmethod
    def parse(cls, text: str, name: str) -> "RecipeDocument":
        """Read YAML.

        Raises:
            RecipeError: If it is no YAML mapping, has a key twice, or a tag that is not plain.
        """
        places: dict[Path, str] = {}
        root = _composed(text, name)
        data = _Reader(name, places).value(root, ()) if root is not None else {}
        if not isinstance(data, dict):
            msg = f"{name}: must be a mapping of sections, got a {type(data).__name__}"
            raise RecipeError(msg)
        return cls(name, data, places)

    def overridden(self, overrides: Iterable[str]) -> "RecipeDocument":
        """Return the document with values replaced.

        Args:
            overrides: ``section.key=value`` each, the value in YAML; a number is a list's index.

        Raises:
            RecipeError: If one has another form, or leads into a value that is no mapping.
        """
        document = self
        for override in overrides:
            document = document._with(override)
        return document

    def _with(self, override: str) -> "RecipeDocument":
        dotted, separator, text = override.partition("=")
        if not separator or not all(dotted.split(".")):
            msg = f"--set: must be key=value with a dotted key, got {override!r}"
            raise RecipeError(msg)
        place = f"--set {dotted}"
        root = _composed(text, place)
        read: dict[Path, str] = {}
        value = None if root is None else _Reader(place, read).value(root, ())
        path, data = _replaced(self.data, dotted.split("."), value, place)
        kept = {p: at for p, at in self.places.items() if p[: len(path)] != path}
        made = {path[:length]: place for length in range(1, len(path) + 1)}
        return RecipeDocument(self.name, data, made | kept | {path: place})

    def place(self, path: Path) -> str:
        """Return where a value stands, or what is nearest around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return ""

    def error(self, path: Path, says: str) -> RecipeError:
        """Return the error about a value; `says` follows its dotted name."""
        place = self.place(path)
        return RecipeError(
            f"{self.name}{', ' if place else ''}{place}: `{dotted_name(path)}` {one_line(says)}"
        )

    def unknown_key(self, path: Path, known: Collection[str]) -> RecipeError:
        """Return the error about a key that nobody knows, with the nearest one that is known."""
        *section, key = path
        where = f"a key of `{dotted_name(tuple(section))}`" if section else "a section of a recipe"
        guess = nearest(str(key), known)
        hint = f"did you mean `{guess}`?" if guess else f"known are {sorted(known)}"
        return self.error(path, f"is not {where}; {hint}")


def dotted_name(path: Path) -> str:
    """Return a path as one writes it: ``callbacks.0.type``."""
    return ".".join(str(part) for part in path)


def one_line(message: str) -> str:
    """Return a message without line breaks."""
    return " ".join(message.split())


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like `name`, if one is like it at all."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return found[0] if found else None


def _composed(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        what = one_line(" ".join(filter(None, (error.context, error.problem))))
        msg = f"{name}{line}: must be YAML, got what is none: {what}"
        raise RecipeError(msg) from error
    except yaml.YAMLError as error:
        msg = f"{name}: must be YAML, got what is none: {one_line(str(error))}"
        raise RecipeError(msg) from error


@final
class _Reader:
    """Turns nodes into values and notes their lines.

    Args:
        name: Of the file, for errors.
        places: Gets the place of each value.
    """

    def __init__(self, name: str, places: dict[Path, str]) -> None:
        self._name = name
        self._places = places
        self._constructor = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of a node."""
        self._places.setdefault(path, f"line {node.start_mark.line + 1}")
        if len(path) > _MAX_DEPTH:
            raise self._error(node, f"is nested deeper than {_MAX_DEPTH} levels")
        if len(self._places) > _MAX_VALUES:
            raise self._error(node, f"has more than {_MAX_VALUES} values, aliases counted")
        if node.tag.removeprefix(_TAG) not in _KINDS:
            raise self._error(node, f"has the tag {node.tag}, which is not read")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(one, (*path, index)) for index, one in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        written: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key in written:
                raise self._error(
                    key_node, f"has the key `{key}` twice, first in line {written[key]}"
                )
            written[key] = line
        self._flatten(node)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            self._places[(*path, key)] = f"line {key_node.start_mark.line + 1}"
            mapping[key] = self.value(value_node, (*path, key))
        return mapping

    def _flatten(self, node: yaml.MappingNode) -> None:
        try:
            self._constructor.flatten_mapping(node)
        except yaml.constructor.ConstructorError as error:
            raise self._error(node, f"has a wrong merge: {error.problem}") from error

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "has a key that is no string")
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
            raise self._error(node, f"has {text!r}, which is no {kind}") from error
        if kind == "bool":
            return text.lower() == "true"
        return None if kind == "null" else str(text)

    def _error(self, node: yaml.Node, says: str) -> RecipeError:
        return RecipeError(f"{self._name}, line {node.start_mark.line + 1}: {says}")


def _replaced(
    data: dict[str, Any], keys: list[str], value: Any, place: str
) -> tuple[Path, dict[str, Any]]:
    """Return the path of the keys and a copy of `data` with the value there."""
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
            msg = f"{place}: `{dotted_name(tuple(path))}` must be a mapping, got {below!r}"
            raise RecipeError(msg)
        inner[at] = {} if below is None else below.copy()
        inner = inner[at]
    return tuple(path), changed


def _position(container: Any, key: str, place: str) -> str | int:
    if isinstance(container, dict):
        return key
    if not key.isdecimal() or int(key) >= len(container):
        msg = f"{place}: {key!r} must be an index below {len(container)} of a list"
        raise RecipeError(msg)
    return int(key)
