"""Ranks with shards skip together, and a step sends one additional small message."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from support.fsdp.incidents import (
    OPTIMIZERS,
    call_a_module_twice,
    count_host_reads,
    count_messages,
    fail_in_a_micro_batch,
    forget_norms,
    keep_the_state,
    meet_a_bad_loss,
    meet_a_bad_loss_everywhere,
    norms_of_placed_tensors,
    replace_parameters,
    train_with_a_divisor,
)
from support.fsdp.networks import Case, new_model
from support.fsdp.ranks import ranks
from support.fsdp.refusals import be_refused

__all__ = ["ranks"]

NAN, INF, SPIKE = float("nan"), float("inf"), 1e4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("factor", [NAN, SPIKE])
def test_what_is_bad_on_one_rank_skips_on_all(ranks, factor, optimizer):
    """A bad loss on one rank skips the update on all ranks and changes nothing."""
    met = ranks.run(meet_a_bad_loss, optimizer, factor)

    for index, rank in enumerate(met):
        # Only the last rank has bad gradients. A spike is large but finite, so its local norms are
        # finite, too.
        is_bad = factor != SPIKE and index == len(met) - 1
        assert rank["own is finite"] == [not is_bad, True] * 2
        assert rank["skipped"] == [True, False, True, False]
        assert rank["overflow"] == [factor != SPIKE, False] * 2
        assert rank["weights and averages after a first skip"]
        assert rank["all after a later skip"]
        assert rank["end is that without the skipped steps"]
        assert rank["changes when applied"]
    norms = torch.tensor([rank["norms"] for rank in met]).nan_to_num(-1)
    # Ranks could decide differently if the norms were not bitwise equal.
    assert torch.equal(norms, norms[:1].expand_as(norms))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_infinite_on_all_ranks_skips_once(ranks, optimizer):
    """A loss that is infinite on all ranks skips the update."""
    for rank in ranks.run(meet_a_bad_loss_everywhere, optimizer, INF):
        assert rank["overflow"] == rank["skipped"] == [True, False] * 2
        assert rank["own is finite"] == [False, True] * 2
        assert rank["all after a later skip"]
        assert rank["end is that without the skipped steps"]


@pytest.mark.parametrize(
    "case",
    [Case(), Case("replicas"), Case("two meshes"), Case(per_token=True)],
    ids=["sharded", "replicas", "two meshes", "per token"],
)
def test_a_step_sends_one_small_message_more_than_its_backward(ranks, case):
    """A step adds one message, with one number per parameter and one for the tokens."""
    num_trained = sum(p.requires_grad for p in new_model(per_token=True).parameters())
    num_held = len(list(new_model(per_token=True).parameters()))
    assert num_trained < num_held
    expected = {} if ranks.number == 1 else {("allreduce_", num_held + 1): 1}
    for rank in ranks.run(count_messages, case):
        assert rank == {"more": expected, "less": {}}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_optimizers_on_shards_read_nothing_on_the_host(ranks, optimizer):
    """Fused optimizers on shards read nothing; other optimizers read once per step."""
    expected = [] if optimizer.startswith("fused") else ["tolist"] * 3

    assert ranks.run(count_host_reads, optimizer) == [expected] * ranks.number


def test_a_forward_that_raises_leaves_nothing_behind(ranks):
    """Gradients of a step whose forward raises do not leak into the next step.

    A torch that cannot continue after such an error is refused by the next step.
    """
    for rank in ranks.run(fail_in_a_micro_batch):
        if hasattr(FSDPModule, "reset_iter_state"):
            assert rank == {"is as if it had not been tried": True}
        else:
            assert "lacks FSDPModule.reset_iter_state, which torch 2.13 has" in rank["refused"]


def test_norms_count_every_element_once(ranks):
    """Norms count each element once, however the tensors are distributed."""
    for norms in ranks.run(norms_of_placed_tensors):
        assert norms["ours"] == pytest.approx(norms["expected"], rel=1e-6)
        assert norms["one by one"] == pytest.approx(norms["each expected"], rel=1e-6)


def test_distributed_tensors_are_clipped_by_the_norm_of_all(ranks):
    """`clip_by_global_norm` clips distributed tensors by their global norm."""
    for norms in ranks.run(norms_of_placed_tensors):
        assert norms["clipped"] == pytest.approx(0.25, rel=1e-6)


def test_what_is_not_finite_on_one_rank_is_seen_on_all(ranks):
    """A non-finite element on one rank is found on all ranks."""
    for norms in ranks.run(norms_of_placed_tensors):
        assert (norms["finite"], norms["nan on rank 0"], norms["nan norm"]) == (False, True, True)


def test_local_norms_of_a_module_that_is_called_twice_are_exact(ranks):
    """Local norms are exact for a module that is called twice in one forward."""
    for norms in ranks.run(call_a_module_twice):
        torch.testing.assert_close(norms["ours"], norms["expected"], rtol=1e-5, atol=0)


def test_parameters_may_be_replaced_after_sharding(ranks):
    """Local norms are found for parameters that a loader has put into a sharded network."""
    for norms in ranks.run(replace_parameters):
        assert torch.equal(norms["replaced"], norms["expected"])


def test_a_step_forgets_the_norms_that_it_has_used(ranks):
    """A step of a network that is partly sharded keeps no norm of the part that is replicated.

    A kept norm would count for a later gradient that is not reduced.
    """
    assert [rank["left"] for rank in ranks.run(forget_norms)] == [0] * ranks.number


def test_a_step_count_is_not_distributed(ranks):
    """After a fused update of shards, momenta are distributed, and step counts are not.

    torch saves and loads the state in this form.
    """
    for kinds in ranks.run(keep_the_state):
        assert kinds == {"step": False, "exp_avg": True, "exp_avg_sq": True}


def test_a_divisor_of_ones_own_changes_nothing_per_token(ranks):
    """A custom gradient divisor does not change training with per-token losses."""
    for rank in ranks.run(train_with_a_divisor):
        for ours, theirs in zip(*rank["ends"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exact_is_refused(ranks):
    """A setting whose result would be inexact raises an error that says why."""
    expected = {
        "reduced twice": "RuntimeError: `local_norm` needs gradients that are reduced once",
        "reduced twice, then discarded": "",
        "around the seam": "RuntimeError: `local_norm` must be False with torch ",
        "local norm by hand": "ValueError: `local_norm` must be False for distributed parameters",
        "per token by hand": "ValueError: `calculate_per_token_loss` needs `fully_shard` to reduce",
        "divided unevenly": "ValueError: `network` must divide all gradients by the same number",
    }
    if ranks.number == 1:
        # On one rank no gradient is reduced, so local norms are exact and no error is raised.
        expected |= {"reduced twice": "", "around the seam": ""}
    for messages in ranks.run(be_refused):
        assert messages.keys() == expected.keys()
        for case, message in messages.items():
            assert message.startswith(expected[case])
            assert bool(message) == bool(expected[case])
