"""An attached loop reports each rank's own local norms, with and without accelerate's handler."""

import pytest
import torch

from support.ranks.local_norms import (
    STEPS_OF_5,
    assert_own_norms,
    train_by_hand_without_no_sync,
    train_gan,
    train_with_handler,
)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("none", "allreduce_hook"),
        ("plain", "allreduce_hook"),
        ("fp16", "fp16_compress_hook"),
        ("given", "fp16_compress_hook"),
        ("given, plain", "fp16_compress_hook"),
    ],
)
def test_in_an_accelerate_loop(two_ranks, name, hook):
    """Local norms are right with and without accelerate's handler; detaching removes the hook."""
    results = two_ranks.run(train_with_handler, name)

    assert_own_norms(results)
    for result in results:
        assert result["hook"] == hook
        assert result["seen after detaching"] == 0
        assert set(result["handlers"]) <= {"DistributedDataParallelKwargs"}


def test_the_last_reduction_counts(two_ranks):
    """Local norms include gradients that an earlier backward has already reduced.

    The first backward reduces 5 and 10 to 7.5, and the second adds 50 or 100.
    """
    results = two_ranks.run(train_by_hand_without_no_sync)

    torch.testing.assert_close(results[0]["local_norm"], torch.tensor([7.5 + 50.0]))
    torch.testing.assert_close(results[1]["local_norm"], torch.tensor([7.5 + 100.0]))


def test_of_two_optimizers_in_one_part(two_ranks):
    """Each optimizer reports the norms of its own parameters from its last backward."""
    for rank, result in enumerate(two_ranks.run(train_gan)):
        turns = torch.tensor([[1.0], [2 * 2.0], [3.0], [2 * 4.0]])
        torch.testing.assert_close(result["local_norms"], STEPS_OF_5[rank] * turns)
