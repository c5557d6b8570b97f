"""Batches of `Model`: split a dataset into epochs, and move batches to the training device."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from accelerate.utils import find_device, send_to_device
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from mfwrap.arguments import check_bool, check_int, described
from mfwrap.step.calls import NetworkCall


@final
class Batches:
    """Split a dataset into epochs, and convert each batch to the arguments of a network call.

    On several ranks, a ``DataLoader`` that accelerate has not prepared is divided among the ranks.
    Any other iterable must yield each rank's own batches.

    Args:
        name: Name of the dataset in error messages.
        dataset: Yields batches. A batch is a tuple or list of columns, a mapping of named columns,
            or a single column.
        accelerator: Supplies the rank and the number of ranks.
        device: Device that batches are moved to.
        sink_mode: Copy batches to the device without synchronizing.
        sink_size: Batches per epoch; each epoch continues where the previous one ended. -1 for one
            pass over the dataset per epoch; ``None`` for one pass if the user cannot set the size.
        even: Whether samples are repeated so that each rank gets the same number of batches.

    Raises:
        TypeError: If `dataset` is not iterable, or has no length while `sink_size` is not > 0.
        ValueError: If `dataset` is empty.
    """

    def __init__(
        self,
        name: str,
        dataset: Iterable[Any],
        accelerator: Accelerator,
        device: torch.device,
        *,
        sink_mode: bool = False,
        sink_size: int | None = None,
        even: bool = True,
    ) -> None:
        if not isinstance(dataset, Iterable):
            msg = f"`{name}` must yield batches, got {described(dataset)}"
            raise TypeError(msg)
        self.dataset = _divided(dataset, accelerator, even=even)
        """The dataset, or this rank's part of it."""
        self._name = name
        self._device = device
        self._sink_mode = sink_mode
        self.sinks = sink_size is not None and sink_size > 0
        """Whether an epoch has `sink_size` batches. If False, it is one pass over the dataset."""
        self._passes = self._all_passes()
        self._num_passes = 0
        self.num_batches = (
            sink_size
            if sink_size is not None and self.sinks
            else self._length(
                "pass a list of batches, or another dataset with `__len__`"
                if sink_size is None
                else "pass `dataset_sink_mode=True` and `sink_size`, the batches per epoch"
            )
        )
        """Batches per epoch."""

    def _length(self, advice: str) -> int:
        if not has_length(self.dataset):
            msg = (
                f"`{self._name}` must have a length, got {type(self.dataset).__name__} without "
                f"one; {advice}"
            )
            raise TypeError(msg)
        length = len(self.dataset)
        if length == 0:
            raise self._empty_error()
        return length

    def _empty_error(self) -> ValueError:
        return ValueError(f"`{self._name}` must yield batches, got none")

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; ``None`` if the dataset has no integer ``batch_size``."""
        size = getattr(self.dataset, "batch_size", None)
        return size if isinstance(size, int) else None

    def epoch(self) -> Iterator[NetworkCall]:
        """Yield the batches of the next epoch.

        Raises:
            ValueError: If the dataset is empty.
        """
        sunk = itertools.islice(self._passes, self.num_batches)
        yield from map(self._call, sunk if self.sinks else self._next_pass())

    def _all_passes(self) -> Iterator[Any]:
        """Yield the batches of one pass after the other."""
        while True:
            is_empty = True
            for batch in self._next_pass():
                is_empty = False
                yield batch
            if is_empty:
                raise self._empty_error()

    def _next_pass(self) -> Iterator[Any]:
        # accelerate's loaders may shuffle by the epoch number, so give each pass a new number.
        if isinstance(self.dataset, (DataLoaderShard, DataLoaderDispatcher)):
            self.dataset.set_epoch(self._num_passes)
        self._num_passes += 1
        return iter(self.dataset)

    def _call(self, batch: Any) -> NetworkCall:
        if self._device.type != "cpu" or find_device(batch) != self._device:
            batch = send_to_device(batch, self._device, non_blocking=self._sink_mode)
        if isinstance(batch, Mapping):
            return NetworkCall((), dict(batch))
        columns = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        return NetworkCall(columns, {})


def _divided(dataset: Iterable[Any], accelerator: Accelerator, *, even: bool) -> Any:
    ready = isinstance(dataset, (DataLoaderShard, DataLoaderDispatcher))
    if accelerator.num_processes == 1 or ready or not isinstance(dataset, DataLoader):
        return dataset
    return prepare_data_loader(
        dataset,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        rng_types=["generator"],
        even_batches=even,
    )


def pair_of(name: str, call: NetworkCall) -> NetworkCall:
    """Return the two columns of a batch, data and label, as positional arguments.

    Args:
        name: Name of the dataset in error messages.
        call: The batch.

    Raises:
        ValueError: If the batch does not have exactly two columns.
    """
    columns = (*call.arguments, *call.keywords.values())
    if len(columns) != 2:
        msg = (
            f"`{name}` must have two columns, data and label, because `loss_fn` is given, "
            f"got {len(columns)}"
        )
        raise ValueError(msg)
    return NetworkCall(columns, {})


def check_sink_size(sink_size: object, *, sink_mode: object) -> None:
    """Check the number of batches per epoch in sink mode.

    Raises:
        TypeError: If `sink_size` is not an int, or `sink_mode` is not a bool.
        ValueError: If `sink_size` is 0 or below -1, or is not -1 without sink mode.
    """
    check_bool("dataset_sink_mode", sink_mode)
    if check_int("sink_size", sink_size, minimum=-1) == 0:
        msg = "`sink_size` must be -1 or > 0, got 0"
        raise ValueError(msg)
    if sink_size != -1 and not sink_mode:
        msg = f"`sink_size` must be -1 with dataset_sink_mode=False, got {sink_size}"
        raise ValueError(msg)
