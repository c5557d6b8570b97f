"""The type of a data source that follows from its path."""

from pathlib import Path

from mfwrap.recipes.data.files import Files, Groups, listed
from mfwrap.recipes.data.images import has_images
from mfwrap.recipes.data.library import SAVED
from mfwrap.recipes.data.lines import OPENERS
from mfwrap.recipes.data.places import is_folder

_TYPES = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json_lines",
    ".md": "text",
    ".ndjson": "json_lines",
    ".parquet": "parquet",
    ".tsv": "tsv",
    ".txt": "text",
}
"""Type of a source, by the ending of its files."""


def type_of(path: Groups, eval_path: Files | None = None) -> str:
    """Return the type of the source that reads a path, and a path with held-out rows.

    A file's ending decides, before which ``.gz``, ``.bz2`` or ``.xz`` is left out. A folder with
    images is an ``image_folder``. Any other folder, and the name of a data set on the hub, are
    read by ``datasets``.

    Args:
        path: The key ``path`` of the section ``data``.
        eval_path: The key ``eval_path``; ``None`` without it.

    Raises:
        ValueError: If the path is a file of another ending, or files of different types. The
            message begins with the key in backticks.
    """
    types = {_type_of(one) for one in listed(path)}
    held_out = {_type_of(one, "eval_path") for one in listed(eval_path or [])}
    if types | held_out == {"json", "json_lines"}:
        return "json"  # reads both
    if len(types) == 1 and types <= {*_TYPES.values()} and not held_out <= types:
        (known,), others = types, sorted(held_out - types)
        msg = f"`eval_path` must name files of the type of `path` ({known}), got {others}"
        raise ValueError(msg)
    if len(types) != 1:
        msg = f"`path` must name files of one type, got {sorted(types)}"
        raise ValueError(msg)
    return types.pop()


def _type_of(path: str, key: str = "path") -> str:
    if is_folder(path):
        is_saved = any(Path(path, file).is_file() for file in SAVED)
        return "image_folder" if not is_saved and has_images(path) else "datasets"
    endings = [one.lower() for one in Path(path).suffixes]
    if endings and endings[-1] in OPENERS:
        endings.pop()
    found = _TYPES.get(endings[-1]) if endings else None
    if found is not None:
        return found
    if Path(path).is_file() or (endings and "/" not in path):
        msg = (
            f"`{key}` must end in {', '.join(sorted(_TYPES))}, or `type` must be set, got {path!r}"
        )
        raise ValueError(msg)
    return "datasets"
