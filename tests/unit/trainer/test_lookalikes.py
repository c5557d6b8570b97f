"""A view of an object has other members, and the object stays as it is."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from mfwrap.trainer.lookalikes import lookalike


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2),
        lambda: GPT2Model(GPT2Config(vocab_size=4, n_embd=2, n_layer=1, n_head=1)),
    ],
    ids=["torch", "transformers"],
)
def test_a_view_shares_the_attributes(make):
    """What is set on one of the two is set on both; a copy of the object is of its own class."""
    target = make()
    kind = type(target)
    view = lookalike(target, extra_repr=lambda self: f"seen of {type(self).__name__}")
    view.mark, target.other = 1, 2

    assert (target.mark, view.other) == (1, 2)
    assert isinstance(view, kind)
    assert (type(view).__name__, type(view).__module__) == (kind.__name__, kind.__module__)
    assert view.extra_repr() == f"seen of {kind.__name__}"
    assert target.extra_repr() != view.extra_repr()
    assert all(map(torch.equal, view.parameters(), target.parameters()))
    for each in (target, view):
        loaded = pickle.loads(pickle.dumps(each))  # noqa: S301  (pickled just now)
        for copied in (copy.deepcopy(each), loaded):
            assert type(copied) is kind
            assert all(map(torch.equal, copied.parameters(), target.parameters()))


def test_a_property_of_a_view_hides_an_attribute():
    """A property of the view has precedence over the attribute of the object."""
    target = nn.Linear(2, 3)
    view = lookalike(target, in_features=property(lambda _: 5))

    assert (view.in_features, target.in_features, view.out_features) == (5, 2, 3)
