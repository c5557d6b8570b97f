"""Train small networks of several kinds, and spoil one sample of their last step."""

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder

__all__ = ["NETWORKS", "Planted", "Regression", "planted", "rows_of"]

_NUM_CLASSES = 4
_SIDE = 8


class _Classifier(nn.Module):
    """Convolutions, and the cross entropy of the image's class."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            norm,
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * (_SIDE // 2) ** 2, _NUM_CLASSES),
        )  # fmt: skip  (one line per stage)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(self.layers(images), labels)


class Regression(nn.Module):
    """A perceptron with dropout, and the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * _SIDE**2, 16),
            nn.LeakyReLU(),
            nn.Dropout(0.1),
            nn.Linear(16, 1),
        )

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss under its name."""
        outputs = self.layers(images).squeeze(1)
        return {"loss": nn.functional.mse_loss(outputs, labels.float())}


class _Tokens(nn.Module):
    """Predict each row's next token; the loss is a mean, or a sum divided by a given number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 20))

    def forward(
        self, tokens: Tensor, labels: Tensor, num_items_in_batch: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits."""
        logits = self.layers(self.embedding(tokens))
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
        )
        return loss / (num_items_in_batch or 1), logits


NETWORKS: dict[str, tuple[str, ...]] = {
    "GroupNorm": ("labels", "nan"),
    "BatchNorm": ("labels", "large", "nan"),
    "regression": ("large", "nan"),
    "tokens": ("labels",),
    "tokens, sum": ("labels",),
}
"""Kinds of faults of each kind of network: ``"labels"`` (a wrong label), ``"large"`` (an image
times 1e4), ``"nan"`` (a NaN in an image)."""


class Planted(NamedTuple):
    """A step with one spoilt sample."""

    recorder: StepRecorder
    micro_batch: int
    row: int
    loss_is_finite: bool


def planted(network: str, kind: str | None, seed: int, *, batch_size: int = 8) -> Planted:
    """Train a network for some steps, and record a step of two micro-batches with a spoilt sample.

    Args:
        network: Key of `NETWORKS`.
        kind: Kind of the fault; ``None`` for none.
        seed: Seed of the network, of the data, and of the place of the fault.
        batch_size: Number of rows of a micro-batch.
    """
    torch.manual_seed(seed)
    model = {
        "GroupNorm": lambda: _Classifier(nn.GroupNorm(2, 8)),
        "BatchNorm": lambda: _Classifier(nn.BatchNorm2d(8)),
        "regression": Regression,
        "tokens": _Tokens,
        "tokens, sum": _Tokens,
    }[network]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        _loss(model(**rows_of(network, batch_size))).backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder = StepRecorder(model)
    dice = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    where, row = dice.randrange(2), dice.randrange(batch_size)
    is_finite = True
    for micro_batch in range(2):
        batch = rows_of(network, batch_size)
        if kind is not None and micro_batch == where:
            _spoil(batch, kind, row)
        loss = _loss(model(**batch)) / 2
        loss.backward()
        is_finite &= math.isfinite(loss.item())
    recorder.end_step()
    return Planted(recorder, where, row, is_finite)


def rows_of(network: str, num: int) -> dict[str, Any]:
    """Return a batch of random rows, whose labels can be learned."""
    if network.startswith("tokens"):
        first, stride = torch.randint(20, (num, 1)), 3
        tokens = (first + stride * torch.arange(12)) % 20
        labels = tokens.clone()
        for row, length in enumerate(torch.randint(6, 12, (num,)).tolist()):
            labels[row, length:] = -100
        sums = {"num_items_in_batch": int((labels[:, 1:] != -100).sum())}
        return {"tokens": tokens, "labels": labels, **(sums if "sum" in network else {})}
    labels = torch.randint(_NUM_CLASSES, (num,))
    images = 0.5 * torch.randn(num, 3, _SIDE, _SIDE)
    half = _SIDE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        y, x = half * (label // 2), half * (label % 2)
        image[:, y : y + half, x : x + half] += 1.5
    return {"images": images, "labels": labels}


def _spoil(batch: dict[str, Any], kind: str, row: int) -> None:
    if kind == "nan":
        batch["images"][row, 1, 2, 3] = math.nan
    elif kind == "large":
        batch["images"][row] *= 1e4
    elif "tokens" in batch:
        labels = batch["labels"][row]
        batch["labels"][row] = torch.where(labels < 0, labels, (labels + 7) % 20)
    else:
        batch["labels"][row] = (batch["labels"][row] + 1) % _NUM_CLASSES


def _loss(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["loss"]
    return output[0] if isinstance(output, tuple) else output
