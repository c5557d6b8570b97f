"""Averages of sharded parameters take effect in the next forward."""

from support.fsdp.incidents import evaluate_with_averages
from support.fsdp.ranks import ranks

__all__ = ["ranks"]


def test_averages_on_shards_swap_and_show_in_every_forward(ranks):
    """The start and the end of a swap, and a copy of averages, take effect in the next forward.

    This holds even if FSDP keeps parameters gathered after a forward without backward.
    """
    for rank in ranks.run(evaluate_with_averages):
        assert rank == dict.fromkeys(rank, True)
