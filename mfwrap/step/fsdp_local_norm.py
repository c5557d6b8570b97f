"""Norms of a rank's own gradients under ``fully_shard``, from before they are reduced."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from mfwrap.step.fsdp import ShardedParts, ShardedUnit
from mfwrap.step.local_norms import LocalSquares
from mfwrap.tensors.devices import on_device
from mfwrap.tensors.norms import sum_of_squares
from mfwrap.tensors.shards import is_distributed

__all__ = ["ShardedLocalSquares", "sharded_local_squares_of"]


@final
class _UnitSquares:
    """Sums of squares of one unit's gradients, taken each time that they are about to be reduced.

    Args:
        unit: Which.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit
        self.by_parameter: dict[int, Tensor] = {}
        """Shape ``()``, float32, by the ``id`` of the parameter's shard."""
        self.is_repeated = False
        """Whether a gradient was reduced again, after its earlier part was gone."""
        unit.before_reduction().callbacks.add(self)

    def __call__(self) -> None:
        """Read the gradients, once."""
        present = self._unit.gradients()
        if not present:
            return
        device = present[0][1].device
        # The backward that calls may run inside a caller's autocast.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            squares = sum_of_squares([gradient for _, gradient in present], device).unbind()
        identities = [id(parameter) for parameter, _ in present]
        self.is_repeated |= not self.by_parameter.keys().isdisjoint(identities)
        self.by_parameter.update(zip(identities, squares, strict=True))

    def reset(self) -> None:
        """Forget what was read."""
        self.by_parameter.clear()
        self.is_repeated = False


@final
class ShardedLocalSquares:
    """`LocalSquares` of parameters under ``fully_shard``.

    One read of each unit's whole gradients before their reduction, and no message. With
    accumulation they hold the sum over all micro-batches if those before the last are not reduced
    (``set_requires_gradient_sync``).

    Args:
        parameters: ``N`` trained parameters, in order.
        parts: The sharded parts of the network.
        others: Where the squares of parameters come from that are not distributed; ``None`` if
            their gradients are this rank's own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        parts: ShardedParts,
        others: LocalSquares | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._others = others
        self._units = [_UnitSquares(unit) for unit in parts.units]

    def squares(self, reduced: Tensor) -> Tensor:
        if any(unit.is_repeated for unit in self._units):
            msg = (
                "`local_norm` must be False where gradients are reduced more than once an update, "
                "of which the earlier part is gone then; let all backward passes but the last "
                "gather (set_requires_gradient_sync, accumulate)"
            )
            raise RuntimeError(msg)
        if self._others is not None:
            reduced = self._others.squares(reduced)
        seen: dict[int, Tensor] = {}
        for unit in self._units:
            seen |= unit.by_parameter
        return torch.stack(
            [
                self._square(parameter, seen.get(id(parameter)), other)
                for parameter, other in zip(self._parameters, reduced.unbind(), strict=True)
            ]
        )

    @staticmethod
    def _square(parameter: nn.Parameter, seen: Tensor | None, other: Tensor) -> Tensor:
        # A gradient that is gone since, or never came, counts as zero.
        if not is_distributed(parameter) or parameter.grad is None:
            return other
        if seen is None:
            msg = (
                "`local_norm` must be False with this torch, whose `fully_shard` reduces gradients "
                f"in another way than mfwrap knows, got torch {torch.__version__}"
            )
            raise RuntimeError(msg)
        return on_device(seen, other.device)

    def reset(self) -> None:
        if self._others is not None:
            self._others.reset()
        for unit in self._units:
            unit.reset()


def sharded_local_squares_of(
    parts: ShardedParts,
    parameters: Sequence[nn.Parameter],
    others: LocalSquares | None = None,
    *,
    are_asked_for: bool,
) -> LocalSquares | None:
    """Return where local norms come from under ``fully_shard``.

    Args:
        parts: The sharded parts of the network.
        parameters: The trained ones, in order.
        others: As in `ShardedLocalSquares`.
        are_asked_for: Whether anyone reads local norms.

    Returns:
        `others` if nobody does, or no gradient is sharded over ranks.

    Raises:
        ValueError: If a parameter is distributed over more ranks than its gradient is reduced
            over, or over ranks without ``fully_shard``.
    """
    if not are_asked_for or not any(is_distributed(parameter) for parameter in parameters):
        return others
    reduced = {id(p) for unit in parts.units if not unit.is_split_further for p in unit.parameters}
    if any(is_distributed(p) and id(p) not in reduced for p in parameters):
        msg = (
            "`local_norm` must be False for parameters that are distributed otherwise than by "
            "`fully_shard` alone (tensor parallelism), of which no rank has a whole gradient, or "
            "whose network was not given (prepared)"
        )
        raise ValueError(msg)
    if all(len(unit.ranks) == 1 for unit in parts.units):
        return others
    return ShardedLocalSquares(parameters, parts, others)
