"""Read a MindFormers file key by key, and keep account of what became of each key."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, final

from mfwrap.runner.document import Path, RecipeDocument, shown
from mfwrap.runner.mindformers.losses import Loss

_ABSENT = (None, "", "None")
"""Values that count as a missing key. ``None`` without quotes is text in YAML."""


@final
class SourceFile:
    """A MindFormers file whose keys are taken one by one.

    Args:
        document: The file.

    Raises:
        RecipeError: If a key ``type`` has a value that is not a string.
    """

    def __init__(self, document: RecipeDocument) -> None:
        self.document = document
        self.losses: list[Loss] = []
        """What the recipe loses."""

        self.notes: list[str] = []
        """What the recipe does differently, one sentence each."""

        self.without_effect: list[str] = []
        """Dotted names of keys that do not change the numbers of a training."""

        self.bias_rate: float | None = None
        """Rate at which the model moves the biases of its experts; 0 if it has biases that only a
        callback with a rate of its own moves, ``None`` if it has none."""

        self._left: dict[str, Any] = _copied(document.data)
        self._check_types((), document.data)

    def __contains__(self, path: Path) -> bool:
        """Return whether the file has a value at a path."""
        return not _is_empty(_at(self.document.data, path))

    def take(self, *path: str) -> Any:
        """Take a value; ``None`` if it is missing, empty or has been taken before."""
        *outer, key = path
        holder = _at(self._left, tuple(outer))
        value = holder.pop(key, None) if isinstance(holder, dict) else None
        return None if _is_empty(value) else value

    def mapping(self, *path: str) -> dict[str, Any]:
        """Take a mapping; an empty one if it is missing.

        Raises:
            RecipeError: If the value is not a mapping.
        """
        value: dict[str, Any] = self._typed(path, dict, "a mapping", {})
        return value

    def integer(self, *path: str, default: int, minimum: int = 1) -> int:
        """Take an integer.

        Raises:
            RecipeError: If the value is not an integer, or is smaller than `minimum`.
        """
        named = f"an integer >= {minimum}"
        value: int = self._typed(path, int, named, default)
        if value < minimum:
            raise self.document.error(path, f"expected {named}, got {value}")
        return value

    def number(self, *path: str, default: float) -> float:
        """Take a number.

        Raises:
            RecipeError: If the value is not a number.
        """
        value: float = self._typed(path, (int, float), "a number", default)
        return value

    def flag(self, *path: str, default: bool = False) -> bool:
        """Take a boolean.

        Raises:
            RecipeError: If the value is not a boolean.
        """
        value: bool = self._typed(path, bool, "true or false", default)
        return value

    def text(self, *path: str) -> str | None:
        """Take a string; ``None`` if it is missing or empty.

        Raises:
            RecipeError: If the value is not a string.
        """
        value: str | None = self._typed(path, str, "a string", None)
        return value

    def lose(self, name: str, path: Path, says: str) -> None:
        """Add a loss; see `Loss`."""
        self.losses.append(Loss(name, path, says))

    def lose_biases_beside_adapter(self, rate: float | None) -> None:
        """Add a loss: checkpoints of an adapter have no biases of experts.

        Args:
            rate: Rate at which the file moves the biases; ``None`` if it does not.
        """
        if rate:
            says = f"the file moves biases of experts by {rate:g} and trains an adapter"
            self.lose("moe", ("model",), f"{says}; the recipe does not move them")

    def check_mappings(self, names: Iterable[str]) -> None:
        """Raise `RecipeError` if a section that the file has is not a mapping."""
        for name in names:
            value = self.document.data.get(name)
            if not (_is_empty(value) or isinstance(value, dict)):
                raise self.document.error((name,), f"expected a mapping, got {shown(value)}")

    def ignore(self, *path: str) -> None:
        """Take a value, if it is there, that does not change the numbers of a training."""
        holder = _at(self._left, path[:-1])
        if isinstance(holder, dict) and path[-1] in holder:
            del holder[path[-1]]
            self.without_effect.append(".".join(path))

    def ignore_keys(self, section: Path, keys: Collection[str]) -> None:
        """Take those keys of a section that are left and in `keys`; see `ignore`."""
        for key in list(_at(self._left, section) or {}):
            if key in keys:
                self.ignore(*map(str, section), key)

    def left(self, section: Path = ()) -> list[str]:
        """Return the keys of a section that have a value and have not been taken."""
        found = _at(self._left, section)
        if not isinstance(found, dict):
            return []
        return [key for key, value in found.items() if not _is_empty(value)]

    def refuse_left(self, section: Path, known: Collection[str] = ()) -> None:
        """Raise `RecipeError` if a key of a section has not been taken.

        Args:
            section: Path of the section.
            known: Keys that the section may have, for the suggestion.
        """
        for key in self.left(section):
            raise self.document.unknown_key((*section, key), known)

    def _typed(self, path: tuple[str, ...], kind: Any, named: str, default: Any) -> Any:
        value = self.take(*path)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.document.error(path, f"expected {named}, got {shown(value)}")
        return value

    def _check_types(self, path: Path, value: object) -> None:
        """Raise `RecipeError` for a key ``type`` whose value is not a string."""
        if path[-1:] == ("type",) and not isinstance(value, (str, NoneType)):
            raise self.document.error(path, f"expected a string, got {shown(value)}")
        for key, inner in _items(value):
            self._check_types((*path, key), inner)


def _items(value: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _at(value: Any, path: Path) -> Any:
    """Return the value at a path of keys; ``None`` if it is missing."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _is_empty(value: object) -> bool:
    """Return whether a value counts as missing, or is a mapping of such values."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return isinstance(value, (str, NoneType)) and value in _ABSENT


def _copied(value: Any) -> Any:
    """Return a copy in which no mapping is shared: an alias in YAML is one object in two places."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value
