"""Recognize the records of runs of earlier releases, which kept no list of their files.

A training with a stock Trainer or `Model` has no ``run.json`` either. Its records are then
recognized by their form, or by a checkpoint that lists them.
"""

import json
import re
from pathlib import Path
from typing import Any

from mfwrap.checkpoints.manifest import MANIFEST

_NAME = re.compile(r"([a-z_]+?)(?:_rank\d+)?\.jsonl")
_NORMS = "abnormal_global_norm.json"
_LONGEST_RECORD = 2**24

_FIELDS: dict[str, list[set[str]]] = {
    "anomalies": [{"step", "kind", "ranks"}, {"step", "kind", "last_step", "num_steps"}],
    "checkpoint_health": [{"checkpoint", "step", "healthy", "reasons"}],
    "fingerprints": [{"step", "run", "tensors", "weights"}, {"step", "random", "micro_batches"}],
    "metrics": [{"step", "loss", "loss_scale", "skipped"}],
    "rank_clock": [{"step", "data", "forward_backward", "reduction", "update"}],
}
"""Fields that a record of a file has, among others."""

_ALL_FIELDS: dict[str, list[set[str]]] = {
    "metrics": [{"max_grad_norm"}],
    "progress": [{"step", "seconds"}, {"step", "seconds", "tokens"}],
    "throughput": [{"step", "throughput"}],
}
"""Fields of records that have no others."""


def recognized_names(folder: Path) -> set[str]:
    """Return the names of the records in a folder without a list that mfwrap has written.

    A file whose first line is a record of mfwrap counts, and one that a checkpoint in the folder
    lists. An empty file of records, as a full disk leaves it, and a file without a form of its own
    count only beside others.
    """
    files = [path for path in folder.glob("*.json*") if path.is_file() and not path.is_symlink()]
    names = {path.name for path in files}
    found = {path.name for path in files if _is_record(path)} | (_listed(folder) & names)
    if found:
        found |= {path.name for path in files if path.name == _NORMS or _is_empty_record(path)}
    return found


def _is_record(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    try:
        with path.open("rb") as file:
            record: Any = json.loads(file.readline(_LONGEST_RECORD).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and _has_form(match[1], record)


def _has_form(name: str, record: dict[str, Any]) -> bool:
    fields = record.keys()
    if name == "local_norms":
        return "step" in record and any(field.startswith("local_norm/") for field in fields)
    if name == "training_state":
        # The log of a Trainer has such records, too, but its epochs are not integers.
        return {"step", "loss", "learning_rate"} <= fields and type(record.get("epoch")) is int
    return any(form <= fields for form in _FIELDS.get(name, ())) or any(
        form == fields for form in _ALL_FIELDS.get(name, ())
    )


def _is_empty_record(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    known = {*_FIELDS, *_ALL_FIELDS, "local_norms", "training_state"}
    return match is not None and match[1] in known and path.stat().st_size == 0


def _listed(folder: Path) -> set[str]:
    """Return the names that the lists of records in the folder's checkpoints have."""
    found = set()
    for path in folder.glob("checkpoint-*/mfwrap_records_*.json"):
        if (path.parent / MANIFEST).is_file():
            try:
                found |= set(json.loads(path.read_text(encoding="utf-8"))["files"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
    return found
