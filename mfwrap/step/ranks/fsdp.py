"""Networks that torch's ``fully_shard`` (FSDP2) has sharded, and how their gradients are reduced.

Each call of ``fully_shard`` makes a *unit*, a group of parameters. A unit's parameters are gathered
together before its forward, and their gradients are reduced together after its backward. Before the
reduction the gradients are *whole*: backward writes them to torch's own unsharded parameters. The
reduction (a reduce-scatter) averages them over the ranks, writes this rank's shard into
``parameter.grad`` as a DTensor, and frees the whole gradients. The optimizer and all code outside
this file see only the shards.

Three tasks need more than the shards:

- **Local norms.** They are norms of this rank's own whole gradients, so they must be read after
  backward and before the reduction. torch has no public hook at this point. `ReductionSeam`
  replaces the method ``post_backward`` of torch's parameter group: it lets its callbacks read the
  gradients (`_UnitSquares`, `ShardedLocalSquares`), and then calls the original method.
- **Accumulation.** Until the last micro-batch, gradients must stay whole and unreduced
  (``set_requires_gradient_sync``), because shards would already be means over ranks. Meanwhile the
  whole gradients are in torch's private attributes, and ``parameter.grad`` is None.
- **Errors.** A forward or backward that raises leaves whole weights and whole gradients behind.
  `ShardedParts.discard_half_a_step` removes them, so that the next step does not find them.

`mfwrap.compatibility.fully_shard` has the private names of torch's FSDP2 that this takes.
"""

from collections.abc import Callable, Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import Section, section_clock
from mfwrap.compatibility.fully_shard import (
    HALF_PRECISION,
    ParameterGroup,
    groups_of,
    reset_iteration,
)
from mfwrap.step.ranks.local_norms import CommunicationHook, LocalSquares, replicated_squares_of
from mfwrap.step.ranks.waiting import time_method
from mfwrap.tensors.norms import NormReader
from mfwrap.tensors.sharded_norms import SquareReduction
from mfwrap.tensors.shards import is_distributed, mesh_groups, on_device
from mfwrap.tensors.wrappers import sharded_parts

_STUCK: WeakSet[Any] = WeakSet()
"""Sharded modules that this version of torch cannot use after a forward or backward has raised."""


@final
class ReductionSeam:
    """Call callbacks just before torch reduces the gradients of a unit.

    Args:
        group: The unit's parameters.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group
        self._reduce = group.reduction
        self._policies = group.policies()
        self._keeps_float32 = False
        self.callbacks: WeakSet[Callable[[], None]] = WeakSet()
        """Weak references: each callback's owner keeps it alive. With none left, only the
        reduction runs."""

    def __call__(self, *arguments: object) -> None:
        """Call the callbacks if gradients are about to be reduced, then torch's own method."""
        # torch calls this after every backward. With the reduction off, torch's method does not
        # reduce the gradients but keeps them for a later backward, so it is too early to read them.
        if not self._group.is_reducing:
            self._reduce(*arguments)
            return
        for callback in self.callbacks:
            callback()
        if self._keeps_float32:
            self._group.keep_float32()
        with section_clock.within(Section.WAITING):
            self._reduce(*arguments)

    def accumulate_in_float32(self, *, on: bool) -> None:
        """Make torch add up and reduce gradients in float32, or as the unit's policy says.

        Reduced gradients of half-precision weights then keep float32, so the ``grad_dtype`` of
        these weights must be float32.
        """
        self._group.reduce_in_float32(self._policies, on=on)
        self._keeps_float32 = on


@final
class ShardedUnit:
    """The parameters of one ``fully_shard`` call, whose gradients are reduced together.

    Args:
        group: The parameters.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sharded parameters: the ones that an optimizer holds."""
        return self._group.parameters

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks over which gradients are reduced, replicas included."""
        return frozenset(self._group.mesh.mesh.flatten().tolist())

    @property
    def group(self) -> "distributed.ProcessGroup | None":
        """Group of all `ranks`; ``None`` if torch has no such group, or there is one rank."""
        groups = mesh_groups(self._group.mesh)
        return groups[0] if len(groups) == 1 else None

    @property
    def divisor(self) -> float:
        """Number by which torch divides the sum of gradients over ranks."""
        factor = self._group.divisor
        return float(self._group.mesh.size() if factor is None else factor)

    @property
    def is_split_further(self) -> bool:
        """Whether a parameter is distributed over more ranks than its gradient is reduced over.

        This is so with tensor parallelism, for example.
        """
        ranks = self.ranks
        return any(
            is_distributed(p) and not ranks.issuperset(p.device_mesh.mesh.flatten().tolist())
            for p in self.parameters
        )

    @property
    def computes_in_half_precision(self) -> bool:
        """Whether backward computes this unit's gradients in half precision."""
        return not self._group.compute_dtypes.isdisjoint(HALF_PRECISION)

    def before_reduction(self) -> "ReductionSeam":
        """Return the unit's `ReductionSeam`, and install it if there is none yet."""
        # torch's public hook replaces the reduce-scatter. Norms cannot be read there: the hook gets
        # gradients that are already cut into pieces and, in float16, already divided. It also
        # cannot know which parameters had no gradient.
        seam = self._group.reduction
        if not isinstance(seam, ReductionSeam):
            seam = ReductionSeam(self._group)
            self._group.reduction = seam
        return seam

    def accumulate_in_float32(self, *, on: bool) -> None:
        """Set whether half-precision gradients are added up and reduced in float32 from now on."""
        if self.computes_in_half_precision:
            self.before_reduction().accumulate_in_float32(on=on)

    def time_collectives(self) -> None:
        """Count the time in gathers and reductions as waiting for other ranks from now on."""
        self.before_reduction()
        for name in self._group.GATHERS:
            time_method(self._group.group, name)

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return pairs of a sharded parameter and its whole gradient; see `ParameterGroup`."""
        return self._group.gradients()

    def discard_gradients(self) -> None:
        """Free whole gradients that were not reduced."""
        self._group.discard_gradients()


@final
class ShardedParts:
    """The modules in `networks` that ``fully_shard`` has sharded; possibly no module.

    Args:
        networks: Networks to search.
    """

    def __init__(self, *networks: nn.Module) -> None:
        self._parts = [part for network in networks for part in sharded_parts(network)]
        # One call of fully_shard may take several modules. They share a group: list it once.
        groups = {id(each.group): each for part in self._parts for each in groups_of(part)}
        self.units: list[ShardedUnit] = [ShardedUnit(group) for group in groups.values()]
        """Units of all networks."""

    @property
    def group(self) -> "distributed.ProcessGroup | None":
        """Group of the unit with the most ranks; ``None`` without units or without a group."""
        # The largest unit has all ranks of the others, or the norms could not be added up. So the
        # ranks of its group find the same unit.
        largest = max(self.units, key=lambda unit: len(unit.ranks), default=None)
        return None if largest is None else largest.group

    def reduce_gradients(self, *, now: bool) -> None:
        """Set whether later backward passes reduce gradients (`now` is true) or accumulate them."""
        for part in self._parts:
            part.set_requires_gradient_sync(now, recurse=False)

    def check_usable(self) -> None:
        """Check that the modules can do another forward.

        Raises:
            RuntimeError: If a forward or backward has raised, and this version of torch cannot
                continue after that.
        """
        if any(part in _STUCK for part in self._parts):
            msg = (
                "a network under `fully_shard` cannot be trained further after its forward or "
                f"backward has raised: torch {torch.__version__} lacks "
                "FSDPModule.reset_iter_state, which torch 2.13 has; resume from a checkpoint in a "
                "new process"
            )
            raise RuntimeError(msg)

    def accumulate_in_float32(self, *, on: bool) -> None:
        """Set whether half-precision gradients are added up and reduced in float32.

        See `ReductionSeam`.
        """
        for unit in self.units:
            unit.accumulate_in_float32(on=on)

    def time_collectives(self) -> None:
        """Count the time in gathers and reductions as waiting; see `ShardedUnit`."""
        for unit in self.units:
            unit.time_collectives()

    def discard_half_a_step(self) -> None:
        """Free the gathered weights and whole gradients that a failed forward or backward left.

        See `check_usable` for versions of torch that cannot do this.
        """
        for unit in self.units:
            unit.discard_gradients()
        _STUCK.update(part for part in self._parts if not reset_iteration(part))

    def check_per_token(self, reduction: SquareReduction | None) -> None:
        """Check that numbers of targets can be summed over the ranks that reduce the gradients.

        Args:
            reduction: Reduction of all trained parameters; ``None`` if none is distributed.

        Raises:
            ValueError: If gradients are not all reduced over the same ranks by the same divisor.
        """
        holders = set() if reduction is None else {reduction.ranks}
        ranks = {unit.ranks for unit in self.units}
        if ranks != holders:
            msg = (
                "`calculate_per_token_loss` needs `fully_shard` to reduce all gradients over the "
                "ranks that hold the trained parameters, got reductions over ranks "
                f"{sorted(map(sorted, ranks))} and parameters held by ranks "
                f"{sorted(map(sorted, holders))}"
            )
            raise ValueError(msg)
        _ = self.divisor

    @property
    def computes_in_half_precision(self) -> bool:
        """Whether backward computes gradients of any unit in half precision."""
        return any(unit.computes_in_half_precision for unit in self.units)

    @property
    def divisor(self) -> float:
        """Number by which torch divides sums of gradients over ranks; 1 without sharded parts.

        Raises:
            ValueError: If the number differs between units.
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
    """Compute the sums of squares of one unit's gradients just before each reduction.

    Args:
        unit: Unit to read.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self._unit = unit
        self.by_parameter: dict[int, Tensor] = {}
        """Sum of squares by the ``id`` of the sharded parameter; shape ``()``, float32."""
        self.is_repeated = False
        """Whether a gradient was reduced more than once since the last `reset`. This rank's own
        gradient before the first reduction is lost, so the norm of the sum cannot be computed."""
        self._norms: dict[tuple[int, ...], NormReader] = {}
        unit.before_reduction().callbacks.add(self)

    def __call__(self) -> None:
        """Compute the sums of squares, reading each gradient once."""
        present = self._unit.gradients()
        if not present:
            return
        device = present[0][1].device
        # Backward may run inside the caller's autocast, which must not change the result.
        identities = tuple(id(parameter) for parameter, _ in present)
        norms = self._norms.setdefault(identities, NormReader(device))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            squares = norms.squares([gradient for _, gradient in present]).unbind()
        self.is_repeated |= not self.by_parameter.keys().isdisjoint(identities)
        self.by_parameter.update(zip(identities, squares, strict=True))

    def reset(self) -> None:
        """Forget the sums of squares, and start a new update."""
        self.by_parameter.clear()
        self.is_repeated = False


@final
class ShardedLocalSquares:
    """`LocalSquares` of parameters under ``fully_shard``.

    Each unit's whole gradients are read once, before their reduction. This sends no messages. With
    accumulation the gradients hold the sum over all micro-batches, provided that only the last
    backward reduces (``set_requires_gradient_sync``).

    Args:
        parameters: ``N`` trained parameters, in order.
        parts: Sharded modules of the network.
        others: Source for parameters that are not distributed; ``None`` if the gradients of these
            parameters are not reduced over ranks.
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
                "`local_norm` needs gradients that are reduced once per update, got gradients "
                "that were reduced several times, so this rank's own gradients before the earlier "
                "reductions are lost; accumulate with `accelerator.accumulate`, or call "
                "`set_requires_gradient_sync(False)` for all backward passes but the last"
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
        # The gradient is None if backward did not reach it, or if the loop has set it to None. Its
        # norm then counts as zero. `other` is computed from the present gradient, so it is zero.
        if not is_distributed(parameter) or parameter.grad is None:
            return other
        if seen is None:
            msg = (
                f"`local_norm` must be False with torch {torch.__version__}: its `fully_shard` "
                "reduces gradients in a way that this version of mfwrap does not support"
            )
            raise RuntimeError(msg)
        return on_device(seen, other.device)

    def reset(self) -> None:
        if self._others is not None:
            self._others.reset()
        for unit in self._units:
            unit.reset()


def local_squares_of(
    replicas: Sequence[DistributedDataParallel],
    parts: ShardedParts,
    parameters: Sequence[nn.Parameter],
    communication_hook: CommunicationHook | None,
    *,
    are_asked_for: bool,
) -> LocalSquares | None:
    """Register communication hooks, and return the source of this rank's own norms.

    Args:
        replicas: All DistributedDataParallel modules of the network.
        parts: Sharded modules of the network.
        parameters: Trained parameters, in order.
        communication_hook: Hook of `replicas` that reduces the gradients; see `tap`.
        are_asked_for: Whether the step reports local norms.

    Returns:
        The source; ``None`` if the step reports no local norms, or no gradient is reduced over
        ranks.

    Raises:
        RuntimeError: If one of `replicas` has another communication hook.
        ValueError: If a parameter is distributed over more ranks than its gradient is reduced
            over, or is distributed but does not belong to one of `parts`.
    """
    others = replicated_squares_of(
        replicas, parameters, communication_hook, are_asked_for=are_asked_for
    )
    if not are_asked_for or not any(is_distributed(parameter) for parameter in parameters):
        return others
    distributed = {id(parameter) for parameter in parameters if is_distributed(parameter)}
    split = {id(p) for unit in parts.units if unit.is_split_further for p in unit.parameters}
    if distributed & split:
        msg = (
            "`local_norm` must be False with tensor or expert parallelism, in which no rank has a "
            "whole gradient"
        )
        raise ValueError(msg)
    if distributed - {id(p) for unit in parts.units for p in unit.parameters}:
        msg = (
            "`local_norm` must be False for distributed parameters that `fully_shard` has not "
            "sharded; if `fully_shard` has sharded them and you use `attach`, pass their network "
            "to `accelerator.prepare`"
        )
        raise ValueError(msg)
    if all(len(unit.ranks) == 1 for unit in parts.units):
        return others
    return ShardedLocalSquares(parameters, parts, others)
