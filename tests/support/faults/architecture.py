"""What a fault must know about a network, and the rows that the network is trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = [
    "BATCH_SIZE",
    "LENGTH",
    "NUM_CLASSES",
    "SIZE",
    "VOCABULARY",
    "Architecture",
    "Rows",
    "collated",
    "graph",
    "image",
    "masked_tokens",
    "tokens",
    "turns",
]

BATCH_SIZE = 4
NUM_CLASSES = 4
VOCABULARY = 32
LENGTH = 10
SIZE = 8
NOISE = 0.2
"""Share of random targets, so that the loss of a trained network does not go to zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A network, its rows, and the names under which a fault finds its place in the network."""

    make: Callable[[int], nn.Module]
    """Takes the hidden size, which must be divisible by 16."""

    row: Callable[[torch.Generator], dict[str, Tensor]]
    """Draws a row. Its targets, if it has any, are named ``labels``."""

    layers: tuple[str, ...]
    """Names of layers whose output has the rows of the batch as its first dimension."""

    inputs: str
    """Entry of a row that is the input of the network."""

    is_unseen: bool = False
    """Whether rules are judged on the network, and must not be written on it."""

    num_targets: int | None = None
    """Number of values that a target has; ``None`` without targets that are numbers of classes."""

    ignores: bool = True
    """Whether a target of -100 counts as none, so that the mean over no target is NaN."""

    head: str | None = None
    """Name of the module whose output are the logits."""

    query: str | None = None
    """Name inside of a layer of the projection whose output the attention logits grow with."""

    router: str | None = None
    """Name inside of a layer of a router."""

    buffer: str | None = None
    """Name inside of a layer of a running variance."""

    settings: tuple[str, ...] = ()
    """Settings that the network has, by the names that `Setting` gives them."""

    parts: tuple[str, ...] = ()
    """Parts that the network has, by the names in `NETWORK_PARTS`."""

    frequencies: str | None = None
    """Name of the buffer with the frequencies of the rotations that tell positions."""

    counter: str | None = None
    """Name of the first module that divides by the number of tokens or points that
    ``attention_mask`` leaves, which must not be zero."""

    divider: str | None = None
    """Name of a module that divides by the spread of the inputs, so that it must not be zero."""

    rates: tuple[float, ...] = (3e-3, 1e-2)
    """Rates at which AdamW trains the network."""

    has_separate_rows: bool = True
    """Whether no row depends on another one, so that a fault may be in one row."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Types in which the whole network can be trained."""

    is_mixed: bool = False
    """Whether the linear maps ``up`` and ``down`` of a layer may have a type of their own."""


class Rows(Dataset):
    """An endless data set of rows that depend on their index alone.

    Args:
        architecture: Architecture that is trained.
        num_rows: Number of rows.
        seed: Seed of the data set.
    """

    def __init__(self, architecture: Architecture, num_rows: int, seed: int = 0) -> None:
        self._architecture, self._num_rows, self._seed = architecture, num_rows, seed

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + index)
        return {**self._architecture.row(generator), "indices": torch.tensor(index)}


def collated(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as one micro-batch, with a mark for each row that has a fault: none has one."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "marks": torch.zeros(len(rows), dtype=torch.int64)}


def tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """Return consecutive tokens with noise, which are their own targets."""
    start = torch.randint(VOCABULARY, (), generator=generator)
    row = (start + torch.arange(LENGTH)) % VOCABULARY
    noise = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    row = torch.where(torch.rand(LENGTH, generator=generator) < NOISE, noise, row)
    return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()}


def turns(generator: torch.Generator) -> dict[str, Tensor]:
    """Return three tokens in turn with noise, so that each target is two before its input."""
    row = torch.randint(VOCABULARY // 4, (3,), generator=generator).repeat(LENGTH // 3 + 1)[:LENGTH]
    noise = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
    row = torch.where(torch.rand(LENGTH, generator=generator) < NOISE / 4, noise, row)
    return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()}


def masked_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """Return tokens of which those that are targets are masked."""
    row = tokens(generator)
    hidden = torch.arange(LENGTH) % 3 == torch.randint(3, (), generator=generator)
    row["labels"][~hidden] = -100
    row["input_ids"] = row["input_ids"].masked_fill(hidden, VOCABULARY)
    return row


def image(generator: torch.Generator) -> dict[str, Tensor]:
    """Return an image with a bright stripe, whose place is its class."""
    label = torch.randint(NUM_CLASSES, (), generator=generator)
    pixels = 0.5 * torch.randn(3, SIZE, SIZE, generator=generator)
    pixels[:, :, 2 * int(label) : 2 * int(label) + 2] += 1
    noise = torch.randint(NUM_CLASSES, (), generator=generator)
    label = torch.where(torch.rand((), generator=generator) < NOISE, noise, label)
    return {"pixel_values": pixels, "labels": label}


def graph(generator: torch.Generator) -> dict[str, Tensor]:
    """Return a graph of eight nodes; the class is the number of its edges, by quarters."""
    label = torch.randint(NUM_CLASSES, (), generator=generator)
    drawn = torch.rand(SIZE, SIZE, generator=generator) < (1 + int(label)) / (NUM_CLASSES + 1)
    edges = (drawn | drawn.T).float()
    return {"nodes": torch.randn(SIZE, 4, generator=generator), "edges": edges, "labels": label}
