"""`measure` returns correct norms, divisors and flags, with and without a normalizer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap.step.forward import Normalizer
from mfwrap.step.measurement import measure
from mfwrap.tensors.norm_groups import group_parameters
from mfwrap.tensors.sharded_norms import SquareReduction
from support.host_reads import HostReads

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
FINITE = st.floats(-1e3, 1e3, width=32)
SCALES = st.sampled_from([1.0, 3.0, 2.0**16])


def groups_of(gradients, groups=None):
    """Return the groups of gradients with the names a, b, c, ..."""
    sizes = {chr(ord("a") + i): 0 if g is None else g.numel() for i, g in enumerate(gradients)}
    return group_parameters(sizes, groups, CPU)


def measured(gradients, scale=1.0, groups=None, **settings):
    """Call `measure` on gradients with a loss scale."""
    return measure(gradients, groups_of(gradients, groups), torch.tensor(scale), **settings)


@given(st.lists(st.lists(FINITE, min_size=1, max_size=5), min_size=1, max_size=4), SCALES)
def test_norms_are_those_of_the_unscaled_gradients(rows, scale):
    """Global and local norms agree with float64, and finite gradients do not overflow."""
    gradients = [torch.tensor(row) * scale for row in rows]
    exact = [torch.tensor(row, dtype=torch.float64) for row in rows]

    result = measured(gradients, scale)

    torch.testing.assert_close(
        result.global_norm.double(), torch.cat(exact).norm(), rtol=1e-5, atol=1e-20
    )
    torch.testing.assert_close(
        result.local_norm().double(), torch.stack([e.norm() for e in exact]), rtol=1e-5, atol=1e-20
    )
    assert not result.overflow
    assert result.divisor == scale
    assert result.has_targets is None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1])
def test_one_element_that_is_not_finite_is_an_overflow(place, value):
    """One non-finite element is an overflow, and the other group's norm stays finite."""
    gradients = [torch.ones(3), torch.ones(4)]
    gradients[place][1] = value

    result = measured(gradients)

    assert result.overflow
    assert not result.global_norm.isfinite()
    assert result.local_norm().isfinite().tolist() == [place == 1, place == 0]


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN])
def test_a_scale_that_is_none_is_an_overflow(scale):
    """A scale that is zero, negative or NaN is reported as an overflow."""
    assert measured([torch.ones(3)], scale).overflow


def test_an_absent_gradient_is_a_gradient_of_zeros():
    """A missing gradient has the local norm 0."""
    result = measured([None, torch.tensor([3.0, 4.0])])

    assert result.global_norm == 5
    assert result.local_norm().tolist() == [0, 5]


def test_no_gradient_at_all_is_no_overflow():
    """A step without any gradient has the norm 0 and no overflow."""
    result = measured([None, None], 8.0)

    assert not result.overflow
    assert result.global_norm == 0


def test_local_norms_are_those_of_the_groups():
    """All gradients in a group share one norm."""
    gradients = [torch.tensor([3.0]), torch.tensor([5.0]), torch.tensor([4.0])]

    result = measured(gradients, groups=["a|c", "b"])

    assert result.local_norm().tolist() == [5, 5]


def test_the_divisor_is_a_copy_of_the_scale():
    """A later change of the scale does not change the divisor."""
    scale = torch.tensor(8.0)
    gradients = [torch.ones(2)]

    result = measure(gradients, groups_of(gradients), scale)
    scale.fill_(4.0)

    assert result.divisor == 8


def test_a_normalizer_divides_beside_the_scale():
    """The reduced normalizer divides update and global norm; the local one divides local norms."""
    normalizer = Normalizer(reduced=torch.tensor(5.0), local=torch.tensor(2.0))

    result = measured([torch.tensor([30.0, 40.0])], 10.0, normalizer=normalizer)

    assert result.divisor == 50
    assert result.global_norm == 1
    assert result.local_norm() == 2.5
    assert result.has_targets


@pytest.fixture
def _one_rank():
    """Run as the only rank of a process group."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_partial_normalizer_is_summed_with_the_shards():
    """A partial divisor takes part in the sum over the shards; without a divisor it is the scale.

    The local divisor is this rank's own, so it stays as it is.
    """
    mesh = init_device_mesh("cpu", (1,))
    shard = torch.tensor([30.0, 40.0])
    gradient = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
    reduction = SquareReduction.among([gradient])
    normalizer = Normalizer(torch.tensor(5.0), torch.tensor(2.0), is_partial=True)

    result = measured([gradient], 10.0, normalizer=normalizer, reduction=reduction)
    assert (result.divisor, result.global_norm, result.local_norm()) == (50, 1, 2.5)

    result = measured([gradient], 10.0, reduction=reduction)
    assert (result.divisor, result.global_norm, result.local_norm()) == (10, 5, 5)


def test_without_targets_the_norms_are_zero():
    """A batch without targets has norms of 0 and no overflow."""
    nothing = torch.zeros(())

    result = measured([torch.zeros(2)], 8.0, normalizer=Normalizer(nothing, nothing))

    assert not result.has_targets
    assert not result.overflow
    assert result.global_norm == result.local_norm() == 0


def test_measuring_reads_nothing_on_the_host():
    """Measuring does not synchronize with the device."""
    gradients = [torch.ones(2), None]
    groups, scale = groups_of(gradients), torch.ones(())
    normalizer = Normalizer(torch.ones(()), torch.ones(()))

    with HostReads() as counted:
        measure(gradients, groups, scale, normalizer)

    assert counted.reads == []


@pytest.mark.parametrize("reduced", [NAN, INF, -INF, -3.0, 1e-45])
def test_a_denominator_that_is_none_is_an_overflow(reduced):
    """A denominator that is negative, non-finite or too small is an overflow."""
    denominator = torch.tensor(reduced)

    assert measured([torch.ones(3)], 2.0, normalizer=Normalizer(denominator, denominator)).overflow


def test_a_divisor_beyond_float32_is_an_overflow():
    """A product of scale and denominator above float32's range is an overflow."""
    denominator = torch.tensor(4096.0)
    normalizer = Normalizer(denominator, denominator)

    assert measured([torch.ones(3)], 2.0**120, normalizer=normalizer).overflow
    assert not measured([torch.ones(3)], 2.0**100, normalizer=normalizer).overflow
