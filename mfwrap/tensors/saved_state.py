"""Check the entries of a saved state before any of them is loaded."""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from torch import Tensor

from mfwrap.arguments import described


def check_keys(
    state_dict: object,
    expected: Collection[str],
    owner: str,
    *,
    optional: AbstractSet[str] = frozenset(),
) -> None:
    """Check that a state has exactly the expected keys.

    Args:
        state_dict: State to check.
        expected: Keys that the state must have.
        owner: Kind of object that the state belongs to, for errors.
        optional: Keys that the state may have.

    Raises:
        KeyError: If a key is missing or unknown.
        TypeError: If `state_dict` is not a mapping.
    """
    if not isinstance(state_dict, Mapping):
        msg = f"`state_dict` of this {owner} must be a mapping, got {described(state_dict)}"
        raise TypeError(msg)
    if set(state_dict) - optional != set(expected) - optional:
        msg = (
            f"`state_dict` of this {owner} must have the keys {sorted(expected)}, "
            f"got {sorted(state_dict)}"
        )
        raise KeyError(msg)


def check_tensor(name: str, value: object, present: Tensor) -> None:
    """Check that an entry of a state is a tensor of the shape and dtype that it replaces.

    Args:
        name: Key of the entry.
        value: The entry.
        present: Tensor that the entry replaces.

    Raises:
        TypeError: If `value` is not a tensor.
        ValueError: If `value` has another shape or dtype.
    """
    if isinstance(value, Tensor):
        if (value.shape, value.dtype) == (present.shape, present.dtype):
            return
        got = f"shape {tuple(value.shape)} and {value.dtype}"
    else:
        got = described(value)
    msg = (
        f"`state_dict[{name!r}]` must be a tensor of shape {tuple(present.shape)} and dtype "
        f"{present.dtype}, got {got}"
    )
    raise (ValueError if isinstance(value, Tensor) else TypeError)(msg)
