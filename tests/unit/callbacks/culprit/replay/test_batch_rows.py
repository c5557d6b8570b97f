"""The arguments of a call are split by rows, whatever holds them."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.batch_rows import BatchRows
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder


class Pair(NamedTuple):
    """Two values."""

    first: Any
    second: Any


class Network(nn.Module):
    """A network that takes anything."""

    def forward(self, *inputs, **others):
        """Return a loss."""
        return torch.zeros((), requires_grad=True) + len(inputs) + len(others)


def rows(*inputs, **others):
    """Return the rows of a call with these arguments."""
    recorder = StepRecorder(Network())
    recorder.network(*inputs, **others)
    recorder.end_step()
    return BatchRows(recorder.last_step[0])


def test_what_is_split():
    """Tensors and lists with one entry per row are split; all other arguments are passed whole."""
    column, positions = torch.arange(5), torch.arange(3)[None]
    batch = UserDict(images=column * 10, names=list("abcde"))
    call = rows(column, positions, batch, Pair(column, 2), scale=torch.tensor(3.0), flag=True)
    assert call.num_rows == 5
    taken = call.take([3, 1])
    (first, whole, split, pair), others = taken.positional, taken.keywords

    assert first.tolist() == [3, 1]
    assert whole is positions
    assert isinstance(split, UserDict)
    assert (split["images"].tolist(), split["names"]) == ([30, 10], ["d", "b"])
    assert batch["names"] == list("abcde")
    assert (pair.first.tolist(), pair.second) == ([3, 1], 2)
    assert others == {"scale": torch.tensor(3.0), "flag": True}


def test_targets_are_counted():
    """Targets are counted for each row, with and without its first one."""
    labels = torch.tensor([[4, 5, -100], [-100, 6, 7]])
    assert rows(torch.ones(2, 3), labels=labels).num_targets() == [(2, 2), (1, 2)]
    assert rows(torch.ones(2, 3), labels=torch.ones(2, 3)).num_targets() == []


def test_a_call_without_a_batch():
    """Arguments without a row dimension cannot be split."""
    with pytest.raises(ValueError, match="hold no batch"):
        rows(torch.tensor(1.0), flag=True)
