"""How many messages a step adds to those of DistributedDataParallel."""

import pytest

from support.ranks.messages import messages_of

GRADIENTS = 8 * 16 + 16 + 16 * 4 + 4


@pytest.mark.parametrize("way", ["plain", "mean", "local norms", "attached"])
def test_means_of_losses_add_no_message(two_ranks, way):
    """One all-reduce of all gradients, as without: overflow, norms and skips send nothing."""
    for sent in two_ranks.run(messages_of, way):
        assert sent == [[GRADIENTS]] * len(sent)


def test_losses_per_token_add_one_number(two_ranks):
    """The number of targets, once a step, whatever the accumulation."""
    for sent in two_ranks.run(messages_of, "per token"):
        assert sent == [[1, GRADIENTS]] * len(sent)


def test_parameters_that_are_not_reduced_add_one_number(two_ranks):
    """A norm that all ranks share; the two parts that are reduced have two elements each."""
    for sent in two_ranks.run(messages_of, "in parts"):
        assert sent == [[1, 2, 2]] * len(sent)
