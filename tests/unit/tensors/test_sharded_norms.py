"""Norms of whole tensors, and the check for non-finite elements, on one rank."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap.tensors.sharded_norms import (
    SquareReduction,
    has_non_finite,
    norm_of_all,
    square_of_all,
    tensor_norms,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


@pytest.fixture
def _one_rank():
    """Run as the only rank of a process group."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([3e38, -3e38, 3e38], torch.float32),
        ([65504.0] * 100, torch.float16),
        ([3e38] * 100, torch.bfloat16),
        ([1e300, -1e300], torch.float64),
        ([3e38 + 3e38j], torch.complex64),
        ([], torch.float32),
    ],
    ids=["float32", "float16", "bfloat16", "float64", "complex64", "empty"],
)
def test_large_finite_elements_are_finite(values, dtype):
    """Large finite elements are not reported as non-finite."""
    assert not has_non_finite([torch.tensor(values, dtype=dtype)], CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("values", [[math.nan], [math.inf], [-math.inf], [math.inf, math.nan]])
@given(position=st.integers(0, 199))
def test_one_bad_element_is_found_anywhere(dtype, values, position):
    """A NaN or inf is found at any place of the second of two tensors."""
    tensor = torch.ones(202, dtype=dtype)
    tensor[position : position + len(values)] = torch.tensor(values, dtype=dtype)

    found = has_non_finite([torch.ones(3), tensor], CPU)
    assert (found.shape, found.dtype, found.item()) == ((), torch.bool, True)


def test_no_tensors_are_finite():
    """An empty list has no non-finite element."""
    assert not has_non_finite([], CPU)


def test_norms_of_tensors_of_many_kinds():
    """Norms of tensors of any dtype and shape agree with float64, in the given order."""
    tensors = [
        torch.randn(3, 4),
        torch.randn(5).bfloat16(),
        torch.randn(()),
        torch.randn(2, 2).double(),
        torch.randn(7).bfloat16(),
    ]
    expected = [tensor.double().norm().item() for tensor in tensors]

    assert tensor_norms(tensors).tolist() == pytest.approx(expected, rel=1e-6)
    assert tensor_norms(tensors).dtype == torch.float32
    assert tensor_norms(tensors[:1]).tolist() == pytest.approx(expected[:1], rel=1e-6)


def test_the_square_of_all_elements():
    """`square_of_all` returns the sum of the squares of all elements of all tensors."""
    tensors = [torch.randn(3, 4), torch.randn(5)]
    expected = torch.cat([tensor.flatten() for tensor in tensors]).double().square().sum()

    assert square_of_all(tensors, CPU).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.usefixtures("_one_rank")
def test_sharded_tensors_on_one_rank():
    """Norms and checks of sharded tensors on one rank equal those of whole tensors."""
    mesh = init_device_mesh("cpu", (1,))
    whole = [torch.full((4,), 1e-25), torch.randn(3)]
    sharded = [DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for tensor in whole]

    assert torch.equal(tensor_norms(sharded), tensor_norms(whole))
    assert torch.equal(square_of_all(sharded, CPU), square_of_all(whole, CPU))
    assert not has_non_finite(sharded, CPU)
    assert has_non_finite([*sharded, torch.full((), math.nan)], CPU)


@pytest.fixture
def _first_of_four():
    """Run as rank 0 of four in a process group that sends nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_first_of_four")
@pytest.mark.parametrize(
    ("dims", "placements", "expected"),
    [
        ((), (), 1 / 8),
        (("replicas", "shards"), (Shard(0), Shard(0)), 1),
        (("replicas", "shards"), (Replicate(), Shard(0)), 1 / 2),
        (("replicas", "shards"), (Replicate(), Replicate()), 1 / 4),
        (("shards",), (Shard(0),), 1 / 4),
        (("shards",), (Replicate(),), 1 / 8),
    ],
    ids=["plain", "sharded", "sharded, two copies", "four copies", "half", "half, two copies"],
)
def test_equal_values_are_divided_by_the_number_of_their_ranks(dims, placements, expected):
    """A rank contributes its share of a value, so that the sum over ranks counts the value once.

    Two of the four ranks sum first, then all. A value that both sums contain is divided by two for
    the first sum if both ranks hold it, and by four for the second. The process group sends
    nothing, so the result is the contribution of one rank.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    half, whole = torch.ones(1), torch.ones(4)
    tensors = [
        DTensor.from_local(half, mesh["shards"], [Shard(0)], run_check=False),
        DTensor.from_local(whole, mesh, [Shard(0), Shard(0)], run_check=False),
        DTensor.from_local(whole, mesh[dims], placements, run_check=False) if dims else whole,
    ]

    reduction = SquareReduction.among(tensors)

    squares, partial_sum = reduction(torch.ones(3), torch.ones(()))
    assert squares.tolist() == [1 / 4, 1, expected]
    assert partial_sum == 1


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_norms_of_distributed_and_plain_tensors(norm_type):
    """The norm of tensors on a mesh and plain tensors is that of all their elements."""
    plain = [torch.randn(3), torch.randn(2, 4), torch.randn(5)]
    mesh = init_device_mesh("cpu", (1,))
    on_mesh = DTensor.from_local(plain[1], mesh, [Shard(0)], run_check=False)
    mixed = [plain[0], on_mesh, plain[2]]

    for tensors in (mixed, mixed[1:2], plain):
        norm = norm_of_all(tensors, norm_type, CPU)
        whole = plain if len(tensors) > 1 else plain[1:2]
        expected = torch.nn.utils.get_total_norm(whole, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
