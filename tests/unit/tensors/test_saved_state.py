"""Tests of the checks of saved states."""

import re

import pytest
import torch

from mfwrap.tensors.saved_state import check_keys, check_tensor


def test_keys_that_are_expected_pass():
    """The expected keys are accepted in any order."""
    check_keys({"b": 1, "a": 2}, {"a", "b"}, "loop")


@pytest.mark.parametrize("keys", [[], ["a"], ["a", "b", "c"]], ids=str)
def test_other_keys_are_refused(keys):
    """The error names the object and lists the expected and the given keys."""
    message = f"`state_dict` of this loop must have the keys ['a', 'b'], got {keys}"

    with pytest.raises(KeyError, match=re.escape(message)):
        check_keys(dict.fromkeys(keys), {"a", "b"}, "loop")


@pytest.mark.parametrize("state", [None, [], "a", 1], ids=repr)
def test_what_is_no_mapping_is_refused(state):
    """A state that is not a mapping raises a TypeError."""
    with pytest.raises(TypeError, match="`state_dict` of this loop must be a mapping, got"):
        check_keys(state, {"a"}, "loop")


def test_optional_keys_may_be_present_or_absent():
    """Optional keys are neither missing nor unknown."""
    for state in ({"a": 1}, {"a": 1, "b": 2}):
        check_keys(state, {"a"}, "loop", optional=frozenset("b"))


def test_a_tensor_of_the_same_shape_and_dtype_passes():
    """Values do not matter."""
    check_tensor("a", torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("value", "error", "got"),
    [
        (3, TypeError, "3 of type int"),
        (torch.zeros(3), ValueError, r"shape \(3,\) and torch.float32"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"shape \(2,\) and torch.int64"),
    ],
    ids=["number", "shape", "dtype"],
)
def test_what_does_not_replace_a_tensor_is_refused(value, error, got):
    """The error names the entry, and the shape and dtype that it must have."""
    expected = r"`state_dict\['a'\]` must be a tensor of shape \(2,\) and dtype torch.float32, got "

    with pytest.raises(error, match=expected + got):
        check_tensor("a", value, torch.zeros(2))
