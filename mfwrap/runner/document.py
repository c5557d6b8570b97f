"""Read a recipe's YAML as plain values, and remember the place of each value."""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

import yaml

from mfwrap.names import hint
from mfwrap.records.secret_keys import find_secret, is_secret
from mfwrap.runner.terminal import printable

Path = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""


RECIPE_FILE = "recipe.yaml"
"""File in a run folder with the recipe of the run."""

_MAX_BYTES = 256 * 1024
"""Limit above the size of any recipe. PyYAML needs about a second for a file of this size."""

_MAX_MESSAGE = 1_000
"""Maximum length of an error message, which may contain values of the recipe."""


class RecipeError(ValueError):
    """A recipe is invalid: ``recipe.yaml:3: training.seed: expected ..., got ...``.

    The message is one line of printable text. The place is the file and line number, or the
    override that set the value.

    Args:
        message: What is wrong and where. Line breaks become spaces, and characters that cannot be
            printed are escaped. A message is cut off after 1,000 characters.
    """

    def __init__(self, message: str) -> None:
        text = one_line(message)
        super().__init__(text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ...")


def read_text(path: str | pathlib.Path) -> str:
    """Return the text of a recipe's file.

    Raises:
        RecipeError: If the file cannot be read as UTF-8, or is larger than 256 KiB.
    """
    try:
        with pathlib.Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        text = content[:_MAX_BYTES].decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        msg = f"{path}:{line}: expected UTF-8, got the byte 0x{content[error.start]:02x}"
        raise RecipeError(msg) from error
    except OSError as error:
        msg = f"{path}: cannot read the recipe: {error}"
        raise RecipeError(msg) from error
    if len(content) > _MAX_BYTES:
        msg = f"{path}: expected a recipe of at most {_MAX_BYTES // 1024} KiB, got more"
        raise RecipeError(msg)
    return text


@final
@dataclasses.dataclass(frozen=True)
class RecipeDocument:
    """A recipe as plain values, before its sections are checked.

    Raises:
        RecipeError: If the recipe holds a password or an access token.
    """

    name: str
    """Name of the file, for error messages."""

    data: dict[str, Any]
    """Sections: mappings, lists, strings, numbers, bools and ``None``."""

    places: Mapping[Path, str]
    """Place of each value: ``recipe.yaml:3``, or ``--set key`` of the override that set it."""

    def __post_init__(self) -> None:
        """Refuse passwords and access tokens."""
        found = find_secret(self.data)
        if found is not None:
            says = (
                "expected no secret in a recipe, because recipes and training arguments are "
                "written to disk; log in with `hf auth login`, or set an environment variable "
                "such as HF_TOKEN, and leave the key out"
            )
            raise self.error(found, says)

    @classmethod
    def parse(cls, text: str, name: str) -> "RecipeDocument":
        """Parse the YAML text of a recipe.

        Args:
            text: The YAML text.
            name: Name of the file, for error messages.

        Raises:
            RecipeError: If the text is not a YAML mapping, repeats a key, holds a secret, or has a
                tag for a value that is not plain, such as ``!!binary``. Also if it has more than 50
                nested levels, or more than 10,000 keys and values after aliases and merge keys are
                expanded.
        """
        places: dict[Path, str] = {}
        data = _read(text, name, places, (), empty={})
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
        check_override(override)
        dotted, _, text = override.partition("=")
        keys = dotted.split(".")
        place = f"--set {_dotted(tuple(keys))}"
        if len(text) > _MAX_BYTES:
            msg = f"{place}: expected a value of at most {_MAX_BYTES} characters, got more"
            raise RecipeError(msg)
        value = _read(text, place, {}, tuple(keys), empty=None)
        path, data = _replaced(self.data, keys, value, place)
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
        """Return an error about a value: ``recipe.yaml:3: training.seed: expected ...``.

        Args:
            path: Keys that lead to the value.
            says: What is expected and what was found.
        """
        return RecipeError(_message(self.place(path), path, says))

    def unknown_key(self, path: Path, known: Collection[str]) -> RecipeError:
        """Return an error about an unknown key that suggests the most similar known key."""
        kind = "key" if len(path) > 1 else "section"
        return self.error(path, f"unknown {kind}{hint(path[-1], known)}")


def check_override(override: str) -> None:
    """Raise `RecipeError` unless an override has the form ``section.key=value``."""
    dotted, separator, _ = override.partition("=")
    keys = dotted.split(".")
    if not separator or not all(keys) or len(keys) > _MAX_DEPTH:
        # The message leaves out the value, which may be a secret.
        got = shown(f"{dotted}{separator}{'...' if separator else ''}")
        msg = f"--set: expected section.key=value, got {got}"
        raise RecipeError(msg)


def one_line(message: str) -> str:
    """Return a message without line breaks, with characters that cannot be printed escaped."""
    return printable(" ".join(message.split()))


_MAX_SHOWN = 80


def shown(value: object) -> str:
    """Return a value as it is shown in an error message, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _message(place: str, path: Path, says: str) -> str:
    """Return ``place: section.key: says``; the key is left out if the place names it."""
    key = _dotted(path)
    if not key or place == f"--set {key}":
        return f"{place}: {says}"
    return f"{place}: {key}: {says}"


def _dotted(path: Path) -> str:
    return ".".join(str(key)[:_MAX_SHOWN] for key in path)


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
            raise RecipeError(
                _message(place, tuple(path), f"expected a mapping, got {shown(below)}")
            )
        inner[at] = {} if below is None else below.copy()
        inner = inner[at]
    return tuple(path), changed


def _position(container: Any, key: str, place: str) -> str | int:
    if isinstance(container, dict):
        return key
    # The limit of nine digits keeps `int` from refusing a number of thousands of digits.
    if not key.isdecimal() or len(key) > 9 or int(key) >= len(container):
        msg = f"{place}: expected an index below {len(container)} for this list, got {shown(key)}"
        raise RecipeError(msg)
    return int(key)


_MAX_VALUES = 10_000
"""Limit above the size of any recipe. Without it, aliases of aliases, or merges of merges, could
expand a short file to billions of values."""

_MAX_DEPTH = 50
"""Limit above the depth of any recipe. Without it, thousands of brackets would exhaust Python's
stack, and an alias inside the value that it refers to would nest without end."""

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_SCALARS = {
    "str": "text without zero bytes and halves of surrogate pairs",
    "int": "an integer of at most 64 bits",
    "float": "a value of type float",
    "bool": "a value of type bool",
    "null": "a value of type null",
}
"""What a scalar of each type must be, for error messages."""


class _Loader(yaml.SafeLoader):
    """Read plain values by YAML 1.2: ``3e-4`` is a number, ``no`` and ``2026-01-01`` are text.

    Args:
        text: The YAML text.
        name: Name of the file, for error messages.
        places: Receives the place of each value.
    """

    def __init__(self, text: str, name: str, places: dict[Path, str]) -> None:
        super().__init__(text)
        self._name = name
        self._places = places
        self._depth = 0
        self._nodes = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node; PyYAML calls this method again for each node inside it.

        Raises:
            RecipeError: If the node is nested too deeply, or is one of too many.
        """
        self._depth += 1
        self._nodes += 1
        # The number of nodes also bounds the pairs that `flatten_mapping` copies for one mapping.
        if self._depth > _MAX_DEPTH or self._nodes > _MAX_VALUES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # (a stub without types)
            raise self._limit_error(mark, (), is_deep=self._depth > _MAX_DEPTH)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping.

        Raises:
            RecipeError: If a key is not a scalar, or is repeated.
        """
        node = super().compose_mapping_node(anchor)
        places: dict[str, str] = {}
        for key, _ in node.value:
            mark = key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(mark, (), "expected a string as key, got a list or mapping")
            if key.value in places and key.tag != _MERGE:
                says = f"the key {shown(key.value)} is repeated; it was first set at"
                raise self._error(mark, (), f"{says} {places[key.value]}")
            places[key.value] = self._place(mark)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace the merge keys (``<<``) of a mapping by the pairs of the merged mappings.

        A key of the mapping itself takes precedence, then the first of several merged mappings, as
        YAML specifies. The method of PyYAML 6.0.4 prefers the last merged mapping
        (https://github.com/yaml/pyyaml/issues/953).

        Raises:
            RecipeError: If a merge key has a value other than a mapping or a list of mappings.
        """
        pairs, node.value = node.value, []  # empty, so that a mapping can merge itself
        merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        for key, inner in pairs:
            if key.tag != _MERGE:
                continue
            for each in reversed(inner.value) if isinstance(inner, yaml.SequenceNode) else [inner]:
                if not isinstance(each, yaml.MappingNode):
                    says = f"expected a mapping or a list of mappings, got a {each.id}"
                    raise self._error(each.start_mark, ("<<",), says)
                self.flatten_mapping(each)
                merged |= {pair[0].value: pair for pair in each.value}
        own = {pair[0].value: pair for pair in pairs if pair[0].tag != _MERGE}
        node.value = list((merged | own).values())

    def value(self, node: yaml.Node, path: Path) -> Any:
        """Return the value of a node, and record its place."""
        self._places.setdefault(path, self._place(node.start_mark))
        self._values += 1
        if len(path) > _MAX_DEPTH or self._values > _MAX_VALUES:
            raise self._limit_error(node.start_mark, path, is_deep=len(path) > _MAX_DEPTH)
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            self.flatten_mapping(node)
            self._values += len(node.value)  # the keys
            mapping: dict[str, Any] = {}
            for key, inner in node.value:
                name = self._scalar(key, "str", path)
                self._places[(*path, name)] = self._place(key.start_mark)
                mapping[name] = self.value(inner, (*path, name))
            return mapping
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in _SCALARS:
            return self._scalar(node, kind, path)
        says = f"expected plain values, got the tag {node.tag}"
        raise self._error(node.start_mark, path, says)

    def _scalar(self, node: yaml.ScalarNode, kind: str, path: Path) -> Any:
        text = str(node.value)
        try:
            if kind == "str":
                if b"\0" not in text.encode():
                    return text
            elif kind == "int":
                number = int(text, 0 if text[:2] in {"0o", "0x"} else 10)
                if abs(number) < 2**63:
                    return number
            elif kind != "null" or text.lower() in {"", "~", "null"}:
                return self.construct_object(node)
        except (KeyError, ValueError):
            pass  # not of this type: the error below says what is expected
        got = shown("***" if is_secret(path) else text)
        raise self._error(node.start_mark, path, f"expected {_SCALARS[kind]}, got {got}")

    def _place(self, mark: yaml.Mark) -> str:
        return _place(self._name, mark.line)

    def _error(self, mark: yaml.Mark, path: Path, says: str) -> RecipeError:
        return RecipeError(_message(self._place(mark), path, says))

    def _limit_error(self, mark: yaml.Mark, path: Path, *, is_deep: bool) -> RecipeError:
        of = "nested levels" if is_deep else "keys and values with aliases and merge keys expanded"
        limit = _MAX_DEPTH if is_deep else _MAX_VALUES
        return self._error(mark, path, f"expected at most {limit} {of}, got more")


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


class _Dumper(yaml.SafeDumper):
    """Quote text that is a number, bool or date by YAML 1.2 or 1.1, so that any reader agrees."""


_Dumper.yaml_implicit_resolvers = {
    first: [
        *_Loader.yaml_implicit_resolvers.get(first, []),
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*_Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
}


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Unicode's line breaks would be read as spaces or "\n"; only double quotes escape them.
    style = '"' if any(character in text for character in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(data: Mapping[str, Any]) -> str:
    """Return plain values as YAML text from which `RecipeDocument.parse` reads the same values."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read(text: str, name: str, places: dict[Path, str], path: Path, *, empty: Any) -> Any:
    """Return the value of a YAML text, or `empty` for an empty text; fill `places`."""
    try:
        loader = _Loader(text, name, places)
        root = loader.get_single_node()
        return empty if root is None else loader.value(root, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = name if mark is None else _place(name, mark.line)
        what = " ".join(filter(None, (error.context, error.problem)))
        if r"'\t'" in what:
            what = f"{what}; indent lines with spaces, not with tabs"
        msg = f"{at}: invalid YAML: {what}"
        raise RecipeError(msg) from error
    except yaml.reader.ReaderError as error:
        at = _place(name, text.count("\n", 0, error.position))
        msg = f"{at}: invalid YAML: the character {chr(error.character)!r} is not allowed"
        raise RecipeError(msg) from error
    except RecipeError:
        raise
    except (OverflowError, ValueError) as error:
        # Raised by PyYAML itself for escapes such as "\UFFFFFFFF" and for long version numbers.
        msg = f"{name}: invalid YAML: {error}; expected escapes of at most \\U0010FFFF"
        raise RecipeError(msg) from error


def _place(name: str, line: int) -> str:
    """Return ``file:line`` for a line counted from 0; for an override, return `name` unchanged."""
    return name if name.startswith("--set ") else f"{name}:{line + 1}"
