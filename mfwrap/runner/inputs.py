"""Tell whether a run that is resumed gets the data and the base model that it was started with."""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from datasets import Dataset
from torch import nn

from mfwrap.recipes.data.source import Rows
from mfwrap.records.run_record import read_facts
from mfwrap.runner.recipe import Recipe
from mfwrap.tensors.samples import sampled_hash

_NUM_ROWS = 256
"""Rows of each data set whose content is read, evenly spaced."""


def input_facts(recipe: Recipe, rows: Rows, network: nn.Module) -> dict[str, Any]:
    """Return the entry ``inputs`` of ``run.json``: what a checkpoint of the run does not hold.

    It depends on the content, not on the places and times of files. Streams and data sets of the
    user's own class are left out: their rows are not read here.

    Args:
        recipe: The recipe.
        rows: Its rows, after some were held out.
        network: Its model, before it gets an adapter.
    """
    facts: dict[str, Any] = {}
    if isinstance(rows.train, Dataset):
        for name, part in (("train", rows.train), ("held_out", rows.evaluation)):
            if isinstance(part, Dataset):
                facts[name] = {"rows": len(part), "sha256": _hash_of_rows(part)}
    if recipe.peft is not None and recipe.model.path is not None:
        # Without a head and computed buffers, which another machine may round otherwise.
        below: nn.Module = getattr(network, "base_model", network)
        facts["base_model"] = {"sha256": sampled_hash(below.parameters())}
    return facts


def changed_inputs(recipe: Recipe, folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return what differs from an earlier start of a run, by its key in the recipe.

    Args:
        recipe: The recipe.
        folder: Run folder. What its ``run.json`` does not have counts as unchanged.
        facts: What `input_facts` returns now.
    """
    try:
        before = read_facts(folder).get("inputs") or {}
    except (OSError, ValueError):
        return []
    data = recipe.document.data["data"]
    own = next((key for key in ("eval_path", "eval_split") if data.get(key) is not None), None)
    keys = {
        "train": _key(recipe, "data", ("data_files", "path", "type")),
        "held_out": _key(recipe, "data", (own or "", "data_files", "path", "type")),
        "base_model": _key(recipe, "model", ("path",)),
    }
    different = [name for name in keys if before.get(name, facts.get(name)) != facts.get(name)]
    # Without rows of their own, the held-out ones are drawn from the others.
    return list(dict.fromkeys(keys[name] for name in different))


def _key(recipe: Recipe, section: str, keys: tuple[str, ...]) -> str:
    """Return the first of the keys that a section has, with its value if that is a word."""
    settings = recipe.document.data[section]
    key = next((one for one in keys if settings.get(one) is not None), None)
    if key is None:
        return section
    value = settings[key]
    return f"{section}.{key} {value}" if isinstance(value, str) else f"{section}.{key}"


def _hash_of_rows(rows: Dataset) -> str:
    places = range(0, len(rows), max(1, len(rows) // _NUM_ROWS))[:_NUM_ROWS]
    # Images stay as they lie in their files.
    table = rows.with_format("arrow")[list(places)] if len(rows) else None
    found = hashlib.sha256()
    for row in [] if table is None else table.to_pylist():
        found.update(repr(_without_folders(sorted(row.items()))).encode())
    return found.hexdigest()


def _without_folders(value: Any) -> Any:
    """Return a value of a row; of the path of an image, only the name of the file."""
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"} and value["path"] is not None:
            value = value | {"path": PurePath(value["path"]).name}
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_folders(one) for one in value]
    return value
