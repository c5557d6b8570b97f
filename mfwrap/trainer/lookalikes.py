"""Override members of somebody else's object without changing the object or its class."""

import types
from typing import Any

from mfwrap.schedules.pickling import pickled_as


def lookalike(target: Any, **members: Any) -> Any:
    """Return a view of an object: an object of a subclass that shares the object's attributes.

    The view and the object have the same ``__dict__``, so an attribute that is set on one of them
    is set on both. Only `members` differ. The object itself stays as it is, because the overrides
    belong to the class of the view. A copy of the view is an object of the original class.

    Args:
        target: Object of a Python class.
        members: Functions, properties and values of the view's class.
    """
    kind = type(target)

    own = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce_ex__": lambda view, _: pickled_as(kind, view),
        **members,
    }
    subclass = types.new_class(kind.__name__, (kind,), exec_body=lambda names: names.update(own))
    view: Any = object.__new__(subclass)
    object.__setattr__(view, "__dict__", vars(target))
    return view
