"""Measure what the checksums of a checkpoint cost in addition to reading its files.

    python benchmarks/verification.py            # 1 GB: half in weights, half in one large file
    python benchmarks/verification.py --gigabytes 8 --folder /scratch

The files are in the page cache, as they are when a checkpoint has just been written. Each round
measures every row once, in random order:

- reading all files in blocks of 1 MiB, on as many threads as `mfwrap.checkpoints.checksums` uses;
- hashing bytes that are in memory, with algorithms of hashlib and zlib, on one thread;
- `write_manifest`, which each save does, and `verify`, which each resume does.

The table shows seconds per gigabyte (10**9 bytes): the wall-clock time and the CPU time of the
process, as median and range over the rounds. If the machine is busy, compare the CPU times only.
"""

import argparse
import hashlib
import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from mfwrap.checkpoints.checksums import num_cores
from mfwrap.checkpoints.manifest import write_manifest
from mfwrap.checkpoints.verification import verify

GIGABYTE = 10**9
NUM_TENSORS = 64
BLOCK = 1 << 20
HASHED = 256 * BLOCK
"""Number of bytes in memory that each algorithm hashes."""


def write_files(folder: Path, num_bytes: int) -> None:
    """Write weights and one other file, each with half of the bytes."""
    size = num_bytes // 2 // NUM_TENSORS
    tensors = {
        f"layer.{number}": torch.randint(0, 256, (size,), dtype=torch.uint8)
        for number in range(NUM_TENSORS)
    }
    save_file(tensors, folder / "model.safetensors")
    with (folder / "optimizer.pt").open("wb") as file:
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes())


def read_files(folder: Path) -> None:
    """Read all files, and use none of the bytes."""

    def read(path: Path) -> None:
        buffer = bytearray(BLOCK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(num_cores()) as pool:
        list(pool.map(read, folder.iterdir()))


def hashing(update: Callable[[bytes], object], block: bytes) -> Callable[[], None]:
    """Return a function that passes `HASHED` bytes to `update`, in blocks."""

    def run() -> None:
        for _ in range(HASHED // BLOCK):
            update(block)

    return run


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock time and the CPU time of a call."""
    clock, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - cpu


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each row")
    parser.add_argument(
        "--folder", help="where to write; by default the folder for temporary files"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        num_bytes = int(arguments.gigabytes * GIGABYTE)
        write_files(folder, num_bytes)
        block = random.randbytes(BLOCK)  # noqa: S311  (bytes to hash, not cryptography)
        sha256, blake2b = hashlib.sha256(), hashlib.blake2b(digest_size=32)
        write_manifest(folder)
        rows: dict[str, tuple[Callable[[], object], int]] = {
            "reading alone": (lambda: read_files(folder), num_bytes),
            "SHA-256 in memory, one thread": (hashing(sha256.update, block), HASHED),
            "BLAKE2b in memory, one thread": (hashing(blake2b.update, block), HASHED),
            "CRC-32 in memory, one thread": (hashing(zlib.crc32, block), HASHED),
            "`write_manifest`": (lambda: write_manifest(folder), num_bytes),
            "`verify`": (lambda: verify(folder), num_bytes),
        }
        times: dict[str, list[tuple[float, float]]] = {row: [] for row in rows}
        for _ in range(arguments.rounds):
            for row in random.sample(list(rows), len(rows)):
                run, size = rows[row]
                clock, cpu = seconds(run)
                times[row].append((clock * GIGABYTE / size, cpu * GIGABYTE / size))
    print(f"{num_cores()} threads, {arguments.gigabytes} GB, {arguments.rounds} rounds\n")
    print("| | seconds per GB | CPU seconds per GB |\n| --- | --- | --- |")
    for row, measured in times.items():
        columns = (
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
            for each in zip(*measured, strict=True)
        )
        print(f"| {row} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
