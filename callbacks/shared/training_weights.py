"""Let monitors read the weights of the training, whatever the order of callbacks."""

from typing import TypeVar

from mfwrap.average.swap import training_weights

_Class = TypeVar("_Class", bound=type)


def monitors_training(kind: _Class) -> _Class:
    """Let all events of a class of callbacks see the weights of the training.

    Another callback may have swapped averages into the weights, for an evaluation that follows the
    event, or the loop may have done so for a block of its own. So each method of the class itself
    whose name begins with ``on_`` runs within `mfwrap.average.swap.training_weights`, which may
    decorate other methods, too.
    """
    for name, method in list(vars(kind).items()):
        if name.startswith("on_"):
            setattr(kind, name, training_weights()(method))
    return kind
