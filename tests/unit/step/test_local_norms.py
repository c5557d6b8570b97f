"""How gradients under DistributedDataParallel are seen: taps, their readers, and errors."""

import functools
import gc

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mfwrap import MFTrainOneStepCell
from mfwrap.step.local_norms import local_squares_of, tap
from mfwrap.step.ranks import agreement_of
from support.host_reads import HostReads
from support.small_networks import Classifier, LinearProbe, labelled_batches

[BATCH] = labelled_batches(1)
WITH_A_HOOK = {"are_asked_for": True, "communication_hook": (None, allreduce_hook)}
"""Even of one rank, of whose gradients no one would ask otherwise."""


@pytest.fixture(autouse=True, scope="module")
def _group_of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.fixture
def part() -> DistributedDataParallel:
    """Return a network that is reduced over one rank."""
    return DistributedDataParallel(Classifier())


def cell_of(network, **settings):
    """Return a cell of a network with plain SGD."""
    return MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1), **settings)


def squares_of_gradients(network) -> Tensor:
    """Return the sums of squares of the gradients there are, from torch alone."""
    return torch.stack([p.grad.square().sum() for p in network.parameters()])


def test_a_tap_sees_what_is_reduced(part):
    """The sum of squares of each gradient, in the parameters' order."""
    parameters = list(part.parameters())
    local = local_squares_of([part], parameters, **WITH_A_HOOK)

    part(*BATCH).backward()

    reduced = torch.full((4,), -1.0)
    torch.testing.assert_close(local.squares(reduced), squares_of_gradients(part))


def test_a_backward_reads_nothing_on_the_host(part):
    """A backward that rebuilds the buckets does not read either."""
    local = local_squares_of([part], list(part.parameters()), **WITH_A_HOOK)
    with HostReads() as reads:
        for _ in range(3):
            part(*BATCH).backward()
            local.squares(torch.zeros(4))

    assert reads.names == []


def test_what_no_tap_has_seen_counts_as_it_is(part):
    """Parameters outside, gradients that were not reduced, and those that are gone."""
    outside = LinearProbe().weight
    parameters = [*part.parameters(), outside]
    local = local_squares_of([part], parameters, **WITH_A_HOOK)
    as_they_are = torch.arange(5.0)

    with part.no_sync():
        part(*BATCH).backward()
    assert torch.equal(local.squares(as_they_are), as_they_are)

    part(*BATCH).backward()
    assert local.squares(as_they_are)[4] == 4.0
    assert not local.squares(as_they_are)[:4].eq(as_they_are[:4]).any()

    part.zero_grad()
    assert torch.equal(local.squares(as_they_are), as_they_are)


def test_a_reset_forgets(part):
    """A reset forgets the norms of its own parameters and keeps another optimizer's."""
    first, *others = part.parameters()
    local = local_squares_of([part], [first], **WITH_A_HOOK)
    other = local_squares_of([part], others, **WITH_A_HOOK)
    part(*BATCH).backward()

    local.reset()

    assert local.squares(torch.full((1,), -1.0)).item() == -1.0
    assert other.squares(torch.full((3,), -1.0)).ge(0).all()


def test_without_a_reader_nothing_is_computed(part):
    """The hook stays, and costs nothing, when the last cell is gone."""
    hook = None, allreduce_hook
    cell = cell_of(part, local_norm=True, communication_hook=hook)
    state = tap(part)
    cell(*BATCH)
    assert len(state.readers) == 1

    del cell
    gc.collect()
    part(*BATCH).backward()

    assert not state.readers
    assert not state.squares


def test_a_hook_alone_computes_nothing(part):
    """Without local norms it is only called."""
    cell = cell_of(part, communication_hook=(None, fp16_compress_hook))
    cell(*BATCH)

    assert not tap(part).readers
    assert part._comm_hooks[0][0].__name__ == "fp16_compress_hook"


def test_one_rank_needs_no_hook(part):
    """Its gradients are its own after the reduction, too."""
    cell = cell_of(part, local_norm=True)

    assert cell(*BATCH).local_norm.gt(0).all()
    assert part._comm_hooks == []


def test_another_cell_takes_over_the_tap(part):
    """A network outlives the cell that was built first."""
    hook = None, allreduce_hook
    first = cell_of(part, local_norm=True, communication_hook=hook)
    expected = first(*BATCH).local_norm
    for parameter in part.parameters():
        parameter.data.fill_(0.1)
    second = cell_of(part, local_norm=True, communication_hook=hook)
    third = cell_of(part, local_norm=True)

    assert not torch.equal(second(*BATCH).local_norm, expected)
    assert third(*BATCH).local_norm.gt(0).all()
    assert len(part._comm_hooks) == 1


def test_another_hook_is_refused(part):
    """Torch lets none be replaced."""
    cell_of(part, communication_hook=(None, allreduce_hook))

    with pytest.raises(
        RuntimeError, match="`communication_hook` must be the hook that the network"
    ):
        cell_of(part, communication_hook=(None, fp16_compress_hook))


def test_a_registered_hook_is_refused(part):
    """The sentence names it and says how to have both."""
    part.register_comm_hook(None, fp16_compress_hook)

    with pytest.raises(
        RuntimeError,
        match=r"already has .* fp16_compress_hook.*`communication_hook=\(state, hook\)`",
    ):
        cell_of(part, local_norm=True, communication_hook=(None, allreduce_hook))
    assert len(part._comm_hooks) == 1


def test_torchs_own_check_of_a_hook_is_kept(part):
    """Torch recognizes the hook by its name and refuses bfloat16 compression on a CPU."""
    with pytest.raises(TypeError, match="BF16"):
        cell_of(part, communication_hook=(None, bf16_compress_hook))
    assert part._comm_hooks == []


def test_a_hook_without_a_name_will_do(part):
    """A partial function has none."""
    reduce = functools.partial(allreduce_hook)
    cell = cell_of(part, local_norm=True, communication_hook=(None, reduce))

    assert cell(*BATCH).local_norm.gt(0).all()


@pytest.mark.parametrize(
    "given",
    [fp16_compress_hook, (None,), (None, None), [None, fp16_compress_hook]],
    ids=["no pair", "one", "no hook", "a list"],
)
def test_what_is_no_hook_is_refused(part, given):
    """A pair of a state and a callable, as torch takes them apart."""
    with pytest.raises(TypeError, match=r"`communication_hook` must be \(state, hook\)"):
        cell_of(part, communication_hook=given)


def test_a_hook_needs_something_to_reduce():
    """Without DistributedDataParallel it would never be called."""
    with pytest.raises(ValueError, match="`communication_hook` must be None for a network without"):
        cell_of(Classifier(), communication_hook=(None, allreduce_hook))


def test_nothing_is_registered_by_a_cell_that_is_refused(part):
    """A hook could not be taken out again."""
    with pytest.raises(ValueError, match="`max_grad_norm`"):
        cell_of(part, max_grad_norm=-1.0, communication_hook=(None, allreduce_hook))
    with pytest.raises(TypeError, match="LBFGS"):
        MFTrainOneStepCell(
            part, torch.optim.LBFGS(part.parameters()), communication_hook=(None, allreduce_hook)
        )

    assert part._comm_hooks == []


def test_ranks_of_one_have_no_one_to_agree_with(part):
    """Whatever is not reduced."""
    assert agreement_of([part], [LinearProbe().weight]) is None
    assert agreement_of([], [LinearProbe().weight]) is None


def test_in_a_callers_autocast(part):
    """Sums of squares are taken in float32 all the same."""
    local = local_squares_of([part], list(part.parameters()), **WITH_A_HOOK)
    with torch.autocast("cpu", torch.bfloat16):
        part(*BATCH).backward()
        squares = local.squares(torch.zeros(4))

    assert squares.dtype == torch.float32
    torch.testing.assert_close(squares, squares_of_gradients(part), rtol=1e-6, atol=0)


class _WithIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = LinearProbe()
        self.ignored = LinearProbe()

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.used(inputs) + self.ignored(inputs)
        return loss


def test_what_a_part_ignores_is_not_reduced():
    """Its gradient counts as it is."""
    network = _WithIgnored()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["ignored.weight"])
    part = DistributedDataParallel(network)
    local = local_squares_of([part], list(part.parameters()), **WITH_A_HOOK)
    part(torch.tensor([[3.0, 4.0]])).backward()

    assert local.squares(torch.tensor([1.0, 2.0])).tolist() == [25.0, 2.0]
