"""Read all files of a folder as values that are equal for runs with the same results."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import TensorDataset

from mfwrap.checkpoints.run_folders import ABANDONED
from mfwrap.checkpoints.whole import OWN_PARTIAL

__all__ = ["contents", "differences"]

_TIMES = re.compile(
    r"runtime|per_second|throughput|_time$|seconds|started|resumed|command"
    r"|host_memory|max_memory_section"
    r"|(^|/)(memory|progress)(_rank\d+)?\.jsonl$"
)
"""Names of what depends on the clock or the process, and of the command, which is another one after
a crash."""

_IGNORED = re.compile(
    rf"(earlier_)?error_rank_\d+\.txt({OWN_PARTIAL})?|{ABANDONED}.*|.*\.jsonl?\.\d+|_mfwrap_files(_rank\d+)?\.txt"
)
"""Traceback of a run that failed or was killed while it wrote the traceback, which stays when the
run is resumed, and checkpoints and records that a run has set aside. The list names them, too."""


def contents(folder: Path, pattern: str = "*") -> dict[str, Any]:
    """Return the contents of all files in a folder, as one flat mapping.

    A name is a file, followed by a line, a key or a tensor in the file. A tensor's value is its
    bytes, so that NaN equals NaN. Times and checksums are left out.

    Args:
        folder: The folder.
        pattern: Pattern of the names of files, in all subfolders.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob(pattern)):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not _IGNORED.fullmatch(name):
            found[name] = path.suffix
            found |= dict(_leaves(name, _read(path)))
    return found


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    """Return a line for each name whose value differs or is in one of the mappings only."""
    absent = object()
    lines = []
    for name in sorted({*expected, *actual}):
        left, right = expected.get(name, absent), actual.get(name, absent)
        if left is absent:
            lines.append(f"{name}: must not be there, is {right!r:.80}")
        elif right is absent:
            lines.append(f"{name}: is missing")
        elif left != right:
            lines.append(f"{name}: must be {left!r:.80}, is {right!r:.80}")
    return lines


def _read(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.name == "mfwrap_manifest.json":
        # Some of the files hold times, which their checksums depend on.
        return sorted(json.loads(path.read_text(encoding="utf-8"))["files"])
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
    if path.suffix in {".bin", ".ckpt", ".pkl", ".pt", ".pth"}:
        # The test's own files. Some hold objects, such as the training arguments.
        loaded = torch.load(path, weights_only=False)
        return loaded if isinstance(loaded, (Mapping, Tensor)) else vars(loaded)
    return path.read_bytes()


def _leaves(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Tensor):
        plain = value.detach().contiguous().reshape(-1)
        yield name, (value.dtype, tuple(value.shape), plain.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, torch.Generator):
        yield from _leaves(name, value.get_state())
    elif isinstance(value, TensorDataset):  # accelerate saves a sampler with its data
        yield from _leaves(name, value.tensors)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not _TIMES.search(str(key)):
                yield from _leaves(f"{name}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}/{index}", item)
    else:
        yield name, repr(value)
