"""`DeferredReads` copies values from the device and passes them to receivers at a flush."""

import copy
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
)
from mfwrap.tensors.deferred import DeferredReads
from support.deferral import late_results
from support.devices import each_device
from support.small_networks import Classifier, labelled_batches
from support.versions import needs

CPU = torch.device("cpu")
FLOATS = st.floats(allow_nan=False, width=32)


@given(st.lists(st.lists(FLOATS, min_size=1, max_size=5), max_size=6))
def test_values_arrive_in_order(vectors):
    """Each receiver gets its own numbers, as Python floats, in the order of submission."""
    reads, arrived = DeferredReads(CPU), []
    for index, vector in enumerate(vectors):
        reads.submit(torch.tensor(vector), lambda v, index=index: arrived.append((index, v)))
    reads.flush()

    assert arrived == list(enumerate(vectors))
    assert all(type(value) is float for _, vector in arrived for value in vector)


def test_nothing_arrives_before_a_flush():
    """Receivers are called by a flush, once for each submission."""
    reads, arrived = DeferredReads(CPU), []
    reads.submit(torch.ones(2), arrived.append)
    assert (len(reads), arrived) == (1, [])

    reads.flush()
    reads.flush()
    assert (len(reads), arrived) == (0, [[1.0, 1.0]])


def test_values_are_those_of_the_submission():
    """A later change of the tensor does not change the values that arrive."""
    reads, arrived = DeferredReads(CPU), []
    values = torch.tensor([1.0, 2.0])
    reads.submit(values, arrived.append)
    values.zero_()
    reads.flush()

    assert arrived == [[1.0, 2.0]]


def test_pending_values_share_no_memory():
    """Pending vectors of the same size do not overwrite each other."""
    reads, arrived = DeferredReads(CPU), []
    reads.reserve(1)
    for value in (1.0, 2.0, 3.0):
        reads.submit(torch.tensor([value]), arrived.append)
    reads.flush()

    assert arrived == [[1.0], [2.0], [3.0]]


def test_a_later_step_does_not_change_what_has_arrived():
    """A later submission does not change values that have arrived."""
    reads, arrived = DeferredReads(CPU), []
    for value in (1.0, 2.0):
        reads.submit(torch.tensor([value]), arrived.append)
        reads.flush()

    assert arrived == [[1.0], [2.0]]


def test_host_memory_is_used_again():
    """A thousand steps use only the host memory that was reserved at first."""
    reads = DeferredReads(CPU)
    reads.reserve(3)
    for _ in range(1000):
        reads.submit(torch.ones(3), lambda _: None)
        reads.flush()

    assert {size: len(free) for size, free in reads._free.items()} == {3: 1}


def test_an_error_of_a_receiver_is_raised_and_leaves_the_rest_pending():
    """A receiver's error is raised, and later values arrive at the next flush."""
    reads, arrived = DeferredReads(CPU), []

    def refuse(values):
        message = f"got {values}"
        raise ValueError(message)

    reads.submit(torch.tensor([1.0]), refuse)
    reads.submit(torch.tensor([2.0]), arrived.append)
    with pytest.raises(ValueError, match=r"got \[1.0\]"):
        reads.flush()
    assert (len(reads), arrived) == (1, [])

    reads.flush()
    assert arrived == [[2.0]]


def test_a_receiver_may_submit():
    """Values that a receiver submits arrive last in the same flush."""
    reads, arrived = DeferredReads(CPU), []
    reads.submit(torch.tensor([1.0]), lambda _: reads.submit(torch.tensor([3.0]), arrived.append))
    reads.submit(torch.tensor([2.0]), arrived.append)
    reads.flush()

    assert arrived == [[2.0], [3.0]]


def test_discarded_values_never_arrive():
    """Discarded values never arrive, and later submissions work as before."""
    reads, arrived = DeferredReads(CPU), []
    reads.submit(torch.tensor([1.0]), arrived.append)
    reads.discard()
    assert len(reads) == 0

    reads.submit(torch.tensor([2.0]), arrived.append)
    reads.flush()
    assert arrived == [[2.0]]


def test_a_flush_that_does_not_wait():
    """It passes on values that are on the host, and leaves those that are still on a device."""
    reads, arrived = DeferredReads(CPU), []
    reads.submit(torch.ones(1), arrived.append)
    with late_results():
        reads.flush(waits=False)
        assert (len(reads), arrived) == (1, [])
    reads.flush(waits=False)
    assert (len(reads), arrived) == (0, [[1.0]])


@pytest.mark.cuda
def test_a_flush_passes_on_what_has_left_the_device():
    """On a GPU, a flush that does not wait passes a value on as soon as its copy is done."""
    device = torch.device("cuda")
    reads, arrived = DeferredReads(device), []
    reads.reserve(1)
    value = torch.ones(1, device=device)
    torch.cuda._sleep(500_000_000)
    reads.submit(value, arrived.append)
    reads.flush(waits=False)
    assert arrived == []

    torch.cuda.synchronize()
    reads.flush(waits=False)
    assert arrived == [[1.0]]


@pytest.mark.cuda
def test_submitting_waits_for_no_device():
    """A submission does not synchronize with the device."""
    device = torch.device("cuda")
    reads, arrived = DeferredReads(device), []
    reads.reserve(2)
    values = torch.zeros(2, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50_000_000)
        values.add_(3)
        reads.submit(values, arrived.append)
        values.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert arrived == []

    reads.flush()
    assert arrived == [[3.0, 3.0]]


@each_device
def test_a_copy_learns_of_its_own_skips(device):
    """A deep copy of a cell counts its own skips, and the skips that were pending at the copy."""
    torch.manual_seed(0)
    network = Classifier().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    cell = MFTrainOneStepCell(network, optimizer, max_consecutive_skips=2)
    batch = [tensor.to(device) for tensor in labelled_batches(1)[0]]
    cell(*batch, float("nan"))
    copied = copy.deepcopy(cell)

    for one in (cell, copied):
        one(*batch, float("nan"))
        with pytest.raises(RuntimeError, match="2 updates in a row were skipped"):
            one.flush()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_default_dtype_is_no_concern(dtype):
    """The default dtype does not change the cell's outputs."""
    outputs = []
    for default in (torch.float32, dtype):
        torch.manual_seed(0)
        network = Classifier()
        network.unused = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        batches = labelled_batches(2)
        torch.set_default_dtype(default)
        try:
            cell = MFTrainOneStepCell(network, optimizer, True, 1.0, 1024.0, local_norm=True)  # noqa: FBT003  (by position, as in MindFormers)
            outputs += [cell(*batch) for batch in batches]
        finally:
            torch.set_default_dtype(torch.float32)

    for expected, actual in zip(outputs[:2], outputs[2:], strict=True):
        for name in expected._fields:
            assert torch.equal(getattr(expected, name), getattr(actual, name)), name
            assert getattr(expected, name).dtype == getattr(actual, name).dtype, name


@pytest.mark.parametrize(
    "kind",
    [
        functools.partial(torch.optim.SGD, momentum=0.9),
        pytest.param(
            torch.optim.AdamW,
            marks=needs("torch", "2.13", "AdamW puts its step counts on the default device"),
        ),
    ],
    ids=["SGD", "AdamW"],
)
def test_a_default_device_is_no_concern(kind):
    """A cell can be built, run and restored while another default device is set."""
    network = Classifier()
    batches = labelled_batches(2)
    optimizer = kind(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with torch.device("meta"):
        cells = [
            MFTrainOneStepCell(
                network,
                optimizer,
                scale_sense=update_cell,
                local_norm=True,
                lr_scheduler=schedule,
                ema=ExponentialMovingAverage(network, warmup=True),
            )
            for update_cell in (
                AdaptiveLossScaleUpdateCell(1024.0, 2, 20, max_scale_window=100),
                DynamicLossScaleUpdateCell(1024.0, 2, 2),
            )
        ]
        for cell in cells:
            outputs = [cell(*batch) for batch in batches]
            assert all(
                value.device == CPU for output in outputs for value in output if value is not None
            )
            cell.load_state_dict(cell.state_dict())


def test_the_device_of_the_first_vector_is_used_unless_one_is_given():
    """Without a device, the first `submit` sets it, and an earlier `reserve` raises an error."""
    reads, arrived = DeferredReads(), []
    with pytest.raises(RuntimeError, match="`reserve` needs the device"):
        reads.reserve(2)
    reads.submit(torch.tensor([1.0, 2.0]), arrived.append)
    reads.reserve(2)
    reads.flush()

    assert arrived == [[1.0, 2.0]]
