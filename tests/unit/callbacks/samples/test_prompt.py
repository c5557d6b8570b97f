"""Held-out rows are read without advancing any data loader."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader, default_collate

from mfwrap.callbacks.samples.prompt import decoded, held_out_batches, text_tokenizer
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from support.trainer_runs import EndlessCounting

ROWS = [{"x": float(n)} for n in range(5)]


def rows():
    """Yield the rows of a stream."""
    yield from ROWS


@pytest.mark.parametrize(
    "data", [ROWS, Dataset.from_list(ROWS), IterableDataset.from_generator(rows)], ids=str
)
def test_first_rows(data):
    """The first rows are batches of one row each; the loader then yields what it yields anyway."""
    loader = DataLoader(data, batch_size=2, collate_fn=default_collate)
    state = torch.get_rng_state()
    found = held_out_batches(loader, 3)

    assert [batch["x"].tolist() for batch in found] == [[0.0], [1.0], [2.0]]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(held_out_batches(loader, 9)) == 5
    assert next(iter(loader))["x"].tolist() == [0.0, 1.0]


def test_other_streams():
    """A stream that may have only one pass is refused."""
    with pytest.raises(ValueError, match="needs `prompts`, or held-out rows in a data set with"):
        held_out_batches(DataLoader(EndlessCounting()), 2)


def test_texts():
    """Special tokens are left out; without a tokenizer the numbers are shown."""
    tokenizer = byte_tokenizer()
    ids = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id]

    assert decoded(torch.tensor(ids), tokenizer) == "ab"
    assert decoded([1, 2], None) == "1 2"
    assert text_tokenizer(tokenizer) is tokenizer
    assert text_tokenizer(None) is None
