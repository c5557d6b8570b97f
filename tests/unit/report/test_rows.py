"""The lists of rows are those of a search by hand."""

import numpy as np
import pytest

from mfwrap.records.row_losses import RowLossFiles
from mfwrap.report.rows import RowLists, lists_of, table_lines

NUM_ROWS, NUM_EPOCHS = 30, 3


@pytest.fixture(scope="module")
def losses():
    """Return the loss of each row in each epoch: NaN once, and a row that is never a target."""
    losses = np.random.default_rng(0).normal(3, 1, (NUM_EPOCHS, NUM_ROWS)).astype(np.float32)
    losses[1, 4] = np.nan
    losses[2, 7] = np.inf
    return losses


@pytest.fixture(scope="module")
def run(losses, tmp_path_factory):
    """Return a run folder with these losses, whose rows have another order in each epoch."""
    folder = tmp_path_factory.mktemp("run")
    files = RowLossFiles(folder)
    files.begin(0, sets_aside=True)
    for epoch in range(NUM_EPOCHS):
        order = np.random.default_rng(epoch).permutation(NUM_ROWS)
        files.write(
            {
                "step": epoch * 10 + np.arange(NUM_ROWS) // 3 + 1,
                "epoch": np.full(NUM_ROWS, epoch),
                "position": np.arange(NUM_ROWS),
                "index": order,
                "loss": losses[epoch, order],
                "targets": np.where(order == 9, 0, order + 1),
                "source": [f"source {index % 2}" for index in order],
            }
        )
    return folder


def test_highest_and_lowest(run, losses):
    """The last loss of a row counts; a row that is never a target is in no list."""
    rows = RowLists(run)
    last = {index: loss for index, loss in enumerate(losses[2]) if index != 9}
    order = sorted(last, key=last.__getitem__)

    assert (len(rows), rows.num_records) == (29, 87)
    assert [row.index for row in rows.highest(5)] == order[:-6:-1]
    assert [row.index for row in rows.lowest(5)] == order[:5]
    assert len(rows.lowest(100)) == 29
    highest = rows.highest(1)[0]
    position = np.random.default_rng(2).permutation(NUM_ROWS).tolist().index(7)
    assert (highest.epoch, highest.position, highest.step) == (2, position, 21 + position // 3)
    assert (highest.loss, highest.first_loss) == (np.inf, losses[0, 7])
    assert (highest.num_epochs, highest.targets, highest.source) == (3, 8, "source 1")


def test_rows_that_never_fall(run, losses):
    """No loss of a later epoch is below the first one; the highest comes first."""
    later = np.nan_to_num(losses[1:], nan=np.inf).min(axis=0)
    expected = [n for n in range(NUM_ROWS) if later[n] >= losses[0, n] and n != 9]
    expected.sort(key=lambda index: -losses[2, index])

    assert [row.index for row in RowLists(run).never_fell(100)] == expected
    assert len(RowLists(run).never_fell(2)) == 2


def test_a_run_of_one_epoch(tmp_path):
    """Rows that were seen once can neither fall nor stay; without sources there is no column."""
    files = RowLossFiles(tmp_path)
    files.begin(0, sets_aside=True)
    columns = {"step": [1, 1], "epoch": [0, 0], "position": [0, 1], "index": [5, 3]}
    files.write(columns | {"loss": [1.5, 0.25], "targets": [2, 1]})
    lists = lists_of(RowLists(tmp_path), 10)

    assert {name: [row.index for row in rows] for name, rows in lists.items()} == {
        "highest": [5, 3],
        "lowest": [3, 5],
        "never fell": [],
    }
    assert list(table_lines(lists["lowest"])) == [
        "index  epoch  position  step  loss  first loss  num epochs  targets",
        "    3      0         1     1  0.25        0.25           1        1",
        "    5      0         0     1   1.5         1.5           1        2",
    ]
