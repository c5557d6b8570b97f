"""An input that is shown, and how to read inputs from held-out rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mfwrap.arguments import described
from mfwrap.tensors.wrappers import is_instance_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """An input whose result is shown."""

    inputs: Mapping[str, Any]
    """Arguments of the model for a batch of one row; tensors are on the CPU."""

    text: str
    """The input as a reader sees it."""

    reference: str | None = None
    """The expected result; ``None`` if it is unknown."""

    image: str | None = None
    """Small PNG in base 64; ``None`` if the input has no image."""


def held_out_batches(loader: Any, number: int) -> list[Any]:
    """Return the first rows of a data loader's data set, each as a batch of its own.

    The data loader itself is not advanced.

    Args:
        loader: The data loader of an evaluation.
        number: Largest number of rows.

    Raises:
        ValueError: If the data set is neither map-style nor an ``IterableDataset`` of datasets.
    """
    data = loader.dataset
    if is_instance_of(data, "datasets", "IterableDataset"):
        rows = list(data.take(number))
    elif callable(getattr(data, "__getitem__", None)) and callable(getattr(data, "__len__", None)):
        rows = [data[index] for index in range(min(number, len(data)))]
    else:
        msg = (
            "SampleMonitor needs `prompts`, or held-out rows in a data set with `__getitem__` and "
            f"`__len__`, got {described(data):.200}"
        )
        raise ValueError(msg)
    return [loader.collate_fn([row]) for row in rows]


def text_tokenizer(processing_class: Any) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a Trainer's ``processing_class``; ``None`` if it has none."""
    found = getattr(processing_class, "tokenizer", processing_class)
    return found if isinstance(found, PreTrainedTokenizerBase) else None


def decoded(ids: Tensor | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return tokens as text without special tokens; without a tokenizer, their numbers."""
    numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if tokenizer is None:
        return " ".join(map(str, numbers))
    return str(tokenizer.decode(numbers, skip_special_tokens=True)).strip()


def on_device_of(network: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's arguments with their tensors on the device of the model."""
    device = next(network.parameters()).device
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
