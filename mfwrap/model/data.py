"""Batches of `Model`: epochs of a known length, on the training device."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from accelerate.utils import find_device, send_to_device
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from mfwrap.arguments import check_bool, described
from mfwrap.step.forward import NetworkCall

__all__ = ["Batches", "check_sink_size", "pair_of"]


def check_sink_size(sink_size: object, *, sink_mode: object) -> None:
    """Check the number of batches of an epoch in sink mode.

    Raises:
        TypeError: If `sink_size` is not an int, or `sink_mode` not a bool.
        ValueError: If it is 0 or below -1, or is given without sink mode.
    """
    check_bool("dataset_sink_mode", sink_mode)
    if isinstance(sink_size, bool) or not isinstance(sink_size, int):
        msg = f"`sink_size` must be an int, got {described(sink_size)}"
        raise TypeError(msg)
    if sink_size == 0 or sink_size < -1:
        msg = f"`sink_size` must be -1 or > 0, got {sink_size}"
        raise ValueError(msg)
    if sink_size != -1 and not sink_mode:
        msg = f"`sink_size` must be -1 with dataset_sink_mode=False, got {sink_size}"
        raise ValueError(msg)


@final
class Batches:
    """A dataset in epochs, each batch as a call of the network.

    On several ranks a ``DataLoader`` that accelerate has not prepared is divided among them; any
    other iterable is each rank's own.

    Args:
        name: Of the dataset, for messages.
        dataset: Yields batches. A tuple or list is a batch's columns, a mapping its named columns,
            anything else its one column.
        accelerator: Knows the ranks.
        device: Where batches go.
        sink_mode: Copy batches to the device without waiting for them.
        sink_size: Batches of an epoch, the next one going on where the last has ended; -1 for one
            pass over the dataset.
        even: Give all ranks equally many batches, some of them twice.

    Raises:
        TypeError: If `dataset` yields nothing, or has no length and `sink_size` is -1.
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
        sink_size: int = -1,
        even: bool = True,
    ) -> None:
        if not isinstance(dataset, Iterable):
            msg = f"`{name}` must yield batches, got {described(dataset)}"
            raise TypeError(msg)
        self.dataset = _divided(dataset, accelerator, even=even)
        """What is iterated."""
        self._name = name
        self._device = device
        self._sink_mode = sink_mode
        self.sinks = sink_size > 0
        """Whether an epoch is something else than one pass over the dataset."""
        self._pass: Iterator[Any] | None = None
        self._num_passes = 0
        self.num_batches = sink_size if self.sinks else self._length()
        """Batches of an epoch."""

    def _length(self) -> int:
        if not has_length(self.dataset):
            msg = (
                f"`{self._name}` must have a length, got {type(self.dataset).__name__} without "
                "one; dataset_sink_mode=True and `sink_size` say how long an epoch is"
            )
            raise TypeError(msg)
        length = len(self.dataset)
        if length == 0:
            raise self._is_empty()
        return length

    def _is_empty(self) -> ValueError:
        return ValueError(f"`{self._name}` must yield batches, got none")

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch, if the dataset says so."""
        size = getattr(self.dataset, "batch_size", None)
        return size if isinstance(size, int) else None

    def epoch(self) -> Iterator[NetworkCall]:
        """Yield the batches of the next epoch.

        Raises:
            ValueError: If the dataset is empty.
        """
        if not self.sinks:
            yield from map(self._call, self._next_pass())
            return
        for _ in range(self.num_batches):
            yield self._call(self._next_batch())

    def _next_batch(self) -> Any:
        if self._pass is not None:
            for batch in self._pass:
                return batch
        self._pass = self._next_pass()
        for batch in self._pass:
            return batch
        raise self._is_empty()

    def _next_pass(self) -> Iterator[Any]:
        # The order of accelerate's loaders comes from the number of the pass.
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


def pair_of(name: str, call: NetworkCall) -> NetworkCall:
    """Return data and label of a batch, which a loss function is for.

    Raises:
        ValueError: If the batch has not two columns.
    """
    columns = (*call.arguments, *call.keywords.values())
    if len(columns) != 2:
        msg = f"`{name}` must have two columns, data and label, with `loss_fn`, got {len(columns)}"
        raise ValueError(msg)
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
