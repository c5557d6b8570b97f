"""Batches form epochs of a known length, and each batch becomes arguments of a network."""

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.mindspore.data import Batches, pair_of

CPU = torch.device("cpu")


def batches(dataset, **settings) -> Batches:
    """Return a dataset's batches."""
    return Batches("train_dataset", dataset, Accelerator(cpu=True), CPU, **settings)


def test_columns_become_arguments():
    """Each batch becomes arguments of a network.

    Tuples and lists become positional arguments, mappings become keywords, and other data become
    one argument.
    """
    x, y = torch.ones(1), torch.zeros(1)
    calls = list(batches([(x, y), [x, y], {"data": x, "label": y}, x]).epoch())

    assert [(len(call.arguments), sorted(call.keywords)) for call in calls] == [
        (2, []),
        (2, []),
        (0, ["data", "label"]),
        (1, []),
    ]
    assert [pair_of("d", call).arguments for call in calls[:3]] == [(x, y)] * 3
    with pytest.raises(ValueError, match=r"`d` must have two columns, .* got 1"):
        pair_of("d", calls[3])


@given(length=st.integers(1, 5), sink_size=st.integers(1, 12), epochs=st.integers(1, 4))
def test_a_sink_goes_on_where_the_last_has_ended(length, sink_size, epochs):
    """In sink mode, an epoch continues in the dataset where the previous epoch ended."""
    data = batches([torch.tensor(i) for i in range(length)], sink_mode=True, sink_size=sink_size)
    found = [[int(call.arguments[0]) for call in data.epoch()] for _ in range(epochs)]

    assert data.num_batches == sink_size
    assert [number for epoch in found for number in epoch] == [
        step % length for step in range(sink_size * epochs)
    ]


def test_a_stream_needs_a_sink_size():
    """Data without a length need a sink size."""

    class Stream:
        def __iter__(self):
            return iter([torch.ones(1)] * 3)

    assert len(list(batches(Stream(), sink_mode=True, sink_size=4).epoch())) == 4
    with pytest.raises(TypeError, match=r"`train_dataset` must have .* Stream .* `sink_size`"):
        batches(Stream(), sink_size=-1)
    # `Model.eval` has no `sink_size`.
    with pytest.raises(TypeError, match=r"got Stream without one; pass a list of batches"):
        batches(Stream())


def test_a_stream_of_nothing_is_refused():
    """An empty stream raises instead of looping for ever."""

    class Nothing:
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="`train_dataset` must yield batches, got none"):
        next(batches(Nothing(), sink_mode=True, sink_size=1).epoch())


@pytest.mark.cuda
def test_batches_go_to_the_device():
    """Pinned batches are copied without synchronization in sink mode."""
    cuda = torch.device("cuda", 0)
    dataset = [(torch.ones(2).pin_memory(), torch.zeros(2).pin_memory())]
    data = Batches("d", dataset, Accelerator(), cuda, sink_mode=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        (call,) = data.epoch()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert [column.device for column in call.arguments] == [cuda, cuda]
