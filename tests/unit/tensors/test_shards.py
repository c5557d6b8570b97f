"""Shards of distributed tensors on one rank of four, and moves between devices."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap.tensors.shards import (
    is_distributed,
    local_tensor,
    local_tensors,
    mesh_groups,
    multiply_in_place,
    on_device,
    placed_like,
)
from support.host_reads import HostReads

WHOLE = torch.arange(8.0).reshape(4, 2)


@pytest.fixture
def _second_of_four():
    """Run as rank 1 of four in a process group that sends nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    distributed.destroy_process_group()


def sharded(mesh, local, *placements):
    """Return a distributed tensor whose shard on this rank is `local`."""
    return DTensor.from_local(local, mesh, placements, run_check=False)


def test_a_plain_tensor_is_its_own_shard():
    """A tensor that is not distributed is returned unchanged, and so is None."""
    assert not is_distributed(WHOLE)
    assert local_tensor(WHOLE) is WHOLE
    assert local_tensors([WHOLE, None]) == [WHOLE, None]
    assert placed_like(WHOLE, torch.empty(4, 2)) is WHOLE


@pytest.mark.usefixtures("_second_of_four")
def test_a_shard_shares_the_storage():
    """Writing to the shard changes the distributed tensor."""
    tensor = sharded(init_device_mesh("cpu", (4,)), torch.zeros(1, 2), Shard(0))

    local_tensor(tensor).fill_(3)

    assert is_distributed(tensor)
    assert tensor.shape == (4, 2)
    assert torch.equal(tensor.to_local(), torch.full((1, 2), 3.0))


@pytest.mark.usefixtures("_second_of_four")
@pytest.mark.parametrize(
    ("placement", "expected"), [(Shard(0), WHOLE[1:2]), (Replicate(), WHOLE)], ids=str
)
def test_a_whole_value_is_cut_like_its_target(placement, expected):
    """Rank 1 gets its own row for a sharded target, or all rows for a replicated one."""
    target = sharded(init_device_mesh("cpu", (4,)), torch.zeros_like(expected), placement)

    assert torch.equal(placed_like(WHOLE, target), expected)


@pytest.mark.usefixtures("_second_of_four")
def test_a_value_that_is_distributed_like_its_target_is_not_copied():
    """A value with the target's placement shares its memory with the result."""
    mesh = init_device_mesh("cpu", (4,))
    value = sharded(mesh, torch.ones(1, 2), Shard(0))
    target = sharded(mesh, torch.zeros(1, 2), Shard(0))

    part = placed_like(value, target)

    assert part.data_ptr() == value.to_local().data_ptr()


@pytest.mark.usefixtures("_second_of_four")
def test_a_value_that_is_distributed_differently_from_its_target_is_gathered():
    """The whole value is gathered; a sharded target then gets its own rows, a plain one all."""
    mesh = init_device_mesh("cpu", (4,))
    value = sharded(mesh, WHOLE, Replicate())
    target = sharded(mesh, torch.zeros(1, 2), Shard(0))

    assert torch.equal(placed_like(value, target), WHOLE[1:2])
    assert torch.equal(placed_like(value, torch.zeros(4, 2)), WHOLE)


@pytest.mark.usefixtures("_second_of_four")
def test_groups_of_a_mesh():
    """A mesh of all ranks uses the world group; a slice along one dimension uses its own group."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    assert mesh_groups(init_device_mesh("cpu", (4,))) == (distributed.group.WORLD,)
    assert mesh_groups(whole) == (distributed.group.WORLD,)
    assert mesh_groups(whole["shards"]) == (whole["shards"].get_group(),)


def test_a_mesh_of_one_rank_needs_no_group():
    """A mesh of one rank has no groups."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert mesh_groups(init_device_mesh("cpu", (1,))) == ()
    finally:
        distributed.destroy_process_group()


def test_a_tensor_on_the_device_is_returned_itself():
    """A tensor on the requested device is returned without a copy."""
    assert on_device(WHOLE, torch.device("cpu")) is WHOLE


def test_a_tensor_is_moved_to_another_device():
    """The result has the shape and dtype of the tensor."""
    moved = on_device(WHOLE, torch.device("meta"))

    assert (moved.device.type, moved.shape, moved.dtype) == ("meta", WHOLE.shape, WHOLE.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_multiplied_in_place_without_a_read(dtype):
    """`multiply_in_place` keeps each dtype, accepts an empty list and reads nothing on the host."""
    tensors = [torch.ones(2, dtype=dtype), torch.ones((), dtype=dtype)]
    factor = torch.full((), 0.5)

    with HostReads() as counted:
        multiply_in_place(tensors, factor)
        multiply_in_place([], factor)

    assert counted.reads == []
    assert [tensor.dtype for tensor in tensors] == [dtype] * 2
    assert all((tensor == 0.5).all() for tensor in tensors)
