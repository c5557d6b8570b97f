"""Write large files, and compute their checksums from the bytes that are being written.

`write_manifest` takes these checksums, so that it does not read the files again.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from torch import Tensor

from mfwrap.checkpoints.checksums import Extent

_BLOCK = 1 << 20
"""Bytes that are hashed and then written, while they are in the processor's cache."""

_DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Names of dtypes in safetensors files, in the library's order: the last one comes first."""

_ORDER = {dtype: -number for number, dtype in enumerate(_DTYPES)}


@final
class _HashedFile:
    """A file that hashes what is written to it, one byte after the other.

    Args:
        file: Open file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Hash and write bytes; both release Python's global lock."""
        content = memoryview(data).cast("B")
        for start in range(0, len(content), _BLOCK):
            block = content[start : start + _BLOCK]
            self._digest.update(block)
            self._file.write(block)
        self.num_bytes += len(content)
        return len(content)

    def flush(self) -> None:
        """Flush the file, as ``torch.save`` asks."""
        self._file.flush()

    def checksum(self) -> str:
        """Return the checksum of all bytes since the last call."""
        digest, self._digest = self._digest, hashlib.sha256()
        return digest.hexdigest()


def may_hold(tensor: Tensor) -> bool:
    """Return whether safetensors has a name for the dtype of a tensor."""
    return tensor.dtype in _DTYPES


def save_object(value: Any, path: Path) -> dict[Extent, str]:
    """Write a value with ``torch.save``, which writes a file that is not a path from start to end.

    Returns:
        The checksum of the whole file.
    """
    with path.open("wb") as opened:
        file = _HashedFile(opened)
        writer: Any = file  # torch asks for all methods of a file, and calls two
        torch.save(value, writer)
    return {Extent(path, 0, file.num_bytes): file.checksum()}


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> dict[Extent, str]:
    """Write the safetensors file that ``safetensors.torch.save_file`` would write.

    Args:
        tensors: Tensors by name, none of them distributed. Two of them may share memory. One at a
            time is copied to the host.
        path: The file.
        metadata: Metadata of the header.

    Returns:
        The checksum of each tensor.

    Raises:
        ValueError: If safetensors has no name for the dtype of a tensor.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    for name, tensor in tensors.items():
        if not may_hold(tensor):
            msg = f"a safetensors file cannot hold {tensor.dtype}, got it in tensor {name!r}"
            raise ValueError(msg)
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    found = {}
    with path.open("wb") as opened:
        file = _HashedFile(opened)
        file.write(len(text).to_bytes(8, "little") + text)
        file.checksum()
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            start = file.num_bytes
            file.write(flat.numpy())
            found[Extent(path, start, len(flat))] = file.checksum()
    return found
