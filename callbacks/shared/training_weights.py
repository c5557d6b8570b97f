"""Let monitors read the weights of the training, whatever the order of callbacks."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mfwrap.average.swap import training_weights

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


def reads_training(method: _Method) -> _Method:
    """Call a method within `mfwrap.average.swap.training_weights`.

    Another callback may have swapped averages into the weights, for an evaluation that follows the
    event, or the loop may have done so for a block of its own.
    """

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with training_weights():
            return method(*arguments, **keywords)

    return call  # type: ignore[return-value]  # (`wraps` keeps the signature)


def monitors_training(kind: _Class) -> _Class:
    """Let all events of a class of callbacks see the weights of the training; see `reads_training`.

    This includes all methods of the class itself whose names begin with ``on_``.
    """
    for name, method in list(vars(kind).items()):
        if name.startswith("on_"):
            setattr(kind, name, reads_training(method))
    return kind
