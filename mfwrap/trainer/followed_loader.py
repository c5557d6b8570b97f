"""Follow the batches of a Trainer's data loader, which may be the user's own."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerate.data_loader import SkipBatchSampler
from torch.utils.data import DataLoader, Sampler

from mfwrap.accelerate.data_workers import worker_start
from mfwrap.trainer.views import view_of

Follow = Callable[[Iterable[Any]], Iterator[Any]]
"""Function that takes the batches of a batch sampler, lists of indices, and yields those to use."""


def followed_loader(loader: Any, follow: Follow, *, num_skipped: int = 0) -> Any:
    """Return a view of a data loader whose batches are followed; the loader stays as it is.

    The view shares all attributes with the loader, for example its persistent workers. Its workers
    ignore the signals of launchers (`mfwrap.accelerate.data_workers`).

    Args:
        loader: Data loader of torch or accelerate. Any other object is returned unchanged.
        follow: Function for the batches of the batch sampler, called for each iteration. If the
            loader has no batch sampler of torch's class ``Sampler``, it is not called.
        num_skipped: Number of batches that accelerate's ``skip_first_batches`` skips in addition to
            its argument.
    """
    base = getattr(loader, "base_dataloader", loader)
    if not isinstance(base, DataLoader):
        return loader
    start = worker_start(base)
    members: dict[str, Any] = {"worker_init_fn": property(lambda _: start)}
    if isinstance(base.batch_sampler, Sampler):
        sampler = _followed_sampler(base.batch_sampler, follow)
        members["batch_sampler"] = property(lambda _: sampler)
    view = view_of(base, **members)
    if base is loader:
        return view
    members = {"base_dataloader": property(lambda _: view)}
    if num_skipped:
        # Iterating uses the sampler of the base; `skip_first_batches` reads that of the loader.
        ahead = SkipBatchSampler(view.batch_sampler, num_skipped)
        members["batch_sampler"] = property(lambda _: ahead)
    return view_of(loader, **members)


def _followed_sampler(sampler: Any, follow: Follow) -> Any:
    batches = type(sampler).__iter__
    return view_of(sampler, __iter__=lambda view: follow(batches(view)))
