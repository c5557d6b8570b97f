"""Gradients get the placements of their parameters, in as few messages as possible."""

import pytest
import torch

from support.layouts.placements import (
    WAYS,
    count_messages,
    norms_of_partial_sums,
    place,
    train_as_mindspore,
    train_in_a_loop,
    train_in_one_process,
)


def test_a_gradient_gets_the_placements_of_its_parameter(two_ranks):
    """Values stay the same; one message is sent for the sums of each dtype, and one for a mean."""
    for rank in two_ranks.run(place):
        assert all(map(torch.equal, rank["ours"], rank["expected"]))
        assert all(rank["are placed"])
        assert rank["sent"] == [("all_reduce", 20), ("allreduce_", 20), ("allreduce_", 60)]
        assert rank["sent again"] == []
        assert rank["is untouched"]


def test_norms_of_partial_sums_are_those_of_the_sums(two_ranks):
    """The square of a sum, or of a mean, is not the sum of the squares of its parts."""
    for rank in two_ranks.run(norms_of_partial_sums):
        assert rank["square"] == pytest.approx(rank["expected"] ** 2)
        assert rank["norm"] == pytest.approx(rank["expected"])
        assert rank["norm of means"][0] == pytest.approx(rank["norm of means"][1])
        assert rank["clipped"] == pytest.approx(0.5)
        assert rank["non-finite"] == (False, True)
        assert rank["plain is unchanged"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_update_adds_up_all_partial_sums_in_one_message(two_ranks, accumulation):
    """However many micro-batches it has, an update sends its partial sums once, and its norms."""
    for rank in two_ranks.run(count_messages, accumulation):
        # Weight and bias of the two norms of width 12, and 17 norms with the count of targets.
        assert rank == {"more": {("allreduce_", 48): 1, ("allreduce_", 19): 1}, "less": {}}


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_under_sequence_parallelism_is_that_of_one_process(two_ranks, way):
    """Whatever a loop does with its gradients, it finds them placed."""
    expected = train_in_one_process(way)

    for rank in two_ranks.run(train_in_a_loop, way):
        assert rank["results"] == pytest.approx(expected["results"], rel=1e-5)
        for ours, theirs in zip(rank["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_mindspores_cell_under_sequence_parallelism_is_that_of_one_process(two_ranks):
    """`TrainOneStepWithLossScaleCell` finds its gradients placed, too."""
    expected = train_as_mindspore(None)

    for rank in two_ranks.run(train_as_mindspore):
        for ours, theirs in zip(rank, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
