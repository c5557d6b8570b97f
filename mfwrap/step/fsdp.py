"""The parts of a network that ``fully_shard`` was applied to, and how they reduce gradients.

All that is private in torch's FSDP2 is used here and nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mfwrap.step.local_norms import LocalSquares
from mfwrap.tensors.norms import sum_of_squares
from mfwrap.tensors.sharded_norms import SquareReduction
from mfwrap.tensors.shards import is_distributed, on_device
from mfwrap.tensors.wrappers import sharded_parts

__all__ = [
    "ShardedParts",
    "ShardedUnit",
    "sharded_local_squares_of",
]


@final
class ReductionSeam:
    """Stands where torch calls the reduction of a unit, and calls others before it.

    Args:
        group: torch's ``FSDPParamGroup``.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._reduce: Callable[..., None] = group.post_backward
        self.callbacks: WeakSet[Callable[[], None]] = WeakSet()
        """Held by whoever is called back; with none of them nothing is done."""

    def __call__(self, *arguments: object) -> None:
        """Call back, and reduce."""
        if self._group.reduce_grads:
            for callback in self.callbacks:
                callback()
        self._reduce(*arguments)


@final
class ShardedUnit:
    """Parameters of one ``fully_shard`` call, which are reduced together.

    Args:
        group: torch's ``FSDPParamGroup``.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards that an optimizer holds."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks over which gradients are reduced, replicas included."""
        return frozenset(self._group.mesh_info.mesh.mesh.flatten().tolist())

    @property
    def divisor(self) -> float:
        """What the sum over ranks is divided by."""
        factor: float | None = self._group.gradient_divide_factor
        return float(self._group.mesh_info.mesh.size() if factor is None else factor)

    @property
    def is_split_further(self) -> bool:
        """Whether parameters are distributed over more ranks than gradients are reduced over."""
        ranks = self.ranks
        return any(
            is_distributed(p) and not ranks.issuperset(p.device_mesh.mesh.flatten().tolist())
            for p in self.parameters
        )

    def before_reduction(self) -> "ReductionSeam":
        """Return what is called each time that gradients are about to be reduced."""
        # No public seam sees whole gradients: a reduce-scatter gets them cut and put together
        # again, divided in float16, without a word about parameters that were not used.
        seam = self._group.__dict__.get("post_backward")
        if not isinstance(seam, ReductionSeam):
            seam = ReductionSeam(self._group)
            self._group.post_backward = seam
        return seam

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return this rank's own whole gradients, with the shards of their parameters.

        Of all backward passes since the last reduction, just before the next one; no copies.
        """
        present = []
        for each in self._group.fsdp_params:
            unsharded = getattr(each, "_unsharded_param", None)
            if unsharded is None:
                continue
            # What the reduction itself begins with; a second time there is nothing left to do.
            each.accumulate_unsharded_grad_if_needed()
            if each.unsharded_accumulated_grad is not None:
                present.append((each.sharded_param, each.unsharded_accumulated_grad_data))
            elif unsharded.grad is not None:
                present.append((each.sharded_param, each.unsharded_grad_data))
        return present

    def discard_gradients(self) -> None:
        """Forget whole gradients that wait for a reduction."""
        for each in self._group.fsdp_params:
            each.unsharded_accumulated_grad = None
            unsharded = getattr(each, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


@final
class ShardedParts:
    """All parts of networks that are sharded; none for networks without.

    Args:
        networks: Those that are called.
    """

    def __init__(self, *networks: nn.Module) -> None:
        self._parts = [part for network in networks for part in sharded_parts(network)]
        # Several modules that are sharded together are parts of one group.
        groups = {
            id(group): group
            for part in self._parts
            for group in part._get_fsdp_state()._fsdp_param_groups
        }
        self.units: list[ShardedUnit] = [ShardedUnit(group) for group in groups.values()]
        """What is reduced together."""

    def reduce_gradients(self, *, now: bool) -> None:
        """Reduce gradients in the backward passes that follow, or gather them until they are."""
        for part in self._parts:
            part.set_requires_gradient_sync(now, recurse=False)

    def discard_half_a_step(self) -> None:
        """Forget what a forward or backward that raised has left: gradients, gathered weights."""
        for unit in self.units:
            unit.discard_gradients()
        for part in self._parts:
            if part._get_fsdp_state()._is_root:
                part.reset_iter_state()

    def check_per_token(self, reduction: SquareReduction | None) -> None:
        """Check that token counts can be summed where gradients are.

        Args:
            reduction: Of all trained parameters; ``None`` if none of them is distributed.

        Raises:
            ValueError: If gradients are not all reduced over the same ranks by the same divisor.
        """
        holders = set() if reduction is None else {reduction.ranks}
        ranks = {unit.ranks for unit in self.units}
        if ranks != holders:
            msg = (
                "`calculate_per_token_loss` must be False unless `fully_shard` reduces all "
                "gradients over the ranks that hold the trained parameters, got reductions over "
                f"{sorted(map(sorted, ranks))} for {sorted(map(sorted, holders))}"
            )
            raise ValueError(msg)
        _ = self.divisor

    @property
    def divisor(self) -> float:
        """What sums of gradients over ranks are divided by; 1 without sharded parts.

        Raises:
            ValueError: If it is not the same for all units.
        """
        divisors = {unit.divisor for unit in self.units}
        if len(divisors) > 1:
            msg = (
                "`network` must divide all gradients by the same number of ranks with "
                f"calculate_per_token_loss=True, got {sorted(divisors)}"
            )
            raise ValueError(msg)
        return divisors.pop() if divisors else 1.0


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
