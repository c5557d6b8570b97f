"""Read and write ``fingerprints.jsonl``: which data and tensors each step of a rank had."""

import base64
import binascii
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, final

from mfwrap.records.forms import fits

NAME = "fingerprints"
"""Name of the files: ``fingerprints.jsonl``, and ``fingerprints_rank<r>.jsonl`` of other ranks."""

Share = Literal["whole", "part", "copy", "local"]
"""What a rank's fingerprint of a tensor stands for.

- ``"whole"``: the tensor, which each rank has as a whole.
- ``"part"``: a contiguous part of a tensor; the parts of all ranks add up to the tensor.
- ``"copy"``: a part that another rank has, too, and has recorded.
- ``"local"``: a part that is not contiguous; it can only be compared with the same rank's part.
"""

_HASH = 2**64
_LAYOUT = struct.Struct("<Q5f")
_NUM_PIECES = 4
_PIECE = 16


@final
@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Exact hash and sketch of one tensor; see `mfwrap.tensors.fingerprints`."""

    hash: int
    """Hash of all bits, from 0 to ``2**64 - 1``."""

    square: float
    """Squared L2 norm."""

    sketch: tuple[float, ...]
    """Sums of all elements with random signs."""

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Self:
        """Build a fingerprint from one row of `mfwrap.tensors.fingerprints.fingerprints`."""
        return cls(joined(values[:_NUM_PIECES]), values[_NUM_PIECES], tuple(values[5:]))

    def plus(self, other: "Fingerprint") -> "Fingerprint":
        """Return the fingerprint of a tensor of which these two are separate parts."""
        return Fingerprint(
            (self.hash + other.hash) % _HASH,
            self.square + other.square,
            tuple(a + b for a, b in zip(self.sketch, other.sketch, strict=True)),
        )

    def relative_distance(self, other: "Fingerprint", least_square: float = 0.0) -> float:
        """Estimate the L2 norm of the tensors' difference, divided by the larger norm.

        Args:
            other: Fingerprint of another tensor.
            least_square: Square of the norm that a smaller norm counts as.

        Returns:
            0 for equal bits; infinity if a tensor has a non-finite element and the other tensor has
            other bits.
        """
        if self.hash == other.hash:
            return 0.0
        squares = [(a - b) ** 2 for a, b in zip(self.sketch, other.sketch, strict=True)]
        larger = max(self.square, other.square, least_square)
        distance = math.sqrt(sum(squares) / len(squares) / larger) if larger else 0.0
        is_known = all(map(math.isfinite, (distance, self.square, other.square)))
        return distance if is_known else math.inf


def joined(pieces: Sequence[float]) -> int:
    """Return the hash that `mfwrap.tensors.fingerprints.as_floats` has split into pieces."""
    return sum(int(piece) << (_PIECE * number) for number, piece in enumerate(pieces))


def encoded(fingerprints: Iterable[Fingerprint]) -> str:
    """Return fingerprints as text for a record, 38 characters per tensor."""
    packed = [_LAYOUT.pack(one.hash, one.square, *one.sketch) for one in fingerprints]
    return base64.b64encode(b"".join(packed)).decode()


def encoded_floats(values: Sequence[float]) -> str:
    """Return float32 numbers as text for a record."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _floats(text: str) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<f", base64.b64decode(text, validate=True))]


@final
@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of one call of the network."""

    inputs: Mapping[str, str]
    """Hash and shape of each input tensor, by name."""

    rows: tuple[str, ...]
    """Hash of each row of the inputs."""


@final
@dataclass(frozen=True, slots=True)
class StepFingerprints:
    """What a rank has recorded about the data and tensors of a step; ``None`` where unknown."""

    random: Mapping[str, str]
    """Hash of each random number generator's state at the start of the step, by name."""

    micro_batches: tuple[MicroBatch, ...]
    gradients: Mapping[str, Fingerprint] | None
    """Gradients before the update, by parameter: reduced, multiplied by the loss scale unless
    `are_unscaled`."""

    weights: Mapping[str, Fingerprint] | None
    """Weights after the update, by parameter."""

    numbers: Mapping[str, Any]
    """Numbers of the step, by their names in `StepOutput`; ``local_norm`` is a mapping."""

    are_unscaled: bool = False
    """Whether the gradients are as an optimizer without a fused kernel gets them: divided by the
    loss scale, and clipped."""


@final
@dataclass(frozen=True, slots=True)
class RankFingerprints:
    """The fingerprints of one rank."""

    run: Mapping[str, Any]
    """Facts about the run, by name: ``seed``, ``num_ranks``, ``torch``, ``device``, ..."""

    shares: Mapping[str, Share]
    """What the fingerprints of each parameter stand for."""

    steps: Mapping[int, StepFingerprints]
    starts: Mapping[int, Mapping[str, Fingerprint]]
    """Weights at the start of each training, by the number of steps finished before it."""


def read_fingerprints(records: Iterable[Mapping[str, Any]], place: str) -> RankFingerprints:
    """Read the records of one rank.

    Args:
        records: Content of the file.
        place: Name of the file, for error messages.

    Raises:
        ValueError: If a record is damaged, or was written by a later version.
    """
    run: dict[str, Any] = {}
    shares: dict[str, Share] = {}
    steps: dict[int, StepFingerprints] = {}
    starts: dict[int, Mapping[str, Fingerprint]] = {}
    norm_names: list[str] = []
    for number, record in enumerate(records, start=1):
        try:
            if "run" in record:
                run, shares = dict(record["run"]), dict(record["tensors"])
                starts[int(record["step"])] = _decoded(shares, record["weights"])
                continue
            weights, gradients = record.get("weights"), record.get("gradients")
            norm_names = record.get("local_norm_names", norm_names)
            numbers = dict(record["numbers"])
            if "local_norms" in record:
                norms = _floats(record["local_norms"])
                numbers["local_norm"] = dict(zip(norm_names, norms, strict=True))
            steps[int(record["step"])] = StepFingerprints(
                random=dict(record["random"]),
                micro_batches=tuple(map(_micro_batch, record["micro_batches"])),
                gradients=None if gradients is None else _decoded(shares, gradients),
                weights=None if weights is None else _decoded(shares, weights),
                numbers=numbers,
                are_unscaled=bool(record.get("are_unscaled", False)),
            )
        except (KeyError, TypeError, ValueError, struct.error, binascii.Error) as error:
            msg = f"{place}:{number}: expected a record of fingerprints, got {str(record)[:80]!r}"
            raise ValueError(msg) from error
    return RankFingerprints(run, shares, steps, starts)


def _micro_batch(record: Mapping[str, Any]) -> MicroBatch:
    if not fits(record["rows"], [str]):
        msg = "a hash of a row must be a string"
        raise TypeError(msg)
    return MicroBatch(dict(record["inputs"]), tuple(record["rows"]))


def _decoded(names: Iterable[str], text: str) -> dict[str, Fingerprint]:
    unpacked = _LAYOUT.iter_unpack(base64.b64decode(text, validate=True))
    found = [Fingerprint(hash_, square, tuple(sketch)) for hash_, square, *sketch in unpacked]
    return dict(zip(names, found, strict=True))
