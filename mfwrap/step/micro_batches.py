"""Micro-batches: calls of the network, split from one batch or given as a sequence."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["NetworkCall", "calls_of", "split_calls"]


class NetworkCall(NamedTuple):
    """Arguments of one call of the network."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def calls_of(micro_batches: Sequence[Any]) -> list[NetworkCall]:
    """Read micro-batches as a data loader yields them.

    Args:
        micro_batches: At least one. A mapping becomes keywords, a tuple positional arguments,
            anything else one argument.

    Raises:
        TypeError: If `micro_batches` is not a sequence.
        ValueError: If it is empty.
    """
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str):
        msg = f"`micro_batches` must be a sequence, got {type(micro_batches).__name__}"
        raise TypeError(msg)
    if not micro_batches:
        msg = "`micro_batches` must hold at least one micro-batch, got none"
        raise ValueError(msg)
    return [_call_of(micro_batch) for micro_batch in micro_batches]


def _call_of(micro_batch: Any) -> NetworkCall:
    if isinstance(micro_batch, Mapping):
        return NetworkCall((), dict(micro_batch))
    if isinstance(micro_batch, tuple):
        return NetworkCall(tuple(micro_batch), {})
    return NetworkCall((micro_batch,), {})


def split_calls(
    arguments: tuple[Any, ...], keywords: dict[str, Any], num_micro_batches: int
) -> list[NetworkCall]:
    """Split the arguments of one call into equal parts.

    Source: MindSpore, ``nn.GradAccumulationCell``.

    Args:
        arguments: Positional arguments.
        keywords: Keyword arguments.
        num_micro_batches: Tensors with at least one dimension, also those in mappings, lists and
            tuples, are split along the first in this many parts; anything else goes to every
            micro-batch.

    Raises:
        ValueError: If a tensor's first dimension does not divide.
    """
    if num_micro_batches == 1:
        return [NetworkCall(arguments, keywords)]
    split_arguments = [
        _split(f"inputs[{index}]", value, num_micro_batches)
        for index, value in enumerate(arguments)
    ]
    split_keywords = {
        name: _split(name, value, num_micro_batches) for name, value in keywords.items()
    }
    return [
        NetworkCall(
            tuple(parts[index] for parts in split_arguments),
            {name: parts[index] for name, parts in split_keywords.items()},
        )
        for index in range(num_micro_batches)
    ]


def _split(name: str, value: Any, num_parts: int) -> Sequence[Any]:
    """Return `num_parts` parts of an argument."""
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.shape[0] % num_parts:
            msg = (
                f"the first dimension of `{name}` must be divisible by "
                f"gradient_accumulation_steps={num_parts}, got shape {tuple(value.shape)}"
            )
            raise ValueError(msg)
        return value.tensor_split(num_parts)
    if isinstance(value, Mapping):
        items = {key: _split(f"{name}[{key!r}]", v, num_parts) for key, v in value.items()}
        return [{key: parts[i] for key, parts in items.items()} for i in range(num_parts)]
    if isinstance(value, (list, tuple)):
        elements = [_split(f"{name}[{i}]", v, num_parts) for i, v in enumerate(value)]
        rebuild = getattr(value, "_make", list if isinstance(value, list) else tuple)
        return [rebuild([parts[i] for parts in elements]) for i in range(num_parts)]
    return [value] * num_parts
