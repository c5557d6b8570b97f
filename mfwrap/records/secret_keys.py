"""Find passwords and access tokens in settings, which must not be written to disk."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

_SECRET_KEY = re.compile(
    r"(.*_)?(password|passwd|passphrase|secret|credentials?|api_?key"
    r"|(access|auth|enc|encryption|private|secret|signing)_key)"
    r"|((.*_)?(access|api|auth|bearer|client|hf|hub|login|refresh|secret|session)_)?token"
)
"""Keys of secrets in lower case, such as ``hub_token``. Keys such as ``eos_token`` do not match."""

_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opsu]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16})\b"
    r"|://[^/\s:@]+:[^/\s@]+@"
)
"""Access tokens of common services, and a user name with a password in a URL."""

_ABSENT = {"", "None"}
"""Texts that stand for no value. MindFormers' files write ``None`` for null."""

_HIDDEN = "***"

_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-\s]")


def is_secret(path: tuple[str | int, ...]) -> bool:
    """Return whether the last key of a path is the name of a secret, such as ``hub_token``."""
    if not path:
        return False
    return _SECRET_KEY.fullmatch(_WORD_BREAK.sub("_", str(path[-1])).lower()) is not None


def find_secret(value: Any, path: tuple[str | int, ...] = ()) -> tuple[str | int, ...] | None:
    """Return the path of the first secret in a recipe's values; ``None`` if there is none.

    A value is a secret if its key is the name of a secret, or if it has the form of an access
    token. An empty string, null, true and false are accepted: they turn a setting on or off. So is
    the string ``None``.

    Args:
        value: Mappings, lists and plain values.
        path: Path of `value`.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in _ABSENT):
        return None
    if is_secret(path) or (isinstance(value, str) and _SECRET_VALUE.search(value)):
        return path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    found = (find_secret(inner, (*path, key)) for key, inner in items)
    return next((one for one in found if one is not None), None)


def without_secrets(value: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Return settings as plain values for JSON, with ``***`` in the place of each secret.

    Args:
        value: Mappings, lists and plain values; anything else becomes text.
        path: Path of `value`.
    """
    if isinstance(value, Mapping):
        return {str(key): without_secrets(inner, (*path, str(key))) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner, (*path, place)) for place, inner in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if is_secret(path) and str(value) not in _ABSENT:
        return _HIDDEN
    if isinstance(value, (int, float)):
        return value
    return _SECRET_VALUE.sub(_HIDDEN, str(value))


def command_without_secrets(words: Sequence[str]) -> str:
    """Return a command for a shell, with ``***`` in the place of each secret.

    Args:
        words: The command's words. The value of a secret is in the same word, as in
            ``--hub-token=hf_...``, or in the next one.
    """
    shown, is_next_secret = [], False
    for word in words:
        name, mark, value = word.partition("=")
        is_option = bool(mark) or word.startswith("-")
        is_named = is_option and is_secret((name.lstrip("-").rpartition(".")[2],))
        if is_next_secret and not word.startswith("-"):
            shown.append(_HIDDEN)
        elif is_named and mark and value:
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(_SECRET_VALUE.sub(_HIDDEN, word))
        is_next_secret = is_named and not mark
    return " ".join(word if word.endswith(_HIDDEN) else shlex.quote(word) for word in shown)
