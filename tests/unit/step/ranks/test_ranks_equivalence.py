"""Ranks that share a batch train like one process with plain torch."""

import pytest
import torch
from torch import distributed

from support.ranks.equivalence import (
    CASES,
    NUM_STEPS,
    micro_batches,
    own_norms,
    train_alone,
    train_on_rank,
)
from support.ranks.pool import RankPool


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Train all cases on the given number of ranks, and return the results of each rank."""
    num_ranks = request.param
    if num_ranks == 2:
        return request.getfixturevalue("two_ranks").run(train_on_rank)
    folder = tmp_path_factory.mktemp("ranks")
    if num_ranks > 2:
        with RankPool(num_ranks, folder) as pool:
            return pool.run(train_on_rank)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
    )
    try:
        return [train_on_rank(0)]
    finally:
        distributed.destroy_process_group()


on_ranks = pytest.mark.parametrize(
    "trained", [1, 2, pytest.param(4, marks=pytest.mark.slow)], indirect=True
)
with_case = pytest.mark.parametrize("name", CASES)
with_local_norms = pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if not case.sync_each_batch]
)


def mean_loss(name, results):
    """Return the mean loss of each step over all ranks, from the losses that the ranks report."""
    losses = torch.stack([rank[name]["losses"] for rank in results])
    if not CASES[name].per_token:
        return losses.mean(dim=0)
    counts = torch.tensor(
        [
            [
                sum(labels.ne(-100).sum().item() for _, labels in share)
                for share in micro_batches(CASES[name], step, len(results))
            ]
            for step in range(NUM_STEPS)
        ]
    ).T
    # A rank without targets reports NaN and adds nothing to the sum.
    return (losses.nan_to_num() * counts).sum(dim=0) / counts.sum(dim=0)


@on_ranks
@with_case
def test_ranks_train_as_one_process(trained, name):
    """Losses, norms, weights and averages agree with plain torch in one process.

    Ranks add up products in another order than one process, and float32 rounds each sum by 6e-8
    relative. After a hundred additions, results differ by 1e-5 at worst (seen: 2e-7), and weights
    by 1e-6 after four updates of at most 0.1 each. In bfloat16, products within a micro-batch are
    bitwise the same; only the later sums in float32 differ.
    """
    expected = train_alone(CASES[name], len(trained))

    torch.testing.assert_close(mean_loss(name, trained), expected["losses"], rtol=1e-5, atol=0)
    for rank in trained:
        assert rank[name]["overflows"] == [False] * NUM_STEPS
        torch.testing.assert_close(rank[name]["norms"], expected["norms"], rtol=1e-5, atol=0)
        for kind in ("weights", "averages"):
            for ours, theirs in zip(rank[name][kind], expected[kind], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@on_ranks
@with_local_norms
def test_local_norms_are_those_of_each_ranks_own_loss(trained, name):
    """Local norms agree with the float64 norms of each rank's own micro-batches.

    The norms are taken before any reduction or clipping. The tolerance allows for the rounding of
    sums in float32 and, in bfloat16, for rounding each product by 2**-9 relative.
    """
    case = CASES[name]
    tolerance = 1e-5 if case.precision == "float32" else 2**-6
    for index, rank in enumerate(trained):
        for step in range(NUM_STEPS):
            share = micro_batches(case, step, len(trained))[index]
            expected = own_norms(case, rank[name]["before"][step], share)
            torch.testing.assert_close(
                rank[name]["local_norms"][step].double(), expected, rtol=tolerance, atol=1e-7
            )


@on_ranks
@with_case
def test_all_ranks_hold_the_same(trained, name):
    """All ranks have bitwise the same weights, averages and norms."""
    first, *others = (rank[name] for rank in trained)
    for other in others:
        assert torch.equal(first["norms"], other["norms"])
        for kind in ("weights", "averages"):
            assert all(map(torch.equal, first[kind], other[kind]))
