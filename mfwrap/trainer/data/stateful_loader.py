"""Keep the place in iterable data by torchdata's ``StatefulDataLoader``, which accelerate uses."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import is_torchdata_stateful_dataloader_available
from torch.utils.data import IterableDataset

from mfwrap.accelerate.attributes import replaced
from mfwrap.arguments import callers_stacklevel
from mfwrap.compatibility.foreign import ReleaseError


def check_stateful_data(dataset: Any) -> None:
    """Check that the loader of a data set can keep its place by a state.

    Args:
        dataset: Training data; ``None`` if there are none.

    Raises:
        ReleaseError: If torchdata is not installed, or is too old.
        ValueError: If the data set is not iterable.
    """
    if not is_torchdata_stateful_dataloader_available():
        msg = "`use_stateful_dataloader` needs torchdata 0.8 or newer; pip install torchdata"
        raise ReleaseError(msg)
    if dataset is not None and not isinstance(dataset, IterableDataset):
        msg = (
            "`use_stateful_dataloader` needs an iterable data set, got "
            f"{type(dataset).__name__}; leave it out: a data set with indices resumes at its row"
        )
        raise ValueError(msg)


def new_stateful_loader(accelerator: Any, make: Callable[[], Any]) -> Any:
    """Return the loader that `make` prepares, with torchdata's loader inside.

    Args:
        accelerator: Accelerator that prepares the loader.
        make: Function that returns the prepared loader.
    """
    with replaced(accelerator.dataloader_config, use_stateful_dataloader=True):
        loader = make()
    base = stateful_base(loader)
    if base is not None:
        # accelerate has asked for the first state, so the workers have started already, without
        # the function that makes them ignore signals. Start them again in the first epoch.
        base.load_state_dict({})
    return loader


def stateful_base(loader: Any) -> Any | None:
    """Return torchdata's loader inside of a prepared loader of iterable data, or ``None``."""
    base: Any = getattr(loader, "base_dataloader", None)
    is_stateful = getattr(loader, "use_stateful_dataloader", False)
    return base if is_stateful and isinstance(base.dataset, IterableDataset) else None


def check_loader(loader: Any) -> None:
    """Check that a loader keeps a state that can be saved, and warn of a shuffle buffer.

    Args:
        loader: Loader of the training.

    Raises:
        ValueError: If the loader keeps no state, or JSON cannot hold a part of it.
    """
    if stateful_base(loader) is None:
        msg = (
            "`use_stateful_dataloader` needs the data loader of the Trainer's own "
            f"`get_train_dataloader`, got {type(loader).__name__}; leave it out with a data loader "
            "of your own"
        )
        raise ValueError(msg)
    check_place(loader.dl_state_dict)
    if _has_shuffle_buffer(loader.dataset):
        warnings.warn(
            "a resume with `use_stateful_dataloader` leaves out the rows that were in the shuffle "
            "buffer of the data set at the checkpoint, because datasets does not save them; leave "
            "`use_stateful_dataloader` out to resume exactly, by reading the rows again",
            stacklevel=callers_stacklevel(),
        )


def check_place(state: Any) -> None:
    """Check that a state of a loader can be saved, and is the same when it is read again.

    Raises:
        ValueError: If JSON cannot hold a part of the state.
    """
    if (found := _unstorable(state)) is not None:
        msg = (
            f"the place in the training data cannot be saved, because {found}; JSON holds numbers, "
            "texts, booleans, None, lists, and dicts with texts as keys: change `state_dict` of "
            "the data set, or leave `use_stateful_dataloader` out"
        )
        raise ValueError(msg)


def _unstorable(value: Any, path: str = "") -> str | None:
    """Return which part of a state JSON cannot hold, and why; ``None`` if it can hold all."""
    if isinstance(value, Mapping):
        if others := [key for key in value if not isinstance(key, str)]:
            return f"{path[1:] or 'the state'} has the key {others[0]!r:.80}"
        parts = (_unstorable(each, f"{path}.{key}") for key, each in value.items())
        return next((found for found in parts if found), None)
    if isinstance(value, list):
        parts = (_unstorable(each, f"{path}[{number}]") for number, each in enumerate(value))
        return next((found for found in parts if found), None)
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    return f"{path[1:] or 'the state'} is a {type(value).__name__}"


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether an iterable set of datasets, or one that it is made of, has a buffer."""
    waiting = [dataset, getattr(dataset, "dataset", None)]
    for one in waiting:
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return True
        for value in getattr(one, "__dict__", {}).values():
            parts = value if isinstance(value, list) else [value]
            waiting += [each for each in parts if type(each).__module__ == _OF_DATASETS]
    return False


_OF_DATASETS = "datasets.iterable_dataset"


def followed_rows(
    loader: Any, base: Any, follow: Callable[[Iterable[Any]], Iterator[Any]]
) -> Callable[[Any], Iterator[Any]]:
    """Return an ``__iter__`` for a view of torchdata's loader, whose batches are followed.

    Args:
        loader: The prepared loader.
        base: torchdata's loader inside of it.
        follow: Function that yields before each batch of the rank. accelerate's dispatcher reads a
            batch for each rank at once.
    """
    at_once = 1
    if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches:
        at_once = loader.state.num_processes
    iterate = type(base).__iter__

    def rows(view: Any) -> Iterator[Any]:
        batches = iterate(view)
        for _ in follow(itertools.repeat(None)):
            for _ in range(at_once):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                yield batch

    return rows
