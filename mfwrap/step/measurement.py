"""What one read of the gradients gives."""

from typing import NamedTuple

from torch import Tensor

from mfwrap.tensors.norm_groups import NormGroups


class Measurement(NamedTuple):
    """Result of one read of the gradients; tensors on the training device."""

    overflow: Tensor
    """Whether the norm of the scaled or unscaled gradients is non-finite, or their divisor is not a
    finite number > 0; shape ``()``, bool."""

    divisor: Tensor | None
    """Number that the gradients must be divided by, a copy, shape ``()``, float32; ``None`` for
    1."""

    global_norm: Tensor
    """L2 norm of all unscaled gradients, the same on all ranks, shape ``()``, float32."""

    own_squares: Tensor
    """Sum of squares of this rank's own scaled gradient of each parameter, shape ``(N,)``,
    float32."""

    own_divisor: Tensor | None
    """Divisor of this rank's own gradients, a copy, shape ``()``, float32; ``None`` for 1."""

    groups: NormGroups
    """The ``G`` groups of `local_norm`."""

    has_targets: Tensor | None
    """Whether the batch has at least one target, shape ``()``, bool; ``None`` if targets are not
    counted."""

    loss: Tensor | None = None
    """Loss to report, shape ``()``, float32; ``None`` if it was not given."""

    reduction_norms: Tensor | None = None
    """As in `StepReport`, a copy."""

    has_bad_rate: Tensor | None = None
    """Whether a learning rate is non-finite, shape ``()``, bool; ``None`` if it is unknown yet."""
