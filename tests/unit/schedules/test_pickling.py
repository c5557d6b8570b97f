"""`pickled_as` pickles an object of a class made at run time as an object of its earlier class."""

import copy
import pickle
from typing import Any

import pytest

from mfwrap.schedules.pickling import pickled_as


class Plain:
    """A user's class with a state of its own."""

    def __init__(self) -> None:
        self.kept, self.changed, self.made = [1], 2, 3

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "made"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, made="again")


class Listed(Plain):
    """A user's class whose state is not a dict."""

    def __getstate__(self) -> Any:
        return [self.kept]

    def __setstate__(self, state: Any) -> None:
        (self.kept,) = state


def changed(kind: type) -> Any:
    """Return an object of `kind` whose class was replaced by a subclass that no module has."""

    def __reduce_ex__(instance: Any, _protocol: Any) -> Any:  # noqa: N807  (a method)
        return pickled_as(kind, instance, without=("added",), changed=20)

    instance = kind()
    instance.__class__ = type("Made", (kind,), {"__reduce_ex__": __reduce_ex__})
    instance.added = lambda: None
    return instance


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_object_is_of_the_earlier_class(protocol):
    """The class, its own ``__getstate__`` and ``__setstate__``, and the changes are respected."""
    data = pickle.dumps(changed(Plain), protocol)
    loaded = pickle.loads(data)  # noqa: S301  (pickled just now)

    assert type(loaded) is Plain
    assert vars(loaded) == {"kept": [1], "changed": 20, "made": "again"}
    assert b"mfwrap" not in data


def test_a_state_that_is_no_dict_is_left_alone():
    """If the class makes its own state, the state is passed on as it is."""
    loaded = pickle.loads(pickle.dumps(changed(Listed)))  # noqa: S301  (pickled just now)

    assert type(loaded) is Listed
    assert vars(loaded) == {"kept": [1]}


@pytest.mark.parametrize(("make", "is_shared"), [(copy.copy, True), (copy.deepcopy, False)])
def test_a_copy_is_of_the_earlier_class(make, is_shared):
    """``copy`` and ``deepcopy`` give an object of the earlier class, and keep their depths."""
    original = changed(Plain)

    copied = make(original)

    assert type(copied) is Plain
    assert (copied.kept is original.kept) is is_shared
    assert not hasattr(copied, "added")
