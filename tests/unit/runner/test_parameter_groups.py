"""Parameter groups of a recipe: by schedule, then with and without weight decay."""

import pytest
from torch import nn

from mfwrap.runner import RecipeError
from mfwrap.runner.document import RecipeDocument
from mfwrap.runner.parameter_groups import RateGroup, parameter_groups

DOCUMENT = RecipeDocument.parse("task: regression", "r.yaml")


class Network(nn.Module):
    """A network with an embedding, two layers, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)


def names_by_group(network, *patterns):
    """Return the names of the parameters of each group, for these lists of patterns."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = parameter_groups(
        DOCUMENT,
        network,
        [RateGroup(("grouped", i), tuple(each), 0.5) for i, each in enumerate(patterns)],
        [name for name in names.values() if name.endswith("weight")],
        0.1,
    )
    return {
        (group.get("name"), group["weight_decay"], group.get("lr")): [
            names[id(parameter)] for parameter in group["params"]
        ]
        for group in groups
    }


def test_without_schedules_of_their_own():
    """There are two groups without names, as the Trainer makes them."""
    assert names_by_group(Network()) == {
        (None, 0.1, None): ["embed_tokens.weight", "layers.0.weight", "layers.1.weight"],
        (None, 0.0, None): ["layers.0.bias", "layers.1.bias"],
    }


def test_the_first_match_counts():
    """A pattern is a part of the name or a shell pattern; the default group comes first."""
    assert names_by_group(Network(), ["embed", "layers.0"], ["*.bias"]) == {
        ("default", 0.1, None): ["layers.1.weight"],
        ("embed,layers.0", 0.1, 0.5): ["embed_tokens.weight", "layers.0.weight"],
        ("embed,layers.0", 0.0, 0.5): ["layers.0.bias"],
        ("*.bias", 0.0, 0.5): ["layers.1.bias"],
    }


def test_a_group_that_nothing_matches():
    """Patterns that match only frozen parameters, or those of an earlier group, are an error."""
    for patterns in (["frozen"], ["embed_token"]):
        with pytest.raises(RecipeError, match="which match none"):
            names_by_group(Network(), ["embed"], patterns)
