"""Show the settings of a run by dotted names, and name those that a resume has changed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mfwrap.records.run_record import read_facts
from mfwrap.records.secret_keys import without_secrets

_MOST_CHARACTERS = 300
"""Number of characters up to which a setting is shown whole."""

_SHORT = 60
"""Number of characters of a value in a change."""

_OF_PLACE = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "skip_rows")
"""Settings that say where a run writes or goes on, or that the run page shows by themselves."""


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as text by dotted names, such as ``training.learning_rate``.

    An entry of a list of mappings has its number as a name: ``reward.0.type``.
    """
    found: dict[str, str] = {}
    for name, value in settings.items():
        inner = _numbered(value)
        if inner:
            found |= flattened(inner, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _cut(str(value), _MOST_CHARACTERS)
    return found


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, each with its values, in the order of their names."""
    old, new = flattened(before), flattened(now)
    return [
        f"{name} {_said(old, name)}, now {_said(new, name)}"
        for name in sorted({**old, **new})
        if old.get(name) != new.get(name) and name.rpartition(".")[2] not in _OF_PLACE
    ]


def changed_since(run_folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ from those of the last start of a run, without secrets.

    Args:
        run_folder: Run folder. Without a ``run.json`` that can be read, nothing has changed.
        settings: Settings now.
    """
    try:
        before = read_facts(run_folder).get("configuration")
    except (OSError, ValueError):
        return []
    return changed_settings(before, without_secrets(settings)) if before else []


def _numbered(value: Any) -> Mapping[str, Any]:
    """Return what has names inside; nothing for a plain value."""
    if isinstance(value, Mapping):
        return value
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if is_list and any(isinstance(one, Mapping) for one in value):
        return {str(number): one for number, one in enumerate(value)}
    return {}


def _said(known: Mapping[str, str], name: str) -> str:
    return _cut(known[name], _SHORT) if name in known else "not set"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
