"""Local norms are those of each rank's own gradients, for every kind of reduction."""

import pytest
import torch

from support.ranks.local_norms import (
    HOOKS,
    OPTIONS,
    STEPS_OF_5,
    assert_own_norms,
    train_partly_distributed,
    train_with_hook,
    train_with_options,
    train_with_unused,
)


@pytest.mark.parametrize("name", OPTIONS)
def test_with_settings_of_distributed_data_parallel(two_ranks, name):
    """Local norms are right for all bucket settings of DDP, with and without accumulation."""
    assert_own_norms(two_ranks.run(train_with_options, name))


def test_unused_parameters_count_zero(two_ranks):
    """A parameter has the local norm 0 on each rank that does not use it."""
    first, second = two_ranks.run(train_with_unused)

    for rank, result in enumerate((first, second)):
        seldom_used = 2 * STEPS_OF_5[rank] if rank == 1 else torch.tensor(0.0)
        expected = torch.stack([STEPS_OF_5[rank], seldom_used, torch.tensor(0.0)])
        torch.testing.assert_close(result["local_norms"], expected.expand(2, 3))
    assert all(map(torch.equal, first["weights"], second["weights"]))


@pytest.mark.parametrize("name", HOOKS)
def test_a_communication_hook_comes_after_them(two_ranks, name):
    """Local norms are read before a communication hook runs; training stays bitwise the same."""
    results = two_ranks.run(train_with_hook, name)

    assert_own_norms([result["ours"] for result in results])
    for result in results:
        for other in ("theirs", "without norms"):
            assert torch.equal(result["ours"]["global_norms"], result[other]["global_norms"])
            assert all(map(torch.equal, result["ours"]["weights"], result[other]["weights"]))


def test_of_several_parts_and_of_none(two_ranks):
    """Local norms are each rank's own, also for parameters that are not reduced."""
    results = two_ranks.run(train_partly_distributed)

    for rank, result in enumerate(results):
        own = STEPS_OF_5[rank] * torch.tensor([1.0, 1.0, 2.0])
        torch.testing.assert_close(result["local_norms"][0], own)
        torch.testing.assert_close(result["local_norms"][2], own)
        # Two gradients are reduced. Their norms are the means over both ranks: 7.5 (of 5 and 10)
        # and 15 (of 10 and 20). The third gradient is not reduced; the mean of both ranks' squared
        # norms is added for it.
        expected = (7.5**2 + 15**2 + (5**2 + 10**2) / 2) ** 0.5
        torch.testing.assert_close(result["global_norms"][0].item(), expected, rtol=1e-6, atol=0)
    first, second = results
    assert torch.equal(first["global_norms"][0], second["global_norms"][0])
    assert first["local_norms"][1].isfinite().all()
    assert second["local_norms"][1].isnan().tolist() == [False, True, False]


def test_a_nan_in_what_is_not_reduced_skips_on_all_ranks(two_ranks):
    """A NaN in an unreduced gradient on one rank makes all ranks skip."""
    results = two_ranks.run(train_partly_distributed)

    for result in results:
        assert result["overflows"] == [False, True, False]
        weights = result["weights"]
        assert all(map(torch.equal, weights[1], weights[2]))
        assert not any(map(torch.equal, weights[2], weights[3]))
    reduced = [[each[-1][i] for i in (0, 2)] for each in (r["weights"] for r in results)]
    assert all(map(torch.equal, *reduced))
