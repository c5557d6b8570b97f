"""Copy and compare the whole state that an update may change, as one flat mapping."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["assert_same_state", "assert_unchanged", "training_state"]


def training_state(network: nn.Module, optimizer: Optimizer, *others: Any) -> dict[str, Any]:
    """Return a copy of the state of a network, an optimizer and other objects as a flat mapping.

    Args:
        network: Network whose weights and buffers are copied.
        optimizer: Optimizer whose state, step counts and settings are copied.
        others: Any objects with a ``state_dict``, such as a schedule or an average.
    """
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {type(other).__name__: other.state_dict() for other in others}
    return dict(_leaves("", state))


def assert_same_state(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Assert that two states have the same names and bit-identical values."""
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert _equal(value, actual[name]), name


def assert_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Assert that every value in `before` is bit-identical in `after`.

    State that an optimizer created in between must be zero, its initial value.
    """
    assert set(before) <= set(after)
    for name, value in after.items():
        if name in before:
            assert _equal(before[name], value), name
        else:
            assert not torch.as_tensor(value).any(), name


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        # NaN stands for norms that there have not been yet.
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return type(left) is type(right) and left == right


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Tensor):
        return [(name, value.detach().clone())]
    if isinstance(value, Mapping):
        value = list(value.items())
    elif isinstance(value, (list, tuple)):
        value = list(enumerate(value))
    else:
        return [(name, value)]
    return [leaf for key, item in value for leaf in _leaves(f"{name}/{key}", item)]
