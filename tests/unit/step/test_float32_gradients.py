"""Gradients of half-precision weights are accumulated and reduced in float32."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Adam

from mfwrap import MFTrainOneStepCell, StepConfig
from support.float32_gradients import (
    NUM_STEPS,
    Products,
    accumulate_in_cell,
    accumulate_in_loop,
    bytes_of_gradients,
    gradients_of,
    micro_batch,
)
from support.host_reads import HostReads
from support.versions import needs

pytestmark = needs("torch", "2.10", "Tensor.grad_dtype")

BFLOAT16 = torch.bfloat16
NUM_MICRO_BATCHES = 5


def cell_of(network, optimizer=None, *, in_float32=True, **settings):
    """Return a cell that reports the norm and never clips."""
    return MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=1.0) if optimizer is None else optimizer,
        use_clip_grad=True,
        max_grad_norm=float("inf"),
        accumulate_allreduce_grads_in_fp32=in_float32,
        **settings,
    )


def check_norms(result: dict[str, Tensor], rank: int, num_ranks: int = 2) -> None:
    """Compare the norms of a rank with exact ones."""
    exact = [gradients_of(step, NUM_MICRO_BATCHES, *range(num_ranks)) for step in range(NUM_STEPS)]
    own = [gradients_of(step, NUM_MICRO_BATCHES, rank) for step in range(NUM_STEPS)]
    norms = torch.stack([each.norm() for each in exact])
    torch.testing.assert_close(result["global_norm"].double(), norms, rtol=1e-6, atol=0)
    if "local_norm" in result:
        norms = torch.stack([each.norm(dim=1) for each in own])
        torch.testing.assert_close(result["local_norm"].double(), norms, rtol=1e-6, atol=0)
    assert result["dtypes"].all()


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**4])
def test_small_gradients_are_not_lost(dtype, scale):
    """1024 + 64 x 1 over 65 micro-batches is 16.738, of which bfloat16 keeps 15.75."""
    large, small = (torch.full((6,), value, dtype=dtype) for value in (1024.0, 1.0))
    batches = [(large, large), *[(small, small)] * 64]
    exact = 1088 / 65

    network = Products(dtype)
    norm = cell_of(network, scale_sense=scale).step(batches).global_norm
    assert norm.item() / 12**0.5 == pytest.approx(exact, rel=1e-6)
    # The optimizer gets each gradient rounded once.
    assert network.first.tolist() == [-torch.tensor(exact).to(dtype).item()] * 6

    network = Products(dtype)
    cell_of(network, in_float32=False, scale_sense=scale).step(batches)
    assert network.first[0].item() == {BFLOAT16: -15.75, torch.float16: -16.75}[dtype]


@given(
    values=st.lists(st.floats(-60000, 60000, width=16), min_size=2, max_size=9),
    limit=st.floats(0.1, 1e6),
    fused=st.booleans(),
)
def test_norms_and_weights_are_those_of_float64(values, limit, fused):
    """The norm equals that of a sum in float64, and the optimizer gets it rounded once."""
    inputs = [torch.full((6,), value).bfloat16() for value in values]
    exact = torch.stack(inputs).double().mean(0)
    network = Products()
    optimizer = Adam(network.parameters(), lr=1.0, betas=(0.0, 0.0), fused=fused)
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        max_grad_norm=limit,
        scale_sense=8.0,
        local_norm=True,
        accumulate_allreduce_grads_in_fp32=True,
    )

    output = cell.step([(each, each) for each in inputs])

    # Gradients may cancel, so compare with their magnitude.
    size = torch.stack(inputs).double().abs().mean() + 1e-20
    total = torch.stack((exact, exact)).norm()
    error = pytest.approx(1.0, rel=1e-6)
    assert (output.global_norm + size) / (total + size) == error
    assert (output.local_norm[0] + size) / (exact.norm() + size) == error
    clipped = exact * min(1.0, limit / (total + 1e-6))
    used = optimizer.state[network.first]["exp_avg"].double()
    torch.testing.assert_close(used, clipped, rtol=2.0**-7, atol=1e-5 * size.item())


def test_float32_gradients_live_within_an_update_of_several_micro_batches():
    """`grad` is float32 between micro-batches, 4 bytes per element, and otherwise as before."""
    network = Products()
    cell = cell_of(network, Adam(network.parameters(), fused=True))

    cell.step([micro_batch(0, index) for index in range(3)])
    assert network.seen == [(torch.float32, None), *[(torch.float32, torch.float32)] * 2]
    assert (network.first.grad_dtype, network.first.grad) == (BFLOAT16, None)

    network.seen.clear()
    cell.step([micro_batch(0, 0)])
    assert network.seen == [(BFLOAT16, None)]


def test_float32_weights_are_not_changed():
    """Weights in float32 get bitwise the update that they get without the setting."""
    weights = []
    for in_float32 in (False, True):
        network = Products(torch.float32)
        cell_of(network, in_float32=in_float32).step([micro_batch(0, i) for i in range(3)])
        weights.append(network.first.detach())
    assert torch.equal(*weights)


def test_an_error_leaves_the_weights_own_dtype():
    """After a failed micro-batch, the parameters accumulate in their own dtype again."""
    network = Products()
    cell = cell_of(network)
    with pytest.raises(RuntimeError, match="size of tensor"):
        cell.step([micro_batch(0, 0), (torch.zeros(7), torch.zeros(7))])
    assert (network.first.grad_dtype, network.first.grad) == (BFLOAT16, None)
    assert network.first.eq(0).all()


@pytest.mark.parametrize("fused", [True, False])
def test_a_sum_that_float16_cannot_hold_is_an_overflow(fused):
    """Finite float16 gradients whose sum is above 65504 skip the update."""
    network = Products(torch.float16)
    cell = cell_of(network, Adam(network.parameters(), fused=fused), local_norm=True)
    large = torch.full((6,), 40000.0, dtype=torch.float16)

    output = cell.step([(large, torch.ones_like(large))] * 2)

    assert output.overflow
    assert output.global_norm.isinf()
    assert output.local_norm.isinf().tolist() == [True, False]
    assert network.first.eq(0).all()
    assert not cell.step([(large / 2, large / 2)] * 2).overflow


def test_no_host_reads():
    """With a fused optimizer an update in float32 reads nothing on the host."""
    network = Products(torch.float16)
    cell = cell_of(network, Adam(network.parameters(), fused=True))
    batches = [tuple(each.half() for each in micro_batch(0, index)) for index in range(3)]
    cell.step(batches)
    with HostReads() as reads:
        cell.step(batches)
    assert reads.names == []


WAYS = {
    "replicated": {"local_norm": True},
    "replicated, views, fused": {"local_norm": True},
    "replicated, unused": {"local_norm": True},
    "replicated, each": {"sync_each_batch": True},
    "sharded": {"local_norm": True},
    "sharded, fused": {},
    "sharded, each": {"sync_each_batch": True},
    "sharded, float32 weights": {"local_norm": True},
}


FAST = {"replicated, unused", "sharded", "sharded, float32 weights"}


@pytest.mark.parametrize(
    "way", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in WAYS]
)
def test_two_ranks(two_ranks, way):
    """Accumulated gradients are averaged over ranks in float32, and so are their norms."""
    results = two_ranks.run(accumulate_in_cell, way, NUM_MICRO_BATCHES, WAYS[way])
    for rank, result in enumerate(results):
        check_norms(result, rank)


def test_memory_of_one_process():
    """Gradients have 4 bytes per element between micro-batches, and 2 in the optimizer."""
    assert bytes_of_gradients(0, "alone") == {
        False: {"weights": 24, "between": 24, "in the optimizer": 24},
        True: {"weights": 24, "between": 48, "in the optimizer": 24},
    }


@pytest.mark.parametrize(("way", "held"), [("replicated", 24), ("sharded", 12)])
def test_memory_on_two_ranks(two_ranks, way, held):
    """The bytes of each rank are those that docs/scaling.md states."""
    for counts in two_ranks.run(bytes_of_gradients, way):
        assert counts == {
            False: {"weights": held, "between": 24, "in the optimizer": held},
            True: {"weights": held, "between": 48, "in the optimizer": held},
        }


def test_an_attached_loop_on_two_ranks(two_ranks):
    """A loop of accelerate under DistributedDataParallel gets the same norms."""
    for rank, result in enumerate(two_ranks.run(accumulate_in_loop, NUM_MICRO_BATCHES)):
        check_norms(result, rank)


def test_an_attached_loop_on_one_rank():
    """A loop of accelerate gets the norms of float64, and its optimizer rounds once."""
    result = accumulate_in_loop(0, NUM_MICRO_BATCHES, is_alone=True)
    check_norms(result, 0, num_ranks=1)
    exact = sum(
        gradients_of(step, NUM_MICRO_BATCHES, 0) * NUM_MICRO_BATCHES for step in range(NUM_STEPS)
    )
    # Rounded four times: each gradient once, and the weight in each update.
    torch.testing.assert_close(result["weights"].double(), -exact, rtol=2.0**-6, atol=0.1)


def test_a_communication_hook_is_refused():
    """A hook of the caller would reduce the buckets in the weights' dtype."""
    config = StepConfig(accumulate_allreduce_grads_in_fp32=True)
    config.check_communication_hook(None)
    with pytest.raises(ValueError, match="must be False with a communication hook"):
        config.check_communication_hook("bf16_compress_hook")
