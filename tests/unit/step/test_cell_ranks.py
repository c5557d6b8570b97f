"""A step on two ranks equals one process on all data, or is skipped on both ranks."""

from typing import Any

import pytest
import torch
from torch import multiprocessing
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from support.ranks.training import NUM_RANKS, NUM_STEPS, micro_batches, run_rank, token_network
from support.small_networks import Classifier, labelled_batches

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=NUM_RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


def whole_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the micro-batches of all ranks as one batch."""
    parts = [part for rank in range(NUM_RANKS) for part in micro_batches(step, rank)]
    inputs, labels = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(labels)


@pytest.mark.parametrize("way", ["per token", "per token, compiled", "per token, wrapped"])
def test_per_token_losses_are_those_of_one_process_on_the_whole_batch(ranks, way):
    """Norms and weights agree with plain torch on the batches of all ranks."""
    network = Classifier()
    network.load_state_dict(token_network().state_dict())
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)
    norms = []
    for step in range(NUM_STEPS):
        network(*whole_batch(step)).backward()
        norms.append(clip_grad_norm_(network.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()

    for rank in ranks:
        # Two ranks sum in another order than one process, so results differ by rounding. The
        # clipped gradients and the momentum move a weight by at most 0.14 per update, so an `atol`
        # of 1e-6 is enough for the weights.
        torch.testing.assert_close(rank[way]["norms"], torch.stack(norms), rtol=1e-5, atol=0)
        for ours, theirs in zip(rank[way]["weights"], network.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)


def test_the_reported_loss_is_this_ranks_own(ranks):
    """Each rank reports the loss of its own targets, or NaN if it has no targets."""
    network = token_network()
    for index, rank in enumerate(ranks):
        parts = [network(*part) for part in micro_batches(0, index)]
        expected = sum(total for total, _ in parts) / sum(count for _, count in parts)

        torch.testing.assert_close(rank["per token"]["losses"][0], expected.detach())
    assert [rank["per token"]["losses"].isnan().tolist() for rank in ranks] == [
        [False, False, False],
        [False, False, True],
    ]


def test_mean_losses_are_averaged_over_ranks(ranks):
    """With equal shares on all ranks, weights agree with one process on the whole batch."""
    torch.manual_seed(0)
    network = Classifier()
    optimizer = SGD(network.parameters(), lr=0.1, fused=True)
    for batch in labelled_batches(NUM_STEPS, size=8):
        network(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for rank in ranks:
        for ours, theirs in zip(rank["mean"]["weights"], network.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)


def test_a_nan_on_one_rank_skips_on_both(ranks):
    """A NaN on one rank skips the update on both, and their states stay equal."""
    for rank in ranks:
        met = rank["nan"]
        assert met["overflow"] == met["skipped"] == [False, True, False]
        assert met["scales"] == [1024.0, 512.0, 512.0]
        assert met["count"] == 2
        for before, after in zip(met["before"][1], met["after"][1], strict=True):
            assert torch.equal(before, after)
        for before, after in zip(met["before"][2], met["after"][2], strict=True):
            assert not torch.equal(before, after)

    for kind in ("weights", "averages"):
        first, second = (
            rank["nan"]["after"][2] if kind == "weights" else rank["nan"][kind] for rank in ranks
        )
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
