"""Write the manifest of a checkpoint, and verify the content of the checkpoint with it.

``mfwrap_manifest.json`` has an entry for each file of a checkpoint. Its layout, format version 2::

    {
      "format_version": 2,
      "files": {
        "model.safetensors": {"tensors": {"linear.weight": "F32 [2, 3] 1f0a...", ...}},
        "optimizer.pt": {"size": 12345, "sha256": "9c56..."},
        ...
      },
      "checksum": "e3b0..."
    }

- A safetensors file has a SHA-256 checksum for each of its tensors, after the tensor's dtype and
  shape. Header and tensors cover every byte of the file, so it has no other checksum. If its header
  has other metadata than torch's format, the entry holds them, too (``metadata``).
- Weights in several files with an index (``model.safetensors.index.json``) have one entry, under
  the name that one file would have. So a checkpoint stays intact if its weights are split into
  several files, or joined into one.
- Any other file has its size in bytes and a SHA-256 checksum.
- ``checksum`` is the SHA-256 checksum of the manifest without this key.
"""

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mfwrap.checkpoints.checksums import Extent, checksums, whole_extent
from mfwrap.checkpoints.file_formats import (
    INDEX,
    SAFETENSORS,
    DamagedFileError,
    StoredTensor,
    StoredWeights,
    check_end,
    json_content,
    stored_weights,
)
from mfwrap.checkpoints.identities import Identity
from mfwrap.checkpoints.locks import PARTIAL
from mfwrap.checkpoints.required_files import missing_part
from mfwrap.checkpoints.whole import whole_file

MANIFEST = "mfwrap_manifest.json"
HAS_MANIFEST = "has_manifest"
"""Key in a JSON file of a checkpoint: without a manifest, the checkpoint is incomplete."""

_VERSION = 2
_USUAL_METADATA: tuple[dict[str, str], ...] = ({}, {"format": "pt"})
"""Metadata that do not affect how a safetensors file is read."""


class Verified(NamedTuple):
    """Extent of the verification of a checkpoint that is not damaged."""

    num_files: int
    """Number of entries of the manifest; without a manifest, number of files."""

    num_bytes: int
    """Number of bytes that were compared with checksums."""

    caveat: str | None
    """Why damage may be unnoticed; ``None`` if all content was compared with checksums."""

    identities: Mapping[str, Identity] = {}
    """The files that were verified, by name. Each identity is older than the verification."""


class _Expected(NamedTuple):
    """A range of bytes and its checksum in the manifest."""

    extent: Extent
    tensor: str | None
    """Name of the tensor; ``None`` for a whole file."""

    checksum: str


def write_manifest(
    folder: Path, required: Collection[str] = (), known: Mapping[Extent, str] | None = None
) -> None:
    """Write the manifest of a complete checkpoint, with checksums of its content.

    Call this before the checkpoint gets its final name. The checksums are taken from the files and
    not from the tensors in memory, because other libraries write most of the files: only the files
    show what these libraries have written. The files are still in the page cache, so reading them
    costs little.

    Args:
        folder: Folder of the checkpoint. An older manifest is replaced.
        required: Names of files that the caller has written.
        known: Checksums of ranges of bytes that were computed while they were written; these are
            not read again.

    Raises:
        DamagedFileError: If a safetensors file is damaged, a file of ``torch.save`` was not written
            to its end, or the checkpoint lacks files that it must have: somebody has deleted them.
        OSError: If a file cannot be read, or the manifest cannot be written.
    """
    contents = _contents(folder)
    absent = (name for name in required if name not in contents)
    if missing := next(absent, None) or missing_part(contents):
        raise DamagedFileError(folder, f"is incomplete: it has no {missing}")
    extents = [extent for content in contents.values() for extent in _extents(content)]
    known = {} if known is None else known
    with contextlib.closing(checksums(each for each in extents if each not in known)) as read:
        found = (known[each] if each in known else next(read) for each in extents)
        entries = {name: _entry(content, found) for name, content in contents.items()}
    with whole_file(folder / MANIFEST) as partial:
        partial.write_text(_text(entries), encoding="utf-8")


def verify_by_manifest(folder: Path) -> Verified:
    """Compare a checkpoint with its manifest. Files that the manifest does not list are ignored.

    All sizes and headers are compared first, and then the checksums, for which all files are read.

    Raises:
        DamagedFileError: If a file differs from the manifest, the manifest is damaged, or it lacks
            files that a checkpoint must have.
        OSError: If a file cannot be read.
    """
    entries = _read(folder / MANIFEST)
    if missing := missing_part(entries):
        raise DamagedFileError(
            folder / MANIFEST, f"lists no {missing}: the checkpoint is incomplete"
        )
    expected = [each for name, entry in entries.items() for each in _expected(folder / name, entry)]
    with contextlib.closing(checksums(each.extent for each in expected)) as found:
        for (extent, tensor, checksum), value in zip(expected, found, strict=True):
            if value != checksum:
                of_tensor = "" if tensor is None else f" of tensor {tensor}"
                raise DamagedFileError(extent.path, f"is damaged (checksum{of_tensor} differs)")
    return Verified(len(entries), sum(each.extent.num_bytes for each in expected), None)


def files_of(folder: Path) -> list[str]:
    """Return the names of a checkpoint's files, without its manifest and temporary files."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != PARTIAL]
    return sorted({path.relative_to(folder).as_posix() for path in paths} - {MANIFEST})


def _contents(folder: Path) -> dict[str, Extent | StoredWeights]:
    """Return what each entry of the manifest describes, by the name of the entry."""
    names = files_of(folder)
    contents: dict[str, Extent | StoredWeights] = {}
    for name in names:
        check_end(folder / name)
        is_weights = name.endswith(SAFETENSORS)
        contents[name] = (stored_weights if is_weights else whole_extent)(folder / name)
    for index in [name for name in names if name.endswith(SAFETENSORS + INDEX)]:
        weights = index.removesuffix(INDEX)
        # If the index does not fit its files, the manifest lists the index and the files one by
        # one, like other files.
        with contextlib.suppress(DamagedFileError):
            together = stored_weights(folder / weights)
            if all(metadata in _USUAL_METADATA for metadata in together.metadata):
                contents |= {weights: together}
                for path in set(together.files) - {folder / weights}:
                    del contents[path.relative_to(folder).as_posix()]
    return dict(sorted(contents.items()))


def _extents(content: Extent | StoredWeights) -> list[Extent]:
    if isinstance(content, Extent):
        return [content]
    return [tensor.extent for tensor in content.tensors.values()]


def _entry(content: Extent | StoredWeights, found: Iterator[str]) -> dict[str, Any]:
    """Return an entry of the manifest; take its checksums from the iterator."""
    if isinstance(content, Extent):
        return {"size": content.num_bytes, "sha256": next(found)}
    tensors = {name: f"{_form(each)} {next(found)}" for name, each in content.tensors.items()}
    metadata = content.metadata[0] if content.metadata else {}
    return {"tensors": tensors} | ({} if metadata in _USUAL_METADATA else {"metadata": metadata})


def _form(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _text(entries: Mapping[str, Any]) -> str:
    """Return the text of a manifest with its own checksum."""
    content = {"format_version": _VERSION, "files": entries}
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps(content | {"checksum": own}, indent=2) + "\n"


def _read(path: Path) -> dict[str, Any]:
    """Return the entries of a manifest."""
    found = json_content(path)
    content = found if isinstance(found, dict) else {}
    version, entries = content.get("format_version"), content.get("files")
    if version != _VERSION or not isinstance(entries, dict):
        reason = f"must list files, with format_version {_VERSION}, got version {version!r}"
        raise DamagedFileError(path, reason)
    # Compare the whole text: a change of any byte, even of white space, is found.
    if path.read_text(encoding="utf-8") != _text(entries):
        raise DamagedFileError(path, "is damaged (its own checksum differs)")
    return entries


def _expected(path: Path, entry: Mapping[str, Any]) -> list[_Expected]:
    """Compare the size of a file, or the headers of weights, with an entry.

    Returns:
        The checksums in the entry, which the caller must still compare.
    """
    if "tensors" not in entry:
        if not path.is_file():
            raise DamagedFileError(path, "is missing")
        found = path.stat().st_size
        if found != entry["size"]:
            raise DamagedFileError(path, f"has {found} bytes instead of {entry['size']}")
        return [_Expected(whole_extent(path), None, entry["sha256"])]
    weights = stored_weights(path)
    allowed = [entry["metadata"]] if "metadata" in entry else _USUAL_METADATA
    if not all(metadata in allowed for metadata in weights.metadata):
        raise DamagedFileError(weights.files[0], "is damaged (the metadata in its header differ)")
    saved: dict[str, str] = entry["tensors"]
    for name in saved.keys() - weights.tensors:
        raise DamagedFileError(weights.files[0], f"is damaged (tensor {name} is missing)")
    expected = []
    for name, tensor in weights.tensors.items():
        if name not in saved:
            raise DamagedFileError(tensor.extent.path, f"is damaged (tensor {name} was not saved)")
        form, _, checksum = saved[name].rpartition(" ")
        if form != _form(tensor):
            reason = f"is damaged (tensor {name} is {_form(tensor)} instead of {form})"
            raise DamagedFileError(tensor.extent.path, reason)
        expected.append(_Expected(tensor.extent, name, checksum))
    return expected
