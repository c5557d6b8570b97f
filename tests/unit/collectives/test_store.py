"""The key-value store of the ranks."""

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap.collectives.store import has_keys, new_connection
from support.stores import FakeStoreOfTorch214


def test_keys_that_are_missing():
    """Waiting for a key ends when the key is there, or when the time is over."""
    store = distributed.HashStore()
    store.set("here", "")

    assert has_keys(store, ["here"], 10.0)
    assert not has_keys(store, ["here", "missing"], 0.0)


def test_a_connection_sees_only_keys_with_its_prefix():
    """Keys that others have set are not seen, whatever they are called."""
    store = distributed.HashStore()
    first, second = (new_connection(store, name) for name in ("first", "second"))
    first.set("key", "value")

    assert first.check(["key"])
    assert store.check(["first/key"])
    assert not second.check(["key"])


def test_a_store_whose_host_has_ended(monkeypatch):
    """Only a fake store has no connection: a rank that cannot reach a real one must not go on."""

    def refuse(_):
        raise distributed.DistNetworkError

    monkeypatch.setattr(FakeStoreOfTorch214, "clone", refuse)
    with pytest.raises(distributed.DistNetworkError):
        new_connection(FakeStoreOfTorch214(), "name")


@pytest.mark.parametrize("make_store", [FakeStore, FakeStoreOfTorch214])
def test_no_connection_to_a_fake_store(make_store):
    """A store that keeps nothing is of no use, however it answers."""
    assert new_connection(make_store(), "name") is None
