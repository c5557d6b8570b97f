"""Find passwords and access tokens in settings, which must not be written to disk."""

import argparse
import dataclasses
import math
import re
import shlex
import types
from collections.abc import Mapping, Sequence
from typing import Any

_SECRET_KEY = re.compile(
    r"(.*_)?(passwords?|passwd|pwd|passphrase|passcode|secrets?|credentials?|authorization|cookie"
    r"|api_?keys?|(access|account|auth|aws|azure|client|comet|enc|encryption|hf|license|neptune"
    r"|openai|private|secret|service|shared|signing|ssh|storage|subscription|swanlab|wandb)_keys?)"
    r"|((.*_)?(access|api|auth|bearer|client|git|github|gitlab|hf|hub|login|refresh|secret|session"
    r"|slack|wandb)_)token|(.*_)?(access|api|auth|hf|hub)_tokens|token"
)
"""Keys of secrets in lower case, such as ``hub_token``. Keys such as ``eos_token`` do not match."""

_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|(sk|gsk|nvapi)-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|gl(agent|cbt|dt|feed|ffct|ft|imt|oas|pat|ptt|rt|rtr|soat|wt)-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|(AKIA|ASIA)[0-9A-Z]{16}|(npm|r8)_[A-Za-z0-9]{20,}"
    r"|pypi-AgEI[\w-]{16,}|ya29\.[\w-]{16,}"
    r"|dckr_[a-z]{2,4}_[\w-]{16,}|[rs]k_(live|test)_[A-Za-z0-9]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|://[^/\s:@]+:[^/\s@]*@|(?<=https)://[^/\s@]+@|(?<=http)://[^/\s@]+@"
    r"|(?<=hooks\.slack\.com/)services/[\w/]+"
    r"|(?<=[?&])(?i:(access|api|auth|private)_?(token|key)|token|password|secret|sig(nature)?)"
    r"=[^&\s'\"]+"
    r"|(?i:\bauthorization\s*[:=]\s*(\w+\s+)?[^\s'\"]+|\bbearer\s+(?=\S*\d)[\w.~+/-]{8,}=*"
    r"|\b(x-api-key|private-token)\s*[:=]\s*[^\s'\"]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
"""What is a secret by its form: tokens of common services, JSON web tokens, private keys, headers
that authorize a request, parameters of a URL, and its user, if it has a password or the URL is one
of HTTP."""

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
    token. Empty values, null, true and false are accepted: they turn a setting on or off. So is the
    string ``None``, which MindFormers' files write for null.

    Args:
        value: Mappings, lists and plain values.
        path: Path of `value`.
    """
    if _is_absent(value):
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


def without_secrets(
    value: Any, path: tuple[str | int, ...] = (), within: tuple[int, ...] = ()
) -> Any:
    """Return settings as plain values for JSON, with ``***`` in the place of each secret.

    A list or mapping under the name of a secret is hidden as a whole.

    Args:
        value: Mappings, lists, plain values, and objects with fields, which become mappings:
            dataclasses, named tuples and namespaces. Anything else becomes text.
        path: Path of `value`.
        within: Identities of the objects that hold `value`. An object that holds itself is written
            as ``...`` there.
    """
    if is_secret(path) and not _is_absent(value):
        return _HIDDEN
    if id(value) in within:
        return "..."
    inside = (*within, id(value))
    value = _fields(value)
    if isinstance(value, Mapping):
        return {
            _SECRET_VALUE.sub(_HIDDEN, str(key)): without_secrets(each, (*path, str(key)), inside)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [without_secrets(each, (*path, place), inside) for place, each in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _SECRET_VALUE.sub(_HIDDEN, str(value))


def _fields(value: Any) -> Any:
    """Return the fields of an object by name; any other value unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _field(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value)
    return value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else value


def _field(owner: object, name: str) -> Any:
    """Return a field; if the user's class computes it and fails, the error as text."""
    try:
        return getattr(owner, name, None)
    except Exception as error:  # noqa: BLE001  (any error of the user's code)
        return f"({type(error).__name__})"


def _is_absent(value: Any) -> bool:
    """Return whether a value turns a setting on or off, or is empty."""
    is_empty = isinstance(value, (str, Mapping, list, tuple, set, frozenset)) and not value
    return value is None or isinstance(value, bool) or is_empty or value == "None"


def command_without_secrets(words: Sequence[str]) -> str:
    """Return a command for a shell, with ``***`` in the place of each secret.

    Args:
        words: The command's words. The value of a secret is in the same word, as in
            ``--hub-token=hf_...``, or in the next one; for a name in the plural, such as
            ``--api-keys``, in all words up to the next option.
    """
    shown = []
    num_hidden = 0.0
    """Number of the next words that are secrets."""
    for word in words:
        name, mark, value = word.partition("=")
        is_option = bool(mark) or word.startswith("-")
        key = name.lstrip("-").rpartition(".")[2]
        is_named = is_option and is_secret((key,))
        if num_hidden and not word.startswith("-"):
            shown.append(_HIDDEN)
            num_hidden -= 1
            continue
        if is_named and mark and value:
            shown.append(f"{shlex.quote(name)}={_HIDDEN}")
        else:
            kept = _SECRET_VALUE.sub(_HIDDEN, word)
            shown.append(kept if kept == _HIDDEN else shlex.quote(kept))
        num_hidden = 0 if mark or not is_named else math.inf if key.endswith("s") else 1
    return " ".join(shown)
