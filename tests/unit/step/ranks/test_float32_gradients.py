"""Gradients of half-precision weights are accumulated and reduced in float32."""

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from mfwrap import MFTrainOneStepCell, StepConfig
from mfwrap.accelerate import attach
from mfwrap.step.ranks.float32_gradients import squares_after_rounding
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
    optimizer = Adam(network.parameters(), lr=1.0, betas=(0.0, 0.0), eps=1e-6, fused=fused)
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
@pytest.mark.parametrize("number", [3, 8])
def test_a_sum_that_float16_cannot_hold_is_divided_before_it_is_rounded(fused, number):
    """The update is that of torch without the setting, which adds up the parts of the mean."""
    weights = []
    for in_float32 in (True, False):
        network = Products(torch.float16)
        optimizer = Adam(network.parameters(), lr=1.0, eps=1e-6, fused=fused)
        cell = cell_of(network, optimizer, in_float32=in_float32, scale_sense=16.0, local_norm=True)
        batches = [(torch.full((6,), 3000.0), torch.full((6,), 2000.0 + i)) for i in range(number)]
        output = cell.step([(first.half(), second.half()) for first, second in batches])
        assert not output.overflow
        means = torch.tensor([3000.0, 2000 + (number - 1) / 2])
        assert output.local_norm.allclose(means * 6**0.5, rtol=1e-3)
        moments = [optimizer.state[each]["exp_avg"] for each in network.parameters()]
        assert torch.stack(moments)[:, 0].float().allclose(means / 10, rtol=1e-3)
        weights.append(network.first.detach())
    assert torch.equal(*weights)


class PerToken(Products):
    """Returns its loss as a numerator, with a denominator."""

    denominator = 1000.0

    def forward(self, first, second):
        return super().forward(first, second), torch.full((), self.denominator)


@pytest.mark.parametrize("fused", [True, False])
def test_a_sum_of_tokens_that_float16_cannot_hold_is_divided_before_it_is_rounded(fused):
    """Numerators whose gradients do not fit together are divided by the micro-batches first."""
    network = PerToken(torch.float16)
    optimizer = Adam(network.parameters(), eps=1e-6, fused=fused)
    cell = cell_of(network, optimizer, calculate_per_token_loss=True)
    large = torch.full((6,), 40000.0, dtype=torch.float16)
    output = cell.step([(large, torch.ones_like(large))] * 4)
    assert not output.overflow
    assert optimizer.state[network.first]["exp_avg"].tolist() == pytest.approx([4.0] * 6, rel=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_denominators_that_are_fractions_make_an_overflow(fused):
    """The optimizer never gets a gradient that is infinite after the division."""
    network = PerToken(torch.float16)
    network.denominator = 0.25
    optimizer = Adam(network.parameters(), eps=1e-6, fused=fused)
    cell = cell_of(network, optimizer, calculate_per_token_loss=True)
    large = torch.full((6,), 40000.0, dtype=torch.float16)
    assert cell.step([(large, torch.ones_like(large))] * 4).overflow
    assert network.first.eq(0).all()


def test_a_sum_of_a_loop_that_float16_cannot_hold_is_an_overflow():
    """Finite float16 gradients that a loop adds up skip the update if the sum is above 65504."""
    network = Products(torch.float16)
    accelerator = Accelerator(cpu=True)
    attached = attach(accelerator, StepConfig(accumulate_allreduce_grads_in_fp32=True))
    network, optimizer = accelerator.prepare(network, Adam(network.parameters(), fused=True))
    large = torch.full((6,), 40000.0, dtype=torch.float16)
    for factor, overflows in ((1.0, True), (0.5, False)):
        for syncs in (False, True):
            accelerator.gradient_state._set_sync_gradients(syncs)
            accelerator.backward(network(large * factor, torch.ones_like(large)))
        optimizer.step()
        optimizer.zero_grad()
        assert attached.last_output.overflow == overflows


def test_an_empty_shard_overflows_nothing():
    """A rank may hold no element of a float16 weight."""
    gradients = [torch.empty(0), torch.full((2,), 70000.0), torch.ones(2)]
    weights = [torch.empty_like(each, dtype=torch.float16) for each in gradients]
    squares = torch.tensor([0.0, 1e10, 2.0])

    found = squares_after_rounding(squares, gradients, weights, 1, None)

    assert found.tolist() == [0.0, float("inf"), 2.0]


@pytest.mark.usefixtures("_one_rank")
def test_float32_weights_beside_others_are_replicated_as_usual():
    """DistributedDataParallel itself adds up and reduces the gradients of float32 weights."""
    network = Products()
    network.second = torch.nn.Parameter(network.second.detach().float())
    optimizer = SGD(network.parameters(), lr=1.0)
    cell = cell_of(DistributedDataParallel(network), optimizer)

    cell.step([(torch.full((6,), value).bfloat16(), torch.full((6,), value)) for value in (1, 2.0)])

    assert network.second.tolist() == network.first.tolist() == [-1.5] * 6


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
    """The bytes of each rank are those that `StepConfig` states."""
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
