"""Small checkpoints, and ways to damage them."""

import itertools
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mfwrap.checkpoints.manifest import write_manifest

__all__ = [
    "MANIFEST",
    "Damage",
    "copied",
    "damages",
    "join_weights",
    "split_weights",
    "write_checkpoint",
]

MANIFEST = "mfwrap_manifest.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def write_checkpoint(
    folder: Path, *, listed: bool = True, weights: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a small checkpoint, and return its folder.

    Args:
        folder: Folder of the checkpoint, which must not exist.
        listed: Whether to write the manifest.
        weights: Weights; by default two tensors.
    """
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    weights = weights or {"bias": torch.arange(3.0), "weight": torch.ones(2, 3)}
    save_file(dict(weights), folder / _WEIGHTS, metadata={"format": "pt"})
    torch.save({"step": torch.ones(4)}, folder / "optimizer.pt")
    (folder / "part").mkdir()
    (folder / "part" / "notes.txt").write_text("text")
    if listed:
        write_manifest(folder)
    return folder


def split_weights(folder: Path, weights: str = _WEIGHTS) -> list[Path]:
    """Split weights into one file per tensor, with an index, as other tools do.

    Returns:
        The new safetensors files.
    """
    path = folder / weights
    tensors = load_file(path)
    names = {
        tensor: f"{path.stem}-{number:05}-of-{len(tensors):05}.safetensors"
        for number, tensor in enumerate(tensors, 1)
    }
    for tensor, name in names.items():
        save_file({tensor: tensors[tensor]}, path.with_name(name), metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": names}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(index))
    path.unlink()
    return [path.with_name(name) for name in names.values()]


def join_weights(folder: Path) -> None:
    """Join the weights of `split_weights` into one file again, in another order."""
    index = json.loads((folder / _INDEX).read_text())
    files = [folder / name for name in sorted(set(index["weight_map"].values()), reverse=True)]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for path in [*files, folder / _INDEX]:
        path.unlink()
    save_file(tensors, folder / _WEIGHTS)


class Damage(NamedTuple):
    """A single-bit flip in a file, or a truncation of it."""

    file: str
    """Name of the file, relative to the checkpoint."""

    bit: int | None
    """Number of the bit to flip; ``None`` for a truncation."""

    size: int
    """Size of the truncated file in bytes; ignored for a flip."""

    def __str__(self) -> str:
        """Return what the damage is, for the message of a test that fails."""
        return f"{self.file}: " + (f"cut {self.size}" if self.bit is None else f"bit {self.bit}")

    def do(self, folder: Path) -> None:
        """Damage the file in a checkpoint; a linked file is copied first."""
        path = folder / self.file
        content = bytearray(path.read_bytes())
        if self.bit is None:
            del content[self.size :]
        else:
            content[self.bit // 8] ^= 1 << self.bit % 8
        path.unlink()
        path.write_bytes(content)


def damages(folder: Path, number: int, seed: int) -> Iterator[Damage]:
    """Yield random damages of a checkpoint: two flipped bits for each truncation.

    The files take turns. A quarter of the cases is at the beginning of a file, and a quarter at its
    end.

    Args:
        folder: The checkpoint.
        number: Number of damages.
        seed: Seed of the random numbers.
    """
    generator = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in itertools.islice(itertools.cycle(paths), number):
        file, size = path.relative_to(folder).as_posix(), path.stat().st_size
        place = generator.choice(
            [0, size - 1, generator.randrange(size), generator.randrange(size)]
        )
        bit = 8 * place + generator.randrange(8)
        yield Damage(file, generator.choice([None, bit, bit]), place)


def copied(folder: Path, target: Path) -> Path:
    """Copy a checkpoint by links to its files, and return the copy."""
    return Path(shutil.copytree(folder, target, copy_function=_link))


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)
