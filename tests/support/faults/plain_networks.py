"""Small networks in plain torch. Their settings are entries of a mapping `settings`."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import SequenceClassifierOutput

from support.faults.architecture import (
    LENGTH,
    NUM_CLASSES,
    VOCABULARY,
    Architecture,
    graph,
    image,
    tokens,
)

__all__ = ["PLAIN_NETWORKS"]

_FEATURES = 8


def _classified(network: nn.Module, logits: Tensor, labels: Tensor) -> SequenceClassifierOutput:
    """Return the logits and their loss, by the settings of a network."""
    logits = network.settings["temperature"] * logits
    smoothing = network.settings["label_smoothing"]
    flat = logits.flatten(0, -2), labels.flatten()
    return SequenceClassifierOutput(
        loss=cross_entropy(*flat, label_smoothing=smoothing), logits=logits
    )


def _settings() -> dict[str, float]:
    return {"temperature": 1.0, "label_smoothing": 0.0}


class _ConvolutionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        return images + nn.functional.relu(self.norm(self.convolution(images)))


class _ConvolutionalNetwork(nn.Module):
    """Two residual blocks of a convolution and a BatchNorm, and a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(_ConvolutionBlock(width) for _ in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)
        self.settings = _settings()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        hidden = self.stem(pixel_values)
        for layer in self.layers:
            hidden = layer(hidden)
        return _classified(self, self.head(hidden.amax((2, 3))), labels)


class _Recurrence(nn.Module):
    """A recurrent layer with a residual connection."""

    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden + self.cells(hidden)[0])


class _RecurrentNetwork(nn.Module):
    """A language model of two LSTMs or GRUs, with dropout."""

    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_Recurrence(width, kind) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, VOCABULARY)
        self.settings = _settings()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        del attention_mask
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = self.dropout(layer(hidden))
        return _classified(self, self.head(hidden)[:, :-1], labels[:, 1:].contiguous())


class _AttentionBlock(nn.Module):
    """Attention whose arithmetic is in the forward, and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.first(hidden)
        query, key = self.query(normal), self.key(normal)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = hidden + self.dropout(self.out(weights @ self.value(normal)))
        return hidden + self.down(nn.functional.gelu(self.up(self.second(hidden))))


class _SequenceClassifier(nn.Module):
    """A transformer with attention of its own that tells the class of a row of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(_AttentionBlock(width) for _ in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)
        self.settings = _settings()

    def forward(self, input_ids: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        hidden = self.embedding(input_ids) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return _classified(self, self.head(hidden.mean(1)), labels)


def _labelled_tokens(generator: torch.Generator) -> dict[str, Tensor]:
    words = tokens(generator)["input_ids"]
    return {"input_ids": words, "labels": words[LENGTH // 2] * NUM_CLASSES // VOCABULARY}


class _DenseBlock(nn.Module):
    """A residual block of two linear maps, whose inner one may have a type of its own."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden).to(self.up.weight.dtype)
        return hidden + self.down(nn.functional.gelu(self.up(inner))).to(hidden.dtype)


class _Regression(nn.Module):
    """Predict a number from a few, with the mean squared error as the loss."""

    def __init__(self, width: int, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, width)
        dtypes = dtypes or (torch.float32, torch.float32)
        self.blocks = nn.ModuleList(_DenseBlock(width, dtype) for dtype in dtypes)
        self.head = nn.Linear(width, 1)

    def forward(self, values: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the predictions."""
        hidden = self.stem(values)
        for block in self.blocks:
            hidden = block(hidden)
        predicted = self.head(hidden)[:, 0]
        return SequenceClassifierOutput(
            loss=nn.functional.mse_loss(predicted, labels), logits=predicted
        )


def _mixed(width: int) -> nn.Module:
    return _Regression(width, torch.float32, torch.bfloat16)


def _numbers(generator: torch.Generator) -> dict[str, Tensor]:
    values = torch.randn(_FEATURES, generator=generator)
    noise = 0.1 * torch.randn((), generator=generator)
    return {"values": values, "labels": values[0] * values[1] + values[2:4].sin().sum() + noise}


class _Autoencoder(nn.Module):
    """A variational autoencoder of vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, width)
        float32 = torch.float32
        self.encoder, self.decoder = _DenseBlock(width, float32), _DenseBlock(width, float32)
        self.code = nn.Linear(width, 8)
        self.back = nn.Linear(4, width)
        self.head = nn.Linear(width, _FEATURES)
        self.settings = {"kl_weight": 0.1}

    def forward(self, values: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the reconstruction."""
        mean, log_variance = self.code(self.encoder(self.stem(values))).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        decoded = self.head(self.decoder(self.back(drawn)))
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean() / 2
        loss = nn.functional.mse_loss(decoded, values)
        return SequenceClassifierOutput(
            loss=loss + self.settings["kl_weight"] * divergence, logits=decoded
        )


def _correlated(generator: torch.Generator) -> dict[str, Tensor]:
    mixing = torch.linspace(-1, 1, 3 * _FEATURES).sin().view(3, _FEATURES)
    noise = 0.1 * torch.randn(_FEATURES, generator=generator)
    return {"values": torch.randn(3, generator=generator) @ mixing + noise}


class _Policy(nn.Module):
    """A policy gradient: the log-probability of an action, times its advantage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, width)
        self.blocks = nn.ModuleList(_DenseBlock(width, torch.float32) for _ in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)
        self.settings = {"temperature": 1.0}

    def forward(
        self, states: Tensor, actions: Tensor, advantages: Tensor
    ) -> SequenceClassifierOutput:
        """Return the loss and the logits of the actions."""
        hidden = self.stem(states)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.settings["temperature"] * self.head(hidden)
        chosen = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        return SequenceClassifierOutput(
            loss=-(chosen * advantages + 0.1 * entropy).mean(), logits=logits
        )


def _rewarded(generator: torch.Generator) -> dict[str, Tensor]:
    state = torch.randn(_FEATURES, generator=generator)
    action = torch.randint(NUM_CLASSES, (), generator=generator)
    is_best = float(action == state[:NUM_CLASSES].argmax())
    return {"states": state, "actions": action, "advantages": torch.tensor(is_best)}


class _Passing(nn.Module):
    """Each node gets the mean of its neighbors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        mean = edges @ self.others(nodes) / (1 + edges.sum(-1, keepdim=True))
        return nodes + nn.functional.relu(self.norm(self.own(nodes) + mean))


class _GraphNetwork(nn.Module):
    """Message passing on graphs, and a classifier of the whole graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.layers = nn.ModuleList(_Passing(width) for _ in range(2))
        self.head = nn.Linear(width + 1, NUM_CLASSES)
        self.settings = _settings()

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        hidden = self.stem(nodes)
        for layer in self.layers:
            hidden = layer(hidden, edges)
        count = edges.mean((1, 2))[:, None].to(hidden.dtype)
        return _classified(self, self.head(torch.cat([hidden.mean(1), count], -1)), labels)


class _UBlock(nn.Module):
    """A residual block of a convolution behind a GroupNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return images + self.convolution(nn.functional.silu(self.norm(images)))


class _UNet(nn.Module):
    """A U-Net that predicts the noise of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle, self.up = (_UBlock(width) for _ in range(3))
        self.join = nn.Conv2d(2 * width, width, 1)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the predicted noise."""
        wide = self.down(self.stem(pixel_values))
        small = self.middle(nn.functional.avg_pool2d(wide, 2))
        back = nn.functional.interpolate(small, scale_factor=2)
        predicted = self.head(self.up(self.join(torch.cat([wide, back], 1))))
        return SequenceClassifierOutput(
            loss=nn.functional.mse_loss(predicted, labels), logits=predicted
        )


def _noisy_image(generator: torch.Generator) -> dict[str, Tensor]:
    clean = image(generator)["pixel_values"]
    noise = torch.randn(clean.shape, generator=generator)
    return {"pixel_values": clean + noise, "labels": noise}


class _NormalizedBlock(nn.Module):
    """A linear map with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.relu(self.norm(self.linear(hidden)))


class _TabularNetwork(nn.Module):
    """A classifier of vectors with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(_FEATURES, width)
        self.blocks = nn.ModuleList(_NormalizedBlock(width) for _ in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)
        self.settings = _settings()

    def forward(self, values: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """Return the loss and the logits."""
        hidden = self.stem(values)
        for block in self.blocks:
            hidden = block(hidden)
        return _classified(self, self.head(hidden), labels)


def _table_row(generator: torch.Generator) -> dict[str, Tensor]:
    values = torch.randn(_FEATURES, generator=generator)
    return {"values": values, "labels": values[:NUM_CLASSES].argmax()}


_CLASSES: dict[str, Any] = {
    "num_targets": NUM_CLASSES,
    "settings": ("temperature", "label_smoothing"),
}
_LANGUAGE: dict[str, Any] = {
    "row": tokens,
    "inputs": "input_ids",
    "num_targets": VOCABULARY,
    "layers": ("layers.0", "layers.1"),
    "settings": ("temperature", "label_smoothing", "dropout", "mode"),
    "dtypes": ("float32",),
}
_BLOCKS: dict[str, Any] = {"layers": ("blocks.0", "blocks.1")}

PLAIN_NETWORKS = {
    "cnn": Architecture(
        make=_ConvolutionalNetwork,
        row=image,
        inputs="pixel_values",
        layers=("layers.0", "layers.1"),
        buffer="norm.running_var",
        has_separate_rows=False,
        **_CLASSES | {"settings": ("temperature", "label_smoothing", "mode")},
    ),
    "lstm": Architecture(make=functools.partial(_RecurrentNetwork, kind=nn.LSTM), **_LANGUAGE),
    "custom attention": Architecture(
        make=_SequenceClassifier,
        row=_labelled_tokens,
        inputs="input_ids",
        query="query",
        **_BLOCKS,
        **_CLASSES | {"settings": ("temperature", "label_smoothing", "dropout", "mode")},
    ),
    "regression": Architecture(
        make=_Regression, row=_numbers, inputs="values", ignores=False, **_BLOCKS
    ),
    "mixed dtypes": Architecture(
        make=_mixed,
        row=_numbers,
        inputs="values",
        ignores=False,
        dtypes=("float32",),
        is_mixed=True,
        **_BLOCKS,
    ),
    "autoencoder": Architecture(
        make=_Autoencoder,
        row=_correlated,
        inputs="values",
        layers=("encoder", "decoder"),
        settings=("kl_weight",),
    ),
    "gru": Architecture(make=functools.partial(_RecurrentNetwork, kind=nn.GRU), **_LANGUAGE),
    "unet": Architecture(
        make=_UNet,
        row=_noisy_image,
        inputs="pixel_values",
        ignores=False,
        layers=("down", "middle", "up"),
    ),
    "graph": Architecture(
        make=_GraphNetwork,
        row=graph,
        inputs="nodes",
        layers=("layers.0", "layers.1"),
        **_CLASSES,
    ),
    "policy": Architecture(
        make=_Policy,
        row=_rewarded,
        inputs="states",
        ignores=False,
        settings=("temperature",),
        **_BLOCKS,
    ),
    "table": Architecture(
        make=_TabularNetwork,
        row=_table_row,
        inputs="values",
        buffer="norm.running_var",
        has_separate_rows=False,
        **_BLOCKS,
        **_CLASSES | {"settings": ("temperature", "label_smoothing", "mode")},
    ),
}
"""Architectures in plain torch, by name."""
