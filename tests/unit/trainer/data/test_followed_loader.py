"""A data loader is followed by a view of it."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from torch.utils.data import DataLoader

from mfwrap.accelerate.data_workers import WorkerStart
from mfwrap.trainer.data.followed_loader import followed_loader, skippable_loader

KINDS = {
    "torch": lambda loader: loader,
    "accelerate": lambda loader: Accelerator(cpu=True).prepare_data_loader(loader),
}


def loader_of(kind, **settings):
    """Return a loader of the numbers 0 to 6 in batches of two."""
    return KINDS[kind](DataLoader(range(7), batch_size=2, **settings))


def without_first(batches):
    """Return batches without their first rows."""
    return (batch[1:] or batch for batch in batches)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_skipped", [0, 2])
def test_batches_are_those_of_the_function(kind, num_skipped):
    """The batches are what the function yields, also when the first ones are skipped."""
    loader = loader_of(kind)
    view = followed_loader(loader, without_first)
    if num_skipped:
        view = skip_first_batches(view, num_skipped)

    assert [batch.tolist() for batch in view] == [[1], [3], [5], [6]][num_skipped:]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]
    assert len(view) == len(loader) - num_skipped


def test_batches_that_accelerate_skips_in_addition():
    """``skip_first_batches`` skips so many more, and iterating the view skips none."""
    view = followed_loader(loader_of("accelerate"), iter, num_skipped=1)

    assert [batch.tolist() for batch in view] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [batch.tolist() for batch in skip_first_batches(view, 2)] == [[6]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_is_shared(kind):
    """The view has the loader's persistent workers, whose start ignores signals."""
    loader = loader_of(kind, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    base = getattr(loader, "base_dataloader", loader)
    base.worker_init_fn = None
    pids = []
    for _ in range(2):
        view = followed_loader(loader, iter)
        assert torch.cat(list(view)).tolist() == list(range(7))
        assert view.worker_init_fn == WorkerStart(None)
        # torch's name for the iterator that owns the workers.
        pids.append([worker.pid for worker in vars(base)["_iterator"]._workers])

    assert pids[0] == pids[1]
    assert base.worker_init_fn is None


@pytest.mark.parametrize("other", [[1, 2], DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])])
def test_what_cannot_be_followed_is_read_as_it_is(other):
    """A list of batches, and a loader whose batch sampler is a list, give their own batches."""
    view = followed_loader(other, without_first)

    assert [str(batch) for batch in view] == [str(batch) for batch in other]


class Repeating:
    """A loader that gives each batch of another one twice, and has the other's attributes."""

    def __init__(self, loader) -> None:
        self.loader = loader
        self.epoch = None

    def __iter__(self):
        for batch in self.loader:
            yield batch
            yield batch

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def set_epoch(self, epoch):
        """Note the epoch."""
        self.epoch = epoch


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_a_loader_of_the_users_own_are_skipped(kind):
    """The batches that the user's loader gives are skipped; accelerate alone undoes the loader."""
    loader = Repeating(loader_of(kind, shuffle=True))
    expected = {}
    for label, make in (
        ("whole", lambda: loader),
        ("rest", lambda: skip_first_batches(skippable_loader(loader, epoch=2), 3)),
        ("undone", lambda: skip_first_batches(loader, 3)),
    ):
        torch.manual_seed(0)
        expected[label] = [batch.tolist() for batch in make()]

    assert expected["rest"] == expected["whole"][3:]
    assert expected["undone"] != expected["whole"][3:]
    assert loader.epoch == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_of_torch_can_skip(kind):
    """A loader of torch or accelerate, and a view of it, are left as they are."""
    for loader in (loader_of(kind), followed_loader(loader_of(kind), iter)):
        assert skippable_loader(loader, epoch=0) is loader
