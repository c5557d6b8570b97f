"""HostReads counts every kind of host read, and nothing else."""

import numpy as np
import pytest
import torch

from support.host_reads import HostReads

SCALAR = torch.full((), 1.0)
INDEX = torch.full((), 1, dtype=torch.int64)
VECTOR = torch.ones(3)
MASK = VECTOR > 0
COUNTS = torch.ones(3, dtype=torch.int64)

READS = {
    "item": SCALAR.item,
    "tolist": VECTOR.tolist,
    "numpy": VECTOR.numpy,
    "cpu": VECTOR.cpu,
    "to by word": lambda: VECTOR.to("cpu"),
    "to by device": lambda: VECTOR.to(torch.device("cpu")),
    "to by keyword": lambda: VECTOR.to(device="cpu", dtype=torch.float64),
    "to, blocking": lambda: VECTOR.to("cpu", torch.float64, False),  # noqa: FBT003  (the case under test)
    "bool": lambda: bool(SCALAR),
    "not": lambda: not SCALAR,
    "float": lambda: float(SCALAR),
    "int": lambda: int(SCALAR),
    "complex": lambda: complex(SCALAR),
    "index": lambda: [1, 2][INDEX],
    "array": lambda: np.asarray(VECTOR),
    "format": lambda: f"{SCALAR:.2f}",
    "in": lambda: 1.0 in VECTOR,
    "is_nonzero": lambda: torch.is_nonzero(SCALAR),
    "nonzero": VECTOR.nonzero,
    "where with one argument": lambda: torch.where(MASK),
    "boolean index": lambda: VECTOR[MASK],
    "boolean index put": lambda: VECTOR.index_put((MASK,), SCALAR),
    "masked_select": lambda: VECTOR.masked_select(MASK),
    "equal": lambda: torch.equal(VECTOR, VECTOR),
    "allclose": lambda: torch.allclose(VECTOR, VECTOR),
    "unique": VECTOR.unique,
    "unique of a dimension": lambda: VECTOR.unique(dim=0),
    "unique_consecutive": VECTOR.unique_consecutive,
    "repeat_interleave": lambda: VECTOR.repeat_interleave(COUNTS),
    "bincount": COUNTS.bincount,
    "segment_reduce": lambda: torch.segment_reduce(VECTOR, "sum", lengths=COUNTS),
    "a tensor made of a number": lambda: torch.tensor(1.0),
    "a tensor as a number": lambda: VECTOR.add(VECTOR, alpha=SCALAR),
    "a tensor as a weight": lambda: torch._foreach_lerp([VECTOR], [VECTOR], SCALAR),
    "slice": lambda: VECTOR[:INDEX],
}

NO_READS = {
    "arithmetic": lambda: VECTOR * SCALAR + 1,
    "where": lambda: torch.where(MASK, VECTOR, SCALAR),
    "full": lambda: torch.full((), 3.0),
    "tensors as weights": lambda: torch._foreach_lerp([VECTOR], [VECTOR], [SCALAR]),
    "clamp by a tensor": lambda: VECTOR.clamp(max=SCALAR),
    "masked_fill": lambda: VECTOR.masked_fill(MASK, SCALAR),
    "take": lambda: VECTOR.take(INDEX),
    "index_select": lambda: VECTOR[COUNTS],
    "to another type": lambda: VECTOR.to(torch.float64),
    "to without waiting": lambda: VECTOR.to("cpu", non_blocking=True),
    "to without waiting, by position": lambda: VECTOR.to("cpu", torch.float64, True),  # noqa: FBT003  (the case under test)
    "copy without waiting": lambda: torch.empty(3).copy_(VECTOR, non_blocking=True),
    "repeat_interleave of known size": lambda: VECTOR.repeat_interleave(COUNTS, output_size=3),
    "segment_reduce without a check": lambda: torch.segment_reduce(
        VECTOR, "sum", lengths=COUNTS, unsafe=True
    ),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_kind_of_read_is_counted_once(read):
    """Each way to read a tensor's values counts as one read, even if torch reads again inside."""
    with HostReads() as counted:
        read()

    assert len(counted.reads) == 1


@pytest.mark.parametrize("call", NO_READS.values(), ids=NO_READS)
def test_what_stays_on_the_device_is_not_counted(call):
    """Arithmetic, non-blocking copies and tensor arguments do not count as reads."""
    with HostReads() as counted:
        call()

    assert counted.reads == []


def test_a_read_during_backward_is_counted():
    """A read inside a gradient hook counts, although autograd calls the hook."""
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * gradient.sum().item())

    with HostReads() as counted:
        weight.sum().backward()

    assert len(counted.reads) == 1


def test_a_read_tells_where_it_was_made():
    """A read has its name and its call stack, innermost frame first, without torch's frames."""
    with HostReads() as counted:
        torch.is_nonzero(SCALAR)
        SCALAR.item()

    assert counted.names == ["aten::_local_scalar_dense", "item"]
    for read in counted.reads:
        assert read.stack[0].startswith("test_host_reads.py:")
        assert read.stack[0].endswith(" test_a_read_tells_where_it_was_made")


def test_reads_outside_of_the_block_are_not_counted():
    """Reads before and after the ``with`` block do not count."""
    SCALAR.item()
    with HostReads() as counted:
        pass
    SCALAR.item()

    assert counted.reads == []
