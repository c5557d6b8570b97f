"""Follow the batches of a Trainer's data loader, which may be the user's own."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from accelerate.data_loader import SkipBatchSampler
from torch.utils.data import DataLoader, IterableDataset, Sampler

from mfwrap.accelerate.data_workers import worker_start
from mfwrap.trainer.data.stateful_loader import followed_rows, stateful_base
from mfwrap.trainer.lookalikes import lookalike

Follow = Callable[[Iterable[Any]], Iterator[Any]]
"""Function that takes the batches of a batch sampler, lists of indices, and yields those to use."""


_LIBRARIES = {"accelerate", "torch", "torchdata"}


@final
class _Batches(IterableDataset[Any]):
    """The batches of a loader with an iteration of its own.

    Args:
        loader: The loader.
        num_before: Number of batches before the first one that the loader yields; each is ``None``.
    """

    def __init__(self, loader: Any, num_before: int) -> None:
        self._loader = loader
        self._num_before = num_before

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(itertools.repeat(None, self._num_before), self._loader)


def skippable_loader(loader: Any, epoch: int, *, num_before: int = 0) -> Any:
    """Return a loader whose first batches ``skip_first_batches`` of accelerate can skip.

    That function makes a new loader of torch or accelerate from the parts of the old one. So a
    loader with an iteration of its own, which repeats or changes the batches of another loader,
    would lose it in a resumed epoch. Such a loader is returned as a data set of batches: those to
    skip are read and thrown away.

    Args:
        loader: Any iterable. One with the iteration of torch or accelerate is returned unchanged.
        epoch: Number of the epoch, for loaders and samplers that have ``set_epoch``.
        num_before: Number of batches of the epoch before the first one that the loader yields. A
            loader that has restored its place yields none of those to skip.
    """
    iterate = getattr(type(loader), "__iter__", None)
    if not num_before and getattr(iterate, "__module__", "").partition(".")[0] in _LIBRARIES:
        return loader
    # The Trainer tells this to the loader that it iterates over, and to the sampler of a shard.
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for part in (loader, sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    # With a generator of its own, the outer loader draws no random number for the inner one.
    settings: Any = {"batch_size": None, "collate_fn": _unchanged, "generator": torch.Generator()}
    return DataLoader(_Batches(loader, num_before), **settings)


def _unchanged(batch: Any) -> Any:
    return batch


def followed_loader(loader: Any, follow: Follow, *, num_skipped: int = 0) -> Any:
    """Return a view of a data loader whose batches are followed; the loader stays as it is.

    The view shares all attributes with the loader, for example its persistent workers. Its workers
    ignore the signals of launchers (`mfwrap.accelerate.data_workers`).

    Args:
        loader: Data loader of torch or accelerate. Any other object is returned unchanged.
        follow: Function for the batches of the batch sampler, called for each iteration. If the
            loader has no batch sampler of torch's class ``Sampler``, it is not called. A loader
            that keeps its place by a state calls it with ``None`` for each batch.
        num_skipped: Number of batches that accelerate's ``skip_first_batches`` skips in addition to
            its argument.
    """
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base, DataLoader):
        return loader
    start = worker_start(base)
    members: dict[str, Any] = {"worker_init_fn": property(lambda _: start)}
    if stateful_base(loader) is not None:
        members["__iter__"] = followed_rows(loader, base, follow)
        # accelerate asks for the state at each batch, and nobody reads its copy. On a rank that
        # reads no rows itself, the first state would start workers and draw a random number.
        members["state_dict"] = lambda _: {}
    elif isinstance(base.batch_sampler, Sampler):
        sampler = _followed_sampler(base.batch_sampler, follow)
        members["batch_sampler"] = property(lambda _: sampler)
    view = lookalike(base, **members)
    if base is loader:
        return view
    members = {"base_dataloader": property(lambda _: view)}
    if num_skipped:
        # Iterating uses the sampler of the base; `skip_first_batches` reads that of the loader.
        ahead = SkipBatchSampler(view.batch_sampler, num_skipped)
        members["batch_sampler"] = property(lambda _: ahead)
    return lookalike(loader, **members)


def _followed_sampler(sampler: Any, follow: Follow) -> Any:
    batches = type(sampler).__iter__
    return lookalike(sampler, __iter__=lambda view: follow(batches(view)))
