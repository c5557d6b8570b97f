"""Tell which tensors of a batch are targets, and which targets do not count in a loss."""

from torch import Tensor

_TARGETS = ("labels", "targets", "target")
"""Names under which a batch may hold its targets."""

IGNORED = -100
"""Target that torch's cross entropy ignores by default."""


def is_target(name: str, tensor: Tensor) -> bool:
    """Tell whether a tensor holds class indices to predict.

    Args:
        name: Dotted name of the tensor in the arguments of the network, or in its batch.
        tensor: The tensor.
    """
    return name.rpartition(".")[2] in _TARGETS and not tensor.is_floating_point()
