"""A batch is split into equal calls of the network; a sequence gives a call per micro-batch."""

from collections import OrderedDict, UserDict, deque
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.step.calls import NetworkCall, calls_of, split_calls, tensors_in

X = torch.arange(12.0).reshape(6, 2)
Y = torch.arange(6)


@given(st.integers(1, 6), st.integers(0, 4), st.lists(st.integers(1, 3), max_size=2))
def test_parts_are_equal_and_make_up_the_whole(num_parts, part_size, rest):
    """A tensor is split along its first dimension into equal views, in order."""
    tensor = torch.randn(num_parts * part_size, *rest)
    calls = split_calls((tensor,), {"labels": tensor}, num_parts)

    parts = [call.arguments[0] for call in calls]
    assert [part.shape[0] for part in parts] == [part_size] * num_parts
    assert torch.equal(torch.cat(parts), tensor)
    assert torch.equal(torch.cat([call.keywords["labels"] for call in calls]), tensor)
    assert {p.untyped_storage().data_ptr() for p in parts} == {tensor.untyped_storage().data_ptr()}


def test_arguments_and_keywords_are_split_together():
    """Each call gets its slice of every argument and keyword."""
    first, second = split_calls((X,), {"labels": Y, "scale": 2.0}, 2)

    assert torch.equal(first.arguments[0], X[:3])
    assert torch.equal(first.keywords["labels"], Y[:3])
    assert torch.equal(second.arguments[0], X[3:])
    assert torch.equal(second.keywords["labels"], Y[3:])


@pytest.mark.parametrize("value", [torch.tensor(3.0), None, 3, "text", slice(2), {1, 2}], ids=repr)
def test_what_has_no_dimension_goes_to_every_call(value):
    """Every call gets 0-dim tensors and values that are not tensors unchanged."""
    calls = split_calls((X, value), {"extra": value}, 3)

    assert all(call.arguments[1] is value for call in calls)
    assert all(call.keywords["extra"] is value for call in calls)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_tensors_in_mappings_are_split(kind):
    """A batch that is one mapping becomes one mapping per call."""
    batch = kind({"x": X, "nested": {"y": Y}, "flag": True})
    first, second = (call.arguments[0] for call in split_calls((batch,), {}, 2))

    assert torch.equal(first["x"], X[:3])
    assert torch.equal(second["nested"]["y"], Y[3:])
    assert first["flag"] is True


@pytest.mark.parametrize("kind", [list, tuple])
def test_tensors_in_lists_and_tuples_are_split(kind):
    """Each call gets a container of the same type, with its slice of each tensor."""
    first, second = (call.arguments[0] for call in split_calls((kind([X, [Y], 1]),), {}, 2))

    assert type(first) is kind
    assert torch.equal(first[0], X[:3])
    assert torch.equal(second[1][0], Y[3:])
    assert (first[2], second[2]) == (1, 1)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_tensors_in_named_tuples_are_split():
    """Each call gets a named tuple of the same type, with its slice of each tensor."""
    calls = split_calls((Pair(X, Y),), {}, 2)

    assert [type(call.arguments[0]) for call in calls] == [Pair, Pair]
    assert torch.equal(calls[1].arguments[0].first, X[3:])
    assert torch.equal(calls[0].arguments[0].second, Y[:3])


def test_one_micro_batch_is_the_batch_itself():
    """A single call gets the batch itself without a copy."""
    [call] = split_calls((X,), {"y": Y}, 1)

    assert call.arguments[0] is X
    assert call.keywords["y"] is Y


@pytest.mark.parametrize(
    ("arguments", "keywords", "name"),
    [
        ((Y, X), {}, r"inputs\[0\]"),
        ((), {"labels": Y}, "labels"),
        (({"a": {"b": Y}},), {}, r"inputs\[0\]\['a'\]\['b'\]"),
        (([1, Y],), {}, r"inputs\[0\]\[1\]"),
    ],
    ids=["first", "keyword", "mapping", "list"],
)
def test_a_size_that_does_not_divide_is_refused_by_name(arguments, keywords, name):
    """The error names the tensor, its shape and the number of parts."""
    message = rf"`{name}` must be divisible by gradient_accumulation_steps=4, got shape \(6,"

    with pytest.raises(ValueError, match=message):
        split_calls(arguments, keywords, 4)


AXES = torch.arange(3.0)


@pytest.mark.parametrize(
    ("arguments", "keywords", "names"),
    [
        ((X, AXES), {}, r"6 for `inputs\[0\]` and 3 for `inputs\[1\]`"),
        ((X,), {"axes": AXES}, r"6 for `inputs\[0\]` and 3 for `axes`"),
        (
            ({"x": X, "of": [AXES]},),
            {},
            r"6 for `inputs\[0\]\['x'\]` and 3 for `inputs\[0\]\['of'\]\[0\]`",
        ),
    ],
    ids=["positional", "keyword", "nested"],
)
def test_first_dimensions_that_differ_are_refused_by_name(arguments, keywords, names):
    """The error names both tensors, although each could be split, and what to do."""
    message = rf"must have equal first dimensions .*=3, got {names}; name .* in `not_split`"

    with pytest.raises(ValueError, match=message):
        split_calls(arguments, keywords, 3)


@pytest.mark.parametrize(
    ("arguments", "keywords", "not_split"),
    [
        ((X, AXES), {}, [1]),
        ((X,), {"axes": AXES}, ["axes"]),
        (({"x": X, "more": {"axes": [AXES]}},), {}, ("axes",)),
        (({"x": X, "more": {"axes": [AXES]}},), {}, ["absent", 7, "more"]),
    ],
    ids=["positional", "keyword", "nested", "mapping"],
)
def test_what_is_not_split_goes_to_every_call(arguments, keywords, not_split):
    """Every call gets what is named as it is, and its slice of the rest."""
    calls = split_calls(arguments, keywords, 3, not_split)

    for number, call in enumerate(calls):
        rows, *rest = tensors_in([*call.arguments, call.keywords])
        assert torch.equal(rows, X[2 * number : 2 * number + 2])
        assert all(each is AXES for each in rest)


@pytest.mark.parametrize(
    ("micro_batch", "call"),
    [
        ({"x": 1, "y": 2}, NetworkCall((), {"x": 1, "y": 2})),
        (UserDict(x=1), NetworkCall((), {"x": 1})),
        ((1, 2), NetworkCall((1, 2), {})),
        ([1, 2], NetworkCall(([1, 2],), {})),
        (None, NetworkCall((None,), {})),
        ("text", NetworkCall(("text",), {})),
    ],
    ids=["dict", "mapping", "tuple", "list", "none", "string"],
)
def test_a_micro_batch_becomes_a_call(micro_batch, call):
    """A mapping is passed as keywords, a tuple as several arguments, a list as one argument."""
    assert calls_of([micro_batch]) == [call]


def test_a_tensor_is_one_argument():
    """A micro-batch that is a tensor becomes one positional argument."""
    [call] = calls_of([X])

    assert call.arguments[0] is X
    assert call.keywords == {}


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_micro_batches_may_be_of_any_number_and_kind(kind):
    """Any sequence with at least one micro-batch is read in its order."""
    assert [call.arguments[0] for call in calls_of(kind([1, 2, 3]))] == [1, 2, 3]
    assert len(calls_of(kind([1]))) == 1


@pytest.mark.parametrize(
    "micro_batches",
    [X, {"x": X}, (x for x in X), "text", None, 3, {1}],
    ids=["tensor", "dict", "generator", "string", "none", "int", "set"],
)
def test_what_is_no_sequence_is_refused(micro_batches):
    """`micro_batches` that is not a sequence raises a TypeError."""
    kind = type(micro_batches).__name__

    with pytest.raises(TypeError, match=f"`micro_batches` must be a sequence, got {kind}$"):
        calls_of(micro_batches)


@pytest.mark.parametrize("micro_batches", [[], (), deque()], ids=["list", "tuple", "deque"])
def test_no_micro_batches_are_refused(micro_batches):
    """An empty sequence of micro-batches raises an error."""
    with pytest.raises(ValueError, match="`micro_batches` must hold at least one micro-batch"):
        calls_of(micro_batches)


def test_changing_a_call_does_not_change_the_batch():
    """Changing a call's keywords does not change the batch."""
    batch = {"x": X}
    calls_of([batch])[0].keywords["num_items_in_batch"] = 1

    assert batch == {"x": X}
