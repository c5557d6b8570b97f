"""Take the keys of a ``model_config`` one by one, and remember what became of each."""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn, final

from mfwrap.runner.document import Path, shown
from mfwrap.runner.mindformers.architectures.vocabulary import NO_EFFECT, VOCABULARY
from mfwrap.runner.mindformers.source import SourceFile


@final
class Keys:
    """The keys of a section of a MindFormers file that describe the model.

    A key whose value is ``None`` counts as missing.

    Args:
        source: The file, for losses, keys without effect and errors.
        section: Content of the section.
        path: Place of the section in the file.
    """

    def __init__(self, source: SourceFile, section: Mapping[str, Any], path: Path) -> None:
        self._source = source
        self._left = dict(section)
        self._path = path
        self._written: dict[str, str] = {}  # names in the file, by the usual name of the key

    def __contains__(self, key: str) -> bool:
        """Return whether a key has not been taken yet and is not ``None``."""
        return self._left.get(key) is not None

    def refuse(self, key: str, says: str) -> NoReturn:
        """Raise a `RecipeError` about a key."""
        raise self._source.document.error(self._place(key), says)

    def is_null(self, key: str) -> bool:
        """Return whether a key is set to ``None``, for which some keys have a meaning."""
        return key in self._left and self._left[key] is None

    def value(self, key: str, default: Any = None) -> Any:
        """Take a value of any type."""
        value = self._left.pop(key, None)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """Take an integer >= 1.

        Raises:
            RecipeError: If the value is none, or the key is missing and has no default.
        """
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, f"expected an integer >= 1, got {shown(value)}")
        return value

    def peek_size(self, key: str, default: int) -> int:
        """Return an integer >= 1 without taking it."""
        value = self._left.get(key)
        taken = self.size(key, default)
        self._left[key] = value
        return taken

    def merge(self, alias: str, name: str) -> None:
        """Give a key its usual name. Errors and losses keep the name in the file.

        Raises:
            RecipeError: If the key under its usual name has another value.
        """
        if alias not in self:
            return
        if name in self and self._left[name] != self._left[alias]:
            says = f"expected the same value as {name} ({shown(self._left[name])})"
            self.refuse(alias, f"{says}, got {shown(self._left[alias])}")
        self._left[name] = self._left.pop(alias)
        self._written[name] = alias

    def carried(self, names: Collection[str]) -> dict[str, Any]:
        """Take the keys in `names` with their values, in the file's order."""
        taken = [key for key in self._left if key in names and key in self]
        return {key: self._left.pop(key) for key in taken}

    def number(self, key: str, default: float) -> float:
        """Take a number, also one that YAML reads as a string (``1e-5``).

        Raises:
            RecipeError: If the value is no number.
        """
        value = self.value(key, default)
        number = value
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                number = float(value)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            self.refuse(key, f"expected a number, got {shown(value)}")
        return number

    def flag(self, key: str, *, default: bool) -> bool:
        """Take a boolean.

        Raises:
            RecipeError: If the value is no boolean.
        """
        value = self.value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"expected true or false, got {shown(value)}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Take a mapping with string keys.

        Raises:
            RecipeError: If the value is no mapping.
        """
        value = self.value(key, {})
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            self.refuse(key, f"expected a mapping, got {shown(value)}")
        return value

    def token_ids(self, vocab_size: int, **defaults: int) -> dict[str, Any]:
        """Take the ids of the special tokens.

        An id that no token can have is left out, or ``None`` if the key has a default.

        Args:
            vocab_size: Number of tokens.
            defaults: Ids for keys that are missing.
        """
        ids: dict[str, Any] = {}
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = self.value(key, defaults.get(key))
            numbers = value if isinstance(value, list) else [value]
            if value is None or (key == "pad_token_id" and isinstance(value, list)):
                continue
            if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
                self.refuse(key, f"expected the id of a token, got {shown(value)}")
            if all(0 <= number < vocab_size for number in numbers):
                ids[key] = value
            elif key in defaults:
                ids[key] = None
        return ids

    def is_equal(self, key: str, expected: object, says: str, name: str = "architecture") -> bool:
        """Take a value, and add a loss if it is set and differs from the only one that is possible.

        Args:
            key: The key.
            expected: Value that the recipe trains with.
            says: What the recipe trains instead of the value, without the value.
            name: Name of the loss.
        """
        value = self.value(key, expected)
        if value != expected:
            self.lose(name, key, f"the file sets {key}: {shown(value)}; {says}")
        return bool(value == expected)

    def lose_dropout(self, key: str, default: float = 0.0) -> None:
        """Take the rate of a dropout that transformers' model does not have."""
        rate = self.number(key, default)
        if rate:
            says = f"the file trains with {key}: {rate:g}; transformers' model has no such dropout"
            self.lose("dropout", key, says)

    def lose(self, name: str, key: str, says: str) -> None:
        """Add a loss."""
        self._source.lose(name, self._place(key), says)

    def move_biases(self, rate: float | None) -> None:
        """Note at which rate the model moves the biases of its experts; see `SourceFile`."""
        self._source.bias_rate = rate

    def drop(self, *keys: str) -> None:
        """Take keys that do not change the numbers of this model."""
        for key in keys:
            if self._left.pop(key, None) is not None:
                self._ignore(key)

    def unread(self, sizes: Mapping[str, object]) -> None:
        """Take size keys that MindFormers' class of this model ignores.

        Args:
            sizes: Key and the value that MindFormers trains with.

        Raises:
            RecipeError: If a key asks for another size.
        """
        for key, trained in sizes.items():
            value = self.value(key)
            if value is not None and value != trained:
                says = f"MindFormers ignores this key and trains with {shown(trained)}"
                self.refuse(key, f"{says}, got {shown(value)}; correct or remove it")
            if value is not None:
                self._ignore(key)

    def unknown(self, known: Collection[str]) -> list[str]:
        """Return the keys that were not taken, except those that do not change the numbers.

        Args:
            known: Keys that do not change the numbers, in addition to `NO_EFFECT`.
        """
        unknown: list[str] = []
        for key, value in self._left.items():
            if key == "seq_length":
                continue  # a key of the recipe's data
            if value is None or key in NO_EFFECT or key in known:
                self._ignore(key)
            else:
                unknown.append(key)
        return unknown

    def refuse_unknown(self, known: Collection[str] = ()) -> None:
        """Raise `RecipeError` if a key was not taken that no class of MindFormers reads.

        Args:
            known: More keys that do not change the numbers of this model.
        """
        for key in self.unknown({*VOCABULARY, *known}):
            self.refuse(key, "unknown key; no class of MindFormers reads it")

    def _ignore(self, key: str) -> None:
        """Note that a key does not change the numbers of this model."""
        self._source.without_effect.append(".".join(map(str, self._place(key))))

    def _place(self, key: str) -> Path:
        """Return the place of a key in the file."""
        return (*self._path, self._written.get(key, key))
