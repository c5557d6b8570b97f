"""Models of the user's own classes."""

import pytest
import torch
from torch import nn

from mfwrap.recipes.models.loading import ModelError
from mfwrap.recipes.models.own import OwnModel


def test_values_that_follow_from_the_data():
    """A class gets what it takes of the values that follow from the data, and no others."""
    model = OwnModel(
        type="my.net",
        make=lambda **found: nn.Linear(found["num_features"], len(found)),
        takes=("num_features", "vocab_size"),
    )

    network = model.make_model(None, num_features=3, num_labels=7)

    assert (network.in_features, network.out_features) == (3, 1)


def test_dtypes():
    """The weights get the dtypes of the section, unless the model is an object of a program."""

    def make():
        return nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2), nn.Linear(2, 2))

    settings = {"dtype": "bfloat16", "norm_dtype": "float32"}

    network = OwnModel(type="my.net", make=make, **settings).make_model(None)
    kept = OwnModel(type="my.net", make=make, keeps_dtype=True, **settings).make_model(None)

    dtypes = [next(layer.parameters()).dtype for layer in network]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert {parameter.dtype for parameter in kept.parameters()} == {torch.float32}


def test_what_is_no_model():
    """Another result than a model is refused, as is a model whose code may not run."""
    with pytest.raises(ModelError, match=r"`type` must build a torch.nn.Module, got a int"):
        OwnModel(type="my.net", make=lambda: 3).make_model(None)
    with pytest.raises(ModelError, match=r"needs --allow-code to build a model, got 'my.net'"):
        OwnModel(type="my.net").make_model(None)


def test_without_its_code_a_model_is_not_local():
    """So that its first step is not tried."""
    assert OwnModel(type="my.net").obstacle == "the model needs code"
    assert OwnModel(type="my.net", make=nn.Identity).obstacle is None
