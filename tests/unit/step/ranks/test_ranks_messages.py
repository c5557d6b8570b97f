"""The number of messages that a step adds to those of DistributedDataParallel."""

import pytest

from support.ranks.messages import messages_of
from support.versions import needs

pytestmark = needs("torch", "2.10", "a profiler that never misses a message of gloo's threads")

GRADIENTS = 8 * 16 + 16 + 16 * 4 + 4


@pytest.mark.parametrize("way", ["plain", "mean", "local norms", "attached"])
def test_means_of_losses_add_no_message(two_ranks, way):
    """A step with mean losses sends only the all-reduce of all gradients."""
    for sent in two_ranks.run(messages_of, way):
        assert sent == [[GRADIENTS]] * len(sent)


def test_losses_per_token_add_one_number(two_ranks):
    """A step with per-token losses also sends one number: the count of targets."""
    for sent in two_ranks.run(messages_of, "per token"):
        assert sent == [[1, GRADIENTS]] * len(sent)


def test_parameters_that_are_not_reduced_add_one_number(two_ranks):
    """A step with unreduced parameters also sends one number, for the shared norm."""
    for sent in two_ranks.run(messages_of, "in parts"):
        assert sent == [[1, 2, 2]] * len(sent)


def test_a_clock_of_ranks_adds_one_message_per_interval(two_ranks):
    """`RankClock` sends five numbers for each step since its last message, and nothing else."""
    sender = two_ranks.run(messages_of, "clock")[1]

    assert sender == [[GRADIENTS], [3 * 5, GRADIENTS], [GRADIENTS]]
