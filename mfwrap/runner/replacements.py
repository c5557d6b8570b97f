"""Leave out the values of a recipe that an override replaces by setting another key."""

import dataclasses
from collections.abc import Collection
from typing import Any

from mfwrap.recipes.data.endings import type_of
from mfwrap.recipes.data.source import DataSource
from mfwrap.recipes.tasks.table import SOURCES
from mfwrap.runner.document import RecipeDocument


def without_replaced(document: RecipeDocument) -> RecipeDocument:
    """Return a recipe without the values of its file that contradict an override.

    - ``--set model.path=...`` replaces ``model.config`` and ``model.tokenizer``;
      ``--set model.config=...`` replaces ``model.path``, ``model.revision`` and
      ``model.tokenizer``.
    - ``--set data.path=...`` replaces ``data.type`` if the path is of another type, and with it the
      keys of the former source.

    A value that was set by an override itself is kept.

    Args:
        document: The recipe, after all overrides.
    """
    return _without_other_data(_without_other_model(document))


def _without_other_model(document: RecipeDocument) -> RecipeDocument:
    if _is_overridden(document, "model", "path"):
        return _without(document, "model", {"config", "tokenizer"})
    if _is_overridden(document, "model", "config"):
        return _without(document, "model", {"path", "revision", "tokenizer"})
    return document


def _without_other_data(document: RecipeDocument) -> RecipeDocument:
    data = document.data.get("data")
    if not isinstance(data, dict) or not _is_overridden(document, "data", "path"):
        return document
    former: Any = SOURCES.get(str(data.get("type")))
    if former is None or _is_overridden(document, "data", "type"):
        return document
    took_path = "path" in _keys(former)
    try:
        found = type_of(data["path"])
    except (TypeError, ValueError):
        found = None  # the ending is unknown
    if took_path and found in {None, "datasets", data["type"]}:
        return document
    of_all = _keys(DataSource) - (set() if took_path else {"columns"})
    return _without(document, "data", data.keys() - of_all - {"path"})


def _keys(source: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(source)}


def _is_overridden(document: RecipeDocument, section: str, key: str) -> bool:
    return document.places.get((section, key)) == f"--set {section}.{key}"


def _without(document: RecipeDocument, section: str, keys: Collection[str]) -> RecipeDocument:
    """Return a recipe without some keys of a section, except those set by an override."""
    content = document.data[section]
    removed = {
        key
        for key in content
        if key in keys and not document.places.get((section, key), "").startswith("--set")
    }
    kept = {key: value for key, value in content.items() if key not in removed}
    places = {
        path: place
        for path, place in document.places.items()
        if not (path[:1] == (section,) and len(path) > 1 and path[1] in removed)
    }
    return dataclasses.replace(document, data=document.data | {section: kept}, places=places)
