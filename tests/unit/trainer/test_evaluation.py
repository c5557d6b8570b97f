"""An evaluation on two ranks gives the numbers of one process."""

import pytest

from support.ranks.evaluations import BATCH, evaluate, expected_evaluation, rows

NUMBERS = [1, BATCH - 1, BATCH, BATCH + 3, 2 * BATCH, 2 * BATCH + 3, 3 * BATCH + 3]
"""Numbers of rows: on two ranks, the last batch is whole, or one rank or both lack rows."""


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("split", [False, True], ids=["a batch each", "one batch"])
@pytest.mark.parametrize("with_metrics", [False, True], ids=["loss", "metrics"])
def test_two_ranks_give_the_numbers_of_one_process(two_ranks, number, split, with_metrics):
    """Rows that fill up the last batch count neither in the loss nor in the metrics."""
    loss, outputs = expected_evaluation(number)
    stock = False
    for found in two_ranks.run(evaluate, number, with_metrics, split, stock):
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        if with_metrics:
            assert found["outputs"] == pytest.approx(outputs)
            assert found["labels"] == pytest.approx([float(r["labels"]) for r in rows(number)])


def test_the_stock_trainer_counts_them(two_ranks):
    """With the stock Trainer the loss is another one, which this test would notice to change."""
    loss, _ = expected_evaluation(2 * BATCH + 3)
    with_metrics, split, stock = False, False, True
    for found in two_ranks.run(evaluate, 2 * BATCH + 3, with_metrics, split, stock):
        assert abs(found["loss"] - loss) > 0.1 * loss
