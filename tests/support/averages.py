"""Weights, a network and checks for tests of averages."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mfwrap.average.ema import ExponentialMovingAverage

APPLIED = torch.ones((), dtype=torch.bool)
SKIPPED = torch.zeros((), dtype=torch.bool)
FLAGS = {True: APPLIED, False: SKIPPED}
AVERAGED = ["embedding.weight", "norm.weight", "norm.bias"]
COPIED = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


class Network(nn.Module):
    """A network with a tied weight, a frozen layer, saved buffers and an unsaved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.norm(self.embedding(tokens))))


def weights_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return random weights."""
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def train(weights: Iterable[Tensor]) -> None:
    """Change weights as an optimizer does, in place."""
    with torch.no_grad():
        for weight in weights:
            weight.add_(torch.randn_like(weight))


def averages(ema: ExponentialMovingAverage) -> dict[str, Tensor]:
    """Return copies of the averages."""
    return {name: average.clone() for name, average in ema.named_averages()}


def assert_same(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    """Assert equal names, shapes, dtypes and values, bitwise."""
    assert list(expected) == list(actual)
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype, name
        assert torch.equal(tensor, actual[name]), name


def flat(state: dict) -> dict[str, Tensor]:
    """Return copies of all tensors of a state in one dictionary."""
    return {f"{part}.{k}": v.clone() for part, tensors in state.items() for k, v in tensors.items()}


def train_with_skips(
    network: Network, num_steps: int, ema: ExponentialMovingAverage, seed: int
) -> None:
    """Train a network; every third update is skipped."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.1)
    for step in range(num_steps):
        tokens = torch.randint(7, (5,), generator=generator)
        nn.functional.cross_entropy(network(tokens), tokens).backward()
        applied = step % 3 != 2
        if applied:
            optimizer.step()
        optimizer.zero_grad()
        ema.update(FLAGS[applied])
