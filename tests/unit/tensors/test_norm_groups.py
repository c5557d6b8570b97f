"""Groups of parameters that share a local norm: by name, pattern, layer and callable."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.tensors.norm_groups import group_parameters, layer_of_module
from mfwrap.tensors.norms import sums_by_group

CPU = torch.device("cpu")
SIZES = {
    "model.embed_tokens.weight": 20,
    "model.layers.0.self_attn.q_proj.weight": 4,
    "model.layers.0.mlp.up_proj.weight": 6,
    "model.layers.1.self_attn.q_proj.weight": 4,
    "model.layers.1.mlp.up_proj.weight": 6,
    "lm_head.weight": 20,
}


def members(groups, sizes=SIZES):
    """Return the names of each group's parameters, by the group's name."""
    if groups.members is None:
        return {name: [name] for name in groups.names}
    names = [*sizes, None]
    return {
        group: [names[index] for index in row if index < len(sizes)]
        for group, row in zip(groups.names, groups.members.tolist(), strict=True)
    }


def test_by_default_each_parameter_is_a_group():
    """By default, each parameter is a group under its own name, in the network's order."""
    groups = group_parameters(SIZES, None, CPU)

    assert groups.names == tuple(SIZES)
    assert torch.equal(groups.sizes, torch.tensor(list(SIZES.values())))
    assert groups.sizes.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0"),
        ("model.layers.11.input_layernorm.weight", "model.layers.11"),
        ("transformer.h.1.mlp.weight", "transformer.h.1"),
        ("encoder.block.3.layer.0.SelfAttention.q.weight", "encoder.block.3"),
        ("0.weight", "0"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("conv1.bias", "conv1"),
        ("weight", "weight"),
        ("vit.embeddings.cls_token", "vit.embeddings"),
    ],
)
def test_layer_is_the_name_up_to_its_first_number(name, layer):
    """A layer is the name up to its first number, or else the parameter's module."""
    assert group_parameters({name: 1}, "layer", CPU).names == (layer,)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.10.self_attn.q_proj", "model.layers.10"),
        ("model.layers.3", "model.layers.3"),
        ("encoder.block.1.layer.0", "encoder.block.1"),
        ("0", "0"),
        ("model.embed_tokens", "model.embed_tokens"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_layer_of_a_module(name, layer):
    """A module outside of numbered layers is its own layer."""
    assert layer_of_module(name) == layer


def test_layers_gather_their_parameters_in_order():
    """A layer's parameters share a group, whose size is the number of all their elements."""
    groups = group_parameters(SIZES, "layer", CPU)

    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")
    assert groups.names == names
    assert groups.sizes.tolist() == [20, 10, 10, 20]
    assert members(groups)["model.layers.1"] == list(SIZES)[3:5]


def test_a_pattern_finds_what_no_earlier_one_found():
    """A parameter belongs to the first pattern that matches it, or to no group."""
    groups = group_parameters(SIZES, [r"layers\.0", "weight$"], CPU)

    assert groups.names == (r"layers\.0", "weight$")
    assert members(groups)["weight$"] == [name for name in SIZES if "layers.0" not in name]
    assert group_parameters(SIZES, ["lm_head"], CPU).sizes.tolist() == [20]


def test_a_callable_names_groups_or_leaves_out():
    """A callable returns a parameter's group, or None; groups keep the parameters' order."""
    found = re.compile(r"self_attn|mlp")

    def kind(name):
        match = found.search(name)
        return match and match[0]

    groups = group_parameters(SIZES, kind, CPU)
    assert groups.names == ("self_attn", "mlp")
    assert groups.sizes.tolist() == [8, 12]


@pytest.mark.parametrize("how", [None, "layer", ["weight"], lambda name: name])
def test_what_is_left_out_is_in_no_group(how):
    """A parameter that is left out is in no group, for every kind of grouping."""
    groups = group_parameters(SIZES, how, CPU, left_out=["lm_head.weight"])

    found = [name for names in members(groups).values() for name in names]
    assert found == [name for name in SIZES if name != "lm_head.weight"]
    assert groups.sizes.sum() == 40


@pytest.mark.parametrize(
    ("how", "left_out", "error", "message"),
    [
        (["weight", "bias"], [], ValueError, r"got no match for \['bias'\]"),
        (["lm_head"], ["lm_head.weight"], ValueError, r"got no match for \['lm_head'\]"),
        (lambda _: None, [], ValueError, "must match trainable parameters"),
        (
            None,
            list(SIZES),
            ValueError,
            "got 6 that are all frozen",
        ),
        (len, [], TypeError, "must return a str or None, got 25 for 'model.embed_tokens.weight'"),
    ],
    ids=["unfound", "left out", "none", "all left out", "no name"],
)
def test_groups_that_do_not_fit_are_refused(how, left_out, error, message):
    """A pattern without a match, no group at all, or a name that is not a str raises an error."""
    with pytest.raises(error, match=message):
        group_parameters(SIZES, how, CPU, left_out=left_out)


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=9).filter(lambda row: max(row) >= 0))
def test_sums_are_those_of_each_group(assignment):
    """Each group's sum is over its own members, whatever their order and number."""
    sizes = {f"p{index}": index + 1 for index in range(len(assignment))}
    by_name = dict(zip(sizes, assignment, strict=True))
    groups = group_parameters(
        sizes, lambda name: None if by_name[name] < 0 else f"g{by_name[name]}", CPU
    )
    squares = torch.arange(1.0, len(sizes) + 1)

    expected = [sum(sizes[name] for name in row) for row in members(groups, sizes).values()]
    assert sums_by_group(squares, groups.members).tolist() == expected


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_square_stays_in_its_group(bad):
    """An inf or nan of one group leaves the sums of all others finite."""
    squares = torch.tensor([1.0, 2.0, bad, 4.0, 5.0, 6.0])
    sums = sums_by_group(squares, group_parameters(SIZES, "layer", CPU).members)

    assert sums[[0, 2, 3]].tolist() == [1, 9, 6]
    assert not sums[1].isfinite()


def test_groups_cannot_be_changed():
    """Setting an attribute of the groups raises an error: names, sizes and members must match."""
    groups = group_parameters(SIZES, None, CPU)

    with pytest.raises(AttributeError):
        groups.names = ()
