"""What a recipe cannot carry over from a MindFormers file, although it changes the numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from mfwrap.runner.document import Path

LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "architecture": "a part of the network that transformers' model does not have",
        "callbacks": "classes of the file's author, which may do anything",
        "attention": "which tokens attend to which",
        "dropout": "a dropout that transformers' model does not have",
        "gradients": "how gradients of several processes are combined",
        "layer_decay": "the learning rate of position embeddings",
        "lora": "an adapter, and which weights are frozen",
        "moe": "how experts are chosen, balanced or skipped",
        "lr_groups": "learning rates of groups of parameters whose names are unknown",
        "mtp": "the prediction of several tokens",
        "optimizer": "which matrices Muon orthogonalizes",
        "precision": "a dtype that torch cannot compute in",
        "quantization": "quantized weights",
        "resume": "the state of an earlier run",
        "weight_decay": "which weights have weight decay",
        "weights": "the weights that the training starts from",
    }
)
"""What each name of a loss stands for."""


@final
@dataclass(frozen=True)
class Loss:
    """A part of a MindFormers file's meaning that its recipe would lose."""

    name: str
    """What ``--accept`` takes, a key of `LOSSES`. Losses of one kind share a name."""

    path: Path
    """Place in the file."""

    says: str
    """What the file asks for, and what the recipe trains instead."""
