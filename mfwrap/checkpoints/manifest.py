"""Check that a checkpoint is intact, and that its weights belong to a network."""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from mfwrap.checkpoints.folders import whole_file

_MANIFEST = "mfwrap_manifest.json"
_TRAINER_STATE = "trainer_state.json"
_STEP = "mfwrap_step.json"
_WEIGHTS = "model.safetensors"
_FORMAT_VERSION = 1
_NAME = re.compile(r"checkpoint-(\d+)")


def write_manifest(folder: Path) -> None:
    """Write a list of a checkpoint's files and sizes, by which damage can be recognized."""
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _MANIFEST
    }
    content = {"format_version": _FORMAT_VERSION, "files": sizes}
    with whole_file(folder / _MANIFEST) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_checkpoint(folder: Path, network: nn.Module | None = None) -> None:
    """Check that a checkpoint is intact, and that its weights belong to a network.

    Args:
        folder: Folder of the checkpoint.
        network: Network to compare with; ``None`` to check the files only.

    Raises:
        ValueError: If a check fails. The message names the newest intact checkpoint of an earlier
            step.
    """
    fault = _fault(folder) or (None if network is None else foreign_weights(folder, network))
    if fault is None:
        return
    other = newest_whole_checkpoint(folder.parent, before=folder, network=network)
    offer = (
        "there is no intact checkpoint before it"
        if other is None
        else f"newest intact checkpoint before it: {other}"
    )
    msg = f"cannot resume from {folder}: {fault}; {offer}"
    raise ValueError(msg)


def newest_whole_checkpoint(
    run_folder: Path, before: Path | None = None, network: nn.Module | None = None
) -> Path | None:
    """Return the intact checkpoint of the highest step; ``None`` if there is none.

    Args:
        run_folder: Folder with the folders ``checkpoint-<step>``.
        before: Checkpoint folder. Only checkpoints of lower steps are considered; ``None`` for all.
        network: Network. Only checkpoints with this network's weights are considered; ``None`` for
            all.
    """
    limit = _step_of(before) if before is not None else None
    steps = {step: path for path in _folders(run_folder) if (step := _step_of(path)) is not None}
    for step in sorted(steps, reverse=True):
        if limit is not None and step >= limit:
            continue
        fits = network is None or foreign_weights(steps[step], network) is None
        if _fault(steps[step]) is None and fits:
            return steps[step]
    return None


def _folders(run_folder: Path) -> Iterator[Path]:
    if run_folder.is_dir():
        yield from (path for path in run_folder.iterdir() if path.is_dir())


def _step_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def _fault(folder: Path) -> str | None:
    """Return what is wrong with the files of a checkpoint; ``None`` if it is intact."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / _TRAINER_STATE).is_file():
        return f"{_TRAINER_STATE} is missing"
    if (folder / _MANIFEST).exists():
        return _difference_from_manifest(folder)
    if (folder / _STEP).exists():
        return f"{_MANIFEST} is missing"
    # A stock Trainer writes no manifest, so look for damage in each file.
    faults = (_damage(path) for path in sorted(folder.rglob("*")) if path.is_file())
    return next((fault for fault in faults if fault), None)


def _difference_from_manifest(folder: Path) -> str | None:
    if fault := _damage(folder / _MANIFEST):
        return fault
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("format_version") != _FORMAT_VERSION:
        return f"{_MANIFEST} must be a list of files with format_version {_FORMAT_VERSION}"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _damage(path: Path) -> str | None:
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return f"{path.name} is not valid JSON"
    elif path.suffix == ".safetensors":
        if _safetensors_header(path) is None:
            return f"{path.name} is truncated"
    elif path.suffix in {".pt", ".pth"} and not zipfile.is_zipfile(path):
        # A zip file has its table of contents at the end, so a truncated file is not a zip file.
        return f"{path.name} is truncated"
    return None


def _safetensors_header(path: Path) -> dict[str, dict[str, object]] | None:
    """Return the entries of a safetensors file's header; ``None`` if the file is incomplete."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return None
        try:
            header: dict[str, dict[str, object]] = json.loads(file.read(length))
        except ValueError:
            return None
    header.pop("__metadata__", None)
    ends = [
        offsets[1]
        for entry in header.values()
        if isinstance(offsets := entry["data_offsets"], list)
    ]
    whole = 8 + length + max(ends, default=0) == path.stat().st_size
    return header if whole else None


def foreign_weights(folder: Path, network: nn.Module) -> str | None:
    """Return why a checkpoint's weights do not belong to a network; ``None`` if they do.

    A stock Trainer would load the weights that fit and ignore the others. Reads only the header of
    ``model.safetensors``; sharded weights and adapters are not checked.
    """
    if not (folder / _WEIGHTS).is_file():
        return None
    header = _safetensors_header(folder / _WEIGHTS) or {}
    expected = network.state_dict(keep_vars=True)
    for name, entry in header.items():
        if name not in expected:
            return f"{_WEIGHTS} has {name}, which is not in the network"
        shape = tuple(expected[name].shape)
        if entry["shape"] != list(shape):
            return (
                f"{_WEIGHTS} has {name} with shape {entry['shape']}, but the network has it with "
                f"shape {list(shape)}"
            )
    # Only one name of a tied weight is stored. The other names have the same address, so a name is
    # missing only if its address is missing, too.
    present = {expected[name].data_ptr() for name in header}
    ignored = set(getattr(network, "_keys_to_ignore_on_save", None) or ())
    for name, tensor in _stored(expected, ignored).items():
        if name not in header and tensor.data_ptr() not in present:
            return f"{_WEIGHTS} has no {name}"
    return None


def _stored(state: Mapping[str, nn.Parameter], ignored: set[str]) -> dict[str, nn.Parameter]:
    return {
        name: tensor for name, tensor in state.items() if name not in ignored and tensor.numel()
    }
