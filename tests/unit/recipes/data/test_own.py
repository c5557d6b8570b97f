"""Data sets of the user's own: tables with a task's columns, and inputs of the model."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import TensorDataset

from mfwrap.recipes.data.own import OwnSource
from mfwrap.recipes.data.source import DataError


class Streamed(torch.utils.data.IterableDataset):
    """A data set without length."""

    def __iter__(self):
        return iter([1])


def source(found, **settings):
    """Return the source of a function that returns `found`."""
    return OwnSource(type="my.rows", make=lambda: found, **settings)


def numbers(rows):
    """Return the numbers in rows of a `TensorDataset`."""
    return [int(rows[index][0]) for index in range(len(rows))]


def test_a_table_is_divided_like_any_other():
    """A list of dictionaries becomes a table, whose columns are renamed."""
    rows = source(
        [{"body": str(number)} for number in range(10)], columns={"text": "body"}, eval_fraction=0.2
    ).rows()

    assert not rows.are_inputs
    assert (rows.train.column_names, len(rows.train), len(rows.evaluation)) == (["text"], 8, 2)


def test_inputs_are_held_out_at_random():
    """Each row is either trained on or held out, as the seed says; the order is kept."""
    data = TensorDataset(torch.arange(10))
    parts = [source(data, eval_fraction=0.25, split_seed=seed).rows() for seed in (0, 0, 1)]
    held_out = [numbers(rows.evaluation) for rows in parts]

    assert parts[0].are_inputs
    assert held_out[0] == held_out[1] != held_out[2]
    assert len(held_out[0]) == 3
    assert numbers(parts[0].train) == [n for n in range(10) if n not in held_out[0]]


def test_a_pair_has_its_own_held_out_rows():
    """The second part of a pair is held out, and the limits of rows hold for both parts."""
    pair = TensorDataset(torch.arange(9)), TensorDataset(torch.arange(100, 105))

    rows = source(pair, max_train_samples=4, max_eval_samples=2).rows()

    assert (numbers(rows.train), numbers(rows.evaluation)) == ([0, 1, 2, 3], [100, 101])


@pytest.mark.parametrize(
    ("found", "settings", "wanted"),
    [
        (3, {}, "`type` must give a datasets.Dataset, .* got a builtins.int"),
        ({"text": ["a"]}, {}, "got a builtins.dict"),
        (IterableDataset.from_generator(lambda: iter(())), {}, "got a datasets.iterable"),
        (([], [], []), {}, "a pair of .* got a tuple of 3"),
        ((Dataset.from_list([]), TensorDataset(torch.zeros(1))), {}, "of one kind"),
        (TensorDataset(torch.zeros(0)), {}, "`data` must have training rows, got none"),
        (TensorDataset(torch.zeros(4)), {"columns": {"a": "b"}}, "`columns` must be left out"),
        (
            Streamed(),
            {"max_train_samples": 1},
            "`max_train_samples` must be left out",
        ),
    ],
)
def test_what_is_refused(found, settings, wanted):
    """Anything that is neither a table nor a data set is refused in one sentence."""
    with pytest.raises(DataError, match=wanted):
        source(found, **settings).rows()


def test_without_code():
    """A source whose code may not run says so."""
    unread = OwnSource(type="my.rows")

    assert unread.why_unread is not None
    with pytest.raises(DataError, match=r"needs --allow-code to read data, got 'my.rows'"):
        unread.rows()
