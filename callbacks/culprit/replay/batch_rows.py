"""Split the arguments of a call of the network into the rows of its batch."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.callbacks.culprit.replay.recorder import RecordedCall, tensors_in
from mfwrap.callbacks.culprit.replay.targets import IGNORED, is_target

_TOKENS = ("input_ids", "decoder_input_ids", "tokens")
"""Names under which a batch may hold texts as token ids."""


@final
class BatchRows:
    """The rows of one micro-batch.

    Tensors whose first dimension is the number of rows are split. So are sequences of this length
    that hold no such tensor. Everything else, such as positions of shape ``(1, length)``, is passed
    whole.

    Args:
        call: Recorded call.

    Raises:
        ValueError: If the arguments hold no tensor with a first dimension.
    """

    def __init__(self, call: RecordedCall) -> None:
        self._call = call
        self._arguments = call.arguments
        sizes = [len(tensor) for _, tensor in tensors_in(self._arguments) if tensor.dim() > 0]
        if not sizes:
            msg = "the network's arguments hold no batch"
            raise ValueError(msg)
        # `most_common` returns the first of several equally frequent sizes, which is usually that
        # of the network's first argument.
        self.num_rows = Counter(sizes).most_common(1)[0][0]

    def take(self, rows: Sequence[int]) -> RecordedCall:
        """Return the call with these rows only, in this order."""
        positional = tuple(self._taken(value, rows) for value in self._call.positional)
        keywords = {name: self._taken(value, rows) for name, value in self._call.keywords.items()}
        return dataclasses.replace(self._call, positional=positional, keywords=keywords)

    def _taken(self, value: Any, rows: Sequence[int]) -> Any:
        if isinstance(value, Tensor):
            if value.dim() == 0 or len(value) != self.num_rows:
                return value
            return value.detach()[torch.tensor(rows, device=value.device)]
        if isinstance(value, Mapping):
            split = {key: self._taken(item, rows) for key, item in value.items()}
            if type(value) is dict:
                return split
            # Networks may read a batch by attribute, so keep its class.
            result: Any = copy.copy(value)
            for key, item in split.items():
                result[key] = item
            return result
        return self._taken_items(value, rows) if isinstance(value, (list, tuple)) else value

    def _taken_items(self, value: Any, rows: Sequence[int]) -> Any:
        sizes = [len(tensor) for _, tensor in tensors_in(value) if tensor.dim() > 0]
        if len(value) == self.num_rows and self.num_rows not in sizes:
            return type(value)(value[row] for row in rows)
        items = [self._taken(item, rows) for item in value]
        is_named = hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)

    def tokens(self, row: int) -> list[int]:
        """Return the tokens of a row; empty if no tokens are recognized.

        Synchronizes with the device.
        """
        for name, tensor in tensors_in(self._arguments):
            is_of_rows = tensor.dim() == 2 and len(tensor) == self.num_rows
            if name.rpartition(".")[2] in _TOKENS and is_of_rows:
                return [int(token) for token in tensor[row].tolist()]
        return []

    def num_targets(self) -> list[tuple[int, ...]]:
        """Return ways to count the targets of each row; empty if no targets are recognized.

        The second way leaves out the first target of each row: a model that predicts the next token
        does not predict the first. Synchronizes with the device.
        """
        for name, tensor in tensors_in(self._arguments):
            if is_target(name, tensor) and tensor.dim() > 0 and len(tensor) == self.num_rows:
                counted = tensor.reshape(self.num_rows, -1) != IGNORED
                ways = [counted, counted[:, 1:]] if counted.shape[1] > 1 else [counted]
                return [tuple(way.sum(dim=1).tolist()) for way in ways]
        return []
