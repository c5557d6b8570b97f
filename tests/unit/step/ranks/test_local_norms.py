"""Local norms under DistributedDataParallel: the hook that reads gradients, and its errors."""

import copy
import functools
import gc
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mfwrap import MFTrainOneStepCell
from mfwrap.compatibility.torch import communication_hooks
from mfwrap.step.ranks.agreement import agreement_of
from mfwrap.step.ranks.local_norms import replicated_squares_of, tap
from support.host_reads import HostReads
from support.one_rank import one_rank
from support.small_networks import Classifier, LinearProbe, labelled_batches

[BATCH] = labelled_batches(1)
WITH_A_HOOK = {"are_asked_for": True, "communication_hook": (None, allreduce_hook)}
"""Settings that register the hook even on one rank, where local norms do not need it."""


@pytest.fixture(autouse=True, scope="module")
def _group_of_one():
    with one_rank():
        yield


@pytest.fixture
def part() -> DistributedDataParallel:
    """Return a network in DistributedDataParallel with one rank."""
    return DistributedDataParallel(Classifier())


def cell_of(network, **settings):
    """Return a cell of a network, with plain SGD."""
    return MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1), **settings)


def squares_of_gradients(network) -> Tensor:
    """Return the sum of squares of each gradient, computed with plain torch."""
    return torch.stack([p.grad.square().sum() for p in network.parameters()])


def test_a_tap_sees_what_is_reduced(part):
    """The hook gives the sum of squares of each gradient, in the parameters' order."""
    parameters = list(part.parameters())
    local = replicated_squares_of([part], parameters, **WITH_A_HOOK)

    part(*BATCH).backward()

    reduced = torch.full((4,), -1.0)
    torch.testing.assert_close(local.squares(reduced), squares_of_gradients(part))


def test_a_step_without_local_norms_registers_no_hook(part, monkeypatch):
    """The network of a step that needs no hook stays free for a hook of the user's."""
    monkeypatch.setattr(part, "process_group", SimpleNamespace(size=lambda: 2))

    assert replicated_squares_of([part], list(part.parameters()), are_asked_for=False) is None
    assert not communication_hooks(part)


def test_a_backward_reads_nothing_on_the_host(part):
    """Backward passes, including one that rebuilds buckets, read nothing on the host."""
    local = replicated_squares_of([part], list(part.parameters()), **WITH_A_HOOK)
    with HostReads() as reads:
        for _ in range(3):
            part(*BATCH).backward()
            local.squares(torch.zeros(4))

    assert reads.names == []


def test_what_no_tap_has_seen_counts_as_it_is(part):
    """For gradients that the hook has not seen, `squares` returns the values that it was passed."""
    outside = LinearProbe().weight
    parameters = [*part.parameters(), outside]
    local = replicated_squares_of([part], parameters, **WITH_A_HOOK)
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
    """A reset for one optimizer discards only the norms of that optimizer's parameters."""
    first, *others = part.parameters()
    local = replicated_squares_of([part], [first], **WITH_A_HOOK)
    other = replicated_squares_of([part], others, **WITH_A_HOOK)
    part(*BATCH).backward()

    local.reset()

    assert local.squares(torch.full((1,), -1.0)).item() == -1.0
    assert other.squares(torch.full((3,), -1.0)).ge(0).all()


def test_without_a_reader_nothing_is_computed(part):
    """The hook computes nothing after the last cell is deleted."""
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
    """Without local norms, a communication hook keeps its name, and no norms are computed."""
    cell = cell_of(part, communication_hook=(None, fp16_compress_hook))
    cell(*BATCH)

    assert not tap(part).readers
    assert part._comm_hooks[0][0].__name__ == "fp16_compress_hook"


def test_one_rank_needs_no_hook(part):
    """A cell on one rank reports local norms without a hook."""
    cell = cell_of(part, local_norm=True)

    assert cell(*BATCH).local_norm.gt(0).all()
    assert part._comm_hooks == []


def pickled(part):
    """Return what is left of a module after pickle."""
    return pickle.loads(pickle.dumps(part))  # noqa: S301  (our own bytes)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_copy_has_no_hook(part, way):
    """Torch does not give a copy's hook to its reducer, so a cell of the copy registers its own."""
    hook = None, allreduce_hook
    cell = cell_of(part, local_norm=True, communication_hook=hook)
    made = way(part)
    assert made._comm_hooks == []
    expected = cell(*BATCH).local_norm
    found = cell_of(made, local_norm=True, communication_hook=hook)(*BATCH).local_norm

    assert torch.equal(found, expected)
    assert len(part._comm_hooks) == len(made._comm_hooks) == 1


def test_another_cell_takes_over_the_tap(part):
    """Several cells of one network share one hook."""
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
    """A second cell with a different hook raises an error."""
    cell_of(part, communication_hook=(None, allreduce_hook))

    with pytest.raises(
        RuntimeError, match="`communication_hook` must be the hook that the network"
    ):
        cell_of(part, communication_hook=(None, fp16_compress_hook))


def test_a_registered_hook_is_refused(part):
    """The error names the registered hook and says how to use it with local norms."""
    part.register_comm_hook(None, fp16_compress_hook)

    with pytest.raises(
        RuntimeError,
        match=r"already has .* fp16_compress_hook.*`communication_hook=\(state, hook\)`",
    ):
        cell_of(part, local_norm=True, communication_hook=(None, allreduce_hook))
    assert len(part._comm_hooks) == 1


def test_torchs_own_check_of_a_hook_is_kept(part, monkeypatch):
    """Torch's own check of the hook raises an error for bfloat16 compression without CUDA."""
    monkeypatch.setattr(torch.version, "cuda", None)  # in case this is a build with CUDA

    with pytest.raises(TypeError, match="BF16"):
        cell_of(part, communication_hook=(None, bf16_compress_hook))
    assert part._comm_hooks == []


def test_a_hook_without_a_name_will_do(part):
    """A partial function, which has no name, works as a hook."""
    reduce = functools.partial(allreduce_hook)
    cell = cell_of(part, local_norm=True, communication_hook=(None, reduce))

    assert cell(*BATCH).local_norm.gt(0).all()


@pytest.mark.parametrize(
    "given",
    [fp16_compress_hook, (None,), (None, None), [None, fp16_compress_hook]],
    ids=["no pair", "one", "no hook", "a list"],
)
def test_what_is_no_hook_is_refused(part, given):
    """A value that is not a pair of state and callable raises a TypeError."""
    with pytest.raises(TypeError, match=r"`communication_hook` must be \(state, hook\)"):
        cell_of(part, communication_hook=given)


def test_a_hook_needs_something_to_reduce():
    """A hook for a network without DistributedDataParallel raises an error."""
    with pytest.raises(ValueError, match="`communication_hook` must be None for a network without"):
        cell_of(Classifier(), communication_hook=(None, allreduce_hook))


def test_nothing_is_registered_by_a_cell_that_is_refused(part):
    """A cell that raises at construction registers no hook."""
    with pytest.raises(ValueError, match="`max_grad_norm`"):
        cell_of(part, max_grad_norm=-1.0, communication_hook=(None, allreduce_hook))
    with pytest.raises(TypeError, match="LBFGS"):
        MFTrainOneStepCell(
            part, torch.optim.LBFGS(part.parameters()), communication_hook=(None, allreduce_hook)
        )

    assert part._comm_hooks == []


def test_ranks_of_one_have_no_one_to_agree_with(part):
    """One rank needs no agreement, even for parameters that are not reduced."""
    assert agreement_of([part], [LinearProbe().weight]) is None
    assert agreement_of([], [LinearProbe().weight]) is None


def test_in_a_callers_autocast(part):
    """Sums of squares are computed in float32 inside autocast."""
    local = replicated_squares_of([part], list(part.parameters()), **WITH_A_HOOK)
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
    """The hook does not count parameters that DistributedDataParallel ignores."""
    network = _WithIgnored()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["ignored.weight"])
    part = DistributedDataParallel(network)
    local = replicated_squares_of([part], list(part.parameters()), **WITH_A_HOOK)
    part(torch.tensor([[3.0, 4.0]])).backward()

    assert local.squares(torch.tensor([1.0, 2.0])).tolist() == [25.0, 2.0]
