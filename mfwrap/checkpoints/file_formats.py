"""Recognize damaged files by their formats, and find the tensors in safetensors files."""

import json
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from mfwrap.checkpoints.checksums import Extent

SAFETENSORS = ".safetensors"
INDEX = ".index.json"
"""Suffix of the index of weights in several files, after the name that one file would have."""

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ZIP_MAGIC = b"PK"
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    struct.error,
    ArithmeticError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
)
"""Errors that `zipfile` raises for damaged archives, among them OSError for a negative offset."""


class DamagedFileError(ValueError):
    """A file is missing or damaged.

    Args:
        path: The file.
        reason: Rest of a sentence that begins with the name of the file.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path
        self.reason = reason


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    dtype: str
    """Dtype in the notation of safetensors, such as ``F32``."""

    shape: tuple[int, ...]
    extent: Extent
    """Place of the tensor's bytes."""


class StoredWeights(NamedTuple):
    """Tensors in a safetensors file, or in several such files with an index."""

    files: tuple[Path, ...]
    """The safetensors files, and the index if there is one."""

    metadata: tuple[dict[str, str], ...]
    """Metadata in the headers of the safetensors files."""

    tensors: dict[str, StoredTensor]
    """Tensors by name. Together with the headers they cover every byte of the files."""


def stored_weights(path: Path) -> StoredWeights:
    """Read the headers of weights, without reading the tensors.

    Args:
        path: A safetensors file. If it does not exist, but ``<path>.index.json`` does, the weights
            are read from the files that this index lists.

    Raises:
        DamagedFileError: If a file is missing or its header is damaged, a file is shorter or longer
            than its header says, or the index does not list exactly the tensors in its files.
        OSError: If a file cannot be read.
    """
    index = path.with_name(path.name + INDEX)
    if path.exists() or not index.exists():
        return _weights_in(path)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        is_index = bool(names) and all(Path(name).name == name for name in names)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        is_index = False
    if not is_index:
        raise DamagedFileError(index, "is damaged (not an index of safetensors files)")
    parts = {name: _weights_in(path.with_name(name)) for name in names}
    if weight_map != {tensor: name for name, part in parts.items() for tensor in part.tensors}:
        raise DamagedFileError(index, "is damaged (it differs from the tensors in its files)")
    return StoredWeights(
        (index, *(file for part in parts.values() for file in part.files)),
        tuple(metadata for part in parts.values() for metadata in part.metadata),
        {name: tensor for part in parts.values() for name, tensor in part.tensors.items()},
    )


def _weights_in(path: Path) -> StoredWeights:
    """Read the header of one safetensors file."""
    if not path.is_file():
        raise DamagedFileError(path, "is missing")
    with path.open("rb") as file:
        try:
            # The library checks the whole header, and that the tensors fill the file without a gap.
            with safe_open(path, "np") as checked:
                metadata = checked.metadata() or {}
        except SafetensorError as error:
            raise DamagedFileError(path, f"is damaged ({error})") from error
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        entries = json.loads(file.read(length))
    entries.pop(_METADATA, None)
    begin = _LENGTH_BYTES + length
    tensors = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        extent = Extent(path, begin + first, last - first)
        tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), extent)
    return StoredWeights((path,), (metadata,), tensors)


def check_format(path: Path) -> None:
    """Check that a file fits the format that its suffix stands for; accept unknown suffixes.

    JSON and the headers of safetensors files are parsed. Files of ``torch.save`` are zip archives,
    whose contents are compared with the CRC-32 checksums that the archive holds.

    Raises:
        DamagedFileError: If the file violates its format.
        OSError: If the file cannot be read.
    """
    if path.suffix == ".json":
        json_content(path)
    elif path.suffix == SAFETENSORS:
        _weights_in(path)
    # The second kind may also be a plain pickle, which has no checksums and is not checked.
    elif path.suffix in {".pt", ".pth"} or (
        path.suffix in {".bin", ".pkl"} and _begins_as_zip(path)
    ):
        _check_zip(path)


def check_end(path: Path) -> None:
    """Check that a file of ``torch.save`` was written to its end; accept all other files.

    This reads only the ends of the file. torch 2.9 raises no error if the disk is full when it
    writes the last bytes.

    Raises:
        DamagedFileError: If the file is a zip archive without its table of contents.
        OSError: If the file cannot be read.
    """
    if path.suffix not in {".pt", ".pth", ".bin", ".pkl"}:
        return
    if _begins_as_zip(path) and not zipfile.is_zipfile(path):
        raise DamagedFileError(path, "was not written to its end; check the disk's free space")


def json_content(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        DamagedFileError: If the file is not valid JSON.
        OSError: If the file cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise DamagedFileError(path, "is not valid JSON") from error


def _begins_as_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            # torch stores its entries uncompressed, so a compressed entry is damage. Do not
            # decompress it: damaged data raise many kinds of errors.
            is_torchs = all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())
            damaged = archive.testzip() if is_torchs else "a compressed entry"
    except _ZIP_ERRORS as error:
        # A zip file has its table of contents at the end, so a truncated file is not a zip file.
        raise DamagedFileError(path, "is truncated or damaged (not a valid zip archive)") from error
    if damaged is not None:
        raise DamagedFileError(path, f"is damaged (checksum of {damaged} in it differs)")
