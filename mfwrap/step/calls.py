"""Turn micro-batches into calls of the network."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor


class NetworkCall(NamedTuple):
    """Arguments of one call of the network: one micro-batch."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def calls_of(micro_batches: Sequence[Any]) -> list[NetworkCall]:
    """Turn micro-batches, as a data loader yields them, into calls of the network.

    Args:
        micro_batches: At least one micro-batch. A mapping becomes keyword arguments, a tuple
            positional arguments, and anything else a single argument.

    Raises:
        TypeError: If `micro_batches` is not a sequence.
        ValueError: If `micro_batches` is empty.
    """
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str):
        msg = f"`micro_batches` must be a sequence, got {type(micro_batches).__name__}"
        raise TypeError(msg)
    if not micro_batches:
        msg = "`micro_batches` must hold at least one micro-batch, got none"
        raise ValueError(msg)
    return [_call_of(micro_batch) for micro_batch in micro_batches]


def split_calls(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    num_micro_batches: int,
    not_split: Collection[str | int] = (),
) -> list[NetworkCall]:
    """Split the arguments of one call into micro-batches of equal size.

    Source: MindSpore, ``nn.GradAccumulationCell``.

    Args:
        arguments: Positional arguments.
        keywords: Keyword arguments.
        num_micro_batches: Number of micro-batches. Tensors with at least one dimension are split
            along the first dimension, also inside mappings, lists and tuples. Everything else goes
            to each micro-batch.
        not_split: As in `StepConfig`.

    Raises:
        ValueError: If the first dimensions of the tensors to split differ, or are not divisible by
            `num_micro_batches`.
    """
    if num_micro_batches == 1:
        return [NetworkCall(arguments, keywords)]
    split = _Split(num_micro_batches, frozenset(not_split))
    split_arguments = [
        split.whole(value) if index in split.not_split else split(f"inputs[{index}]", value)
        for index, value in enumerate(arguments)
    ]
    split_keywords = split.of_mapping(keywords, "{}")
    return [
        NetworkCall(
            tuple(parts[index] for parts in split_arguments),
            {name: parts[index] for name, parts in split_keywords.items()},
        )
        for index in range(num_micro_batches)
    ]


def _call_of(micro_batch: Any) -> NetworkCall:
    if isinstance(micro_batch, Mapping):
        return NetworkCall((), dict(micro_batch))
    if isinstance(micro_batch, tuple):
        return NetworkCall(tuple(micro_batch), {})
    return NetworkCall((micro_batch,), {})


@final
class _Split:
    """Split the values of one call into parts, whose tensors must have equal first dimensions.

    Args:
        num_parts: Number of parts.
        not_split: Names and positions of values that go to each part whole.
    """

    def __init__(self, num_parts: int, not_split: frozenset[str | int]) -> None:
        self._num_parts = num_parts
        self.not_split = not_split
        self._first: tuple[str, int] | None = None

    def __call__(self, name: str, value: Any) -> Sequence[Any]:
        """Return the parts of a value: slices of its tensors, and all other values whole."""
        if isinstance(value, Tensor) and value.dim() > 0:
            self._check(name, value)
            return value.tensor_split(self._num_parts)
        parts = range(self._num_parts)
        if isinstance(value, Mapping):
            items = self.of_mapping(value, f"{name}[{{!r}}]")
            return [{key: split[i] for key, split in items.items()} for i in parts]
        if isinstance(value, (list, tuple)):
            elements = [self(f"{name}[{i}]", v) for i, v in enumerate(value)]
            rebuild = getattr(value, "_make", list if isinstance(value, list) else tuple)
            return [rebuild([split[i] for split in elements]) for i in parts]
        return self.whole(value)

    def of_mapping(self, values: Mapping[Any, Any], template: str) -> dict[Any, Sequence[Any]]:
        """Return the parts of each value; `template` makes the name of a value from its key."""
        return {
            key: self.whole(value)
            if isinstance(key, str) and key in self.not_split
            else self(template.format(key), value)
            for key, value in values.items()
        }

    def whole(self, value: Any) -> Sequence[Any]:
        """Return the value itself as each part."""
        return [value] * self._num_parts

    def _check(self, name: str, tensor: Tensor) -> None:
        size = tensor.shape[0]
        first, expected = self._first = self._first or (name, size)
        if size != expected:
            msg = (
                "the tensors of a batch must have equal first dimensions to be split for "
                f"gradient_accumulation_steps={self._num_parts}, got {expected} for `{first}` and "
                f"{size} for `{name}`; name what does not hold rows in `not_split`, or pass "
                "micro-batches to `step`"
            )
            raise ValueError(msg)
        if size % self._num_parts:
            msg = (
                f"the first dimension of `{name}` must be divisible by "
                f"gradient_accumulation_steps={self._num_parts}, got shape {tuple(tensor.shape)}"
            )
            raise ValueError(msg)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, also those inside mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from tensors_in(element)
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)
