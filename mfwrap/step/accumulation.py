"""The first half of a training step: forward and backward of all micro-batches."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mfwrap.collectives import Section, add_over_ranks, section_clock
from mfwrap.config import StepConfig
from mfwrap.preflight import step_facts
from mfwrap.step.calls import NetworkCall
from mfwrap.step.losses import Accumulated, LossParts, MeanLoss, Normalizer
from mfwrap.step.parameters import network_parameters
from mfwrap.step.per_token import PerTokenLoss
from mfwrap.step.ranks.agreement import Agreement, agreement_of
from mfwrap.step.ranks.backward_reductions import reduce_before_accumulation
from mfwrap.step.ranks.float32_gradients import Float32Gradients
from mfwrap.step.ranks.fsdp import ShardedParts
from mfwrap.step.ranks.guard import LoneGuard, RankGuard, rank_guard
from mfwrap.step.ranks.waiting import time_replicas
from mfwrap.tensors.shards import on_device
from mfwrap.tensors.wrappers import distributed_parts, unwrapped_network

if TYPE_CHECKING:
    from accelerate import Accelerator


@final
class GradientAccumulation:
    """Run forward and backward of every micro-batch, and reduce the gradients over the ranks.

    Args:
        network: Network to call, with or without DistributedDataParallel or ``fully_shard``.
        per_token: Divide the sum of numerators by the sum of denominators instead of averaging
            the losses of the micro-batches.
        reduces_each: Reduce the gradients of each micro-batch. Otherwise only the last micro-batch
            reduces the gradients, which are then the sum over all micro-batches.
        accelerator: Accelerator whose autocast, ``no_sync`` and gradient state are used; ``None``
            without accelerate.
    """

    are_stages = False
    """Whether other ranks train other stages of the network."""

    def __init__(
        self,
        network: nn.Module,
        *,
        per_token: bool,
        reduces_each: bool = False,
        accelerator: "Accelerator | None" = None,
    ) -> None:
        self.network = network
        """Network, with its wrappers."""
        self.running: int | None = None
        """Index of the call whose forward or backward runs, or has raised; ``None`` before the
        first and after the last."""
        self._reduces_each = reduces_each
        self._accelerator = accelerator
        self.distributed_parts = distributed_parts(network)
        """DistributedDataParallel modules of the network."""
        self.sharded_parts = ShardedParts(network)
        """Modules of the network that ``fully_shard`` has sharded."""
        self._float32: Float32Gradients | GradientsAsWeights = GradientsAsWeights()
        reduce_before_accumulation(network)
        self._forward = (
            PerTokenLoss(network, unwrapped_network(network)) if per_token else MeanLoss(network)
        )

    def __call__(self, calls: Sequence[NetworkCall], loss_scale: Tensor) -> Accumulated:
        """Add the scaled gradients of all micro-batches to the parameters' ``grad``.

        Args:
            calls: One call of the network for each micro-batch, at least one.
            loss_scale: Loss scale, shape ``()``, float32.

        Raises:
            TypeError: If the network returns no loss.
            ValueError: If the loss does not have exactly one element, or does not depend on a
                trainable parameter.
            RuntimeError: See `ShardedParts.check_usable`.
        """
        self.running = None
        self.sharded_parts.check_usable()
        section_clock.switch(Section.FORWARD_BACKWARD)
        if section_clock.is_on:
            time_replicas(self.distributed_parts)
            self.sharded_parts.time_collectives()
        parts: list[LossParts] = []
        self._float32.accumulate(on=len(calls) > 1)
        # In float32 the sum is divided instead: a loss that is divided by the number of
        # micro-batches gives gradients that are rounded once more.
        divisor = 1 if self._float32.is_active else len(calls)
        try:
            for index, call in enumerate(calls):
                self.running = index
                with self._reduction(last=index == len(calls) - 1):
                    with self._autocast():
                        part = self._forward(call)
                    self._backward(part, loss_scale, divisor)
                parts.append(detached(part, loss_scale.device))
            self.running = None
        except BaseException:
            self.sharded_parts.discard_half_a_step()
            raise
        finally:
            if self._accelerator is not None:
                # Reset `sync_gradients` even after an error: while it is False, accelerate's
                # scheduler does not advance.
                self._accelerator.sync_gradients = True
        return self._accumulated(parts)

    def accumulate_in_float32(self) -> None:
        """Accumulate the gradients in float32 from now on; see `Float32Gradients`.

        Raises:
            RuntimeError: As `Float32Gradients`, which registers communication hooks.
        """
        self._float32 = Float32Gradients([self.network], self.distributed_parts)

    def end_update(self) -> None:
        """Let gradients have the dtypes of their weights again; call it after each update."""
        self._float32.restore()

    def guard(self, optimizer: Optimizer, config: StepConfig) -> RankGuard | LoneGuard | None:
        """Return the guard of the ranks that train the network; ``None`` without other ranks.

        Args:
            optimizer: Optimizer of the network.
            config: Settings of the step.
        """
        return rank_guard(
            network_parameters(self.network),
            self.distributed_parts,
            self.sharded_parts,
            lambda: step_facts([self.network], [optimizer], config),
        )

    def agreement(self, parameters: Sequence[nn.Parameter]) -> Agreement | None:
        """Return how the ranks that train `parameters` come to the same norms; see `StepUpdate`."""
        return agreement_of(self.distributed_parts, parameters)

    def _backward(self, part: LossParts, loss_scale: Tensor, divisor: int) -> None:
        # Multiply in float32: a float16 loss times the scale would overflow.
        numerator = part.numerator.float()
        divisor = 1 if part.denominator is not None else divisor
        with torch.autocast(numerator.device.type, enabled=False):
            scale = on_device(loss_scale / divisor, numerator.device)
            scaled = numerator * scale
            section_clock.follow_backward(scaled)
            with self._float32.backward():
                scaled.backward()
        section_clock.switch(Section.FORWARD_BACKWARD)

    def _accumulated(self, parts: Sequence[LossParts]) -> Accumulated:
        total = torch.stack([part.numerator for part in parts]).sum()
        denominators = [part.denominator for part in parts if part.denominator is not None]
        num_summed = len(parts) if self._float32.is_active else 1
        if not denominators:
            number = None if num_summed == 1 else torch.full_like(total, num_summed)
            normalizer = None if number is None else Normalizer(number, number)
            losses = mean_by_name([part.named for part in parts])
            return Accumulated(total / len(parts), normalizer, losses, num_summed)
        local = torch.stack(denominators).sum()
        return Accumulated(
            total / local,
            normalizer_of(local, self.distributed_parts, self.sharded_parts),
            {
                name: torch.stack(numerators).sum() / local
                for name, numerators in _by_name([part.named for part in parts]).items()
            },
            num_summed,
        )

    @contextlib.contextmanager
    def _reduction(self, *, last: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._accelerator is not None:
                self._accelerator.sync_gradients = last
            reduces = last or self._reduces_each
            self.sharded_parts.reduce_gradients(now=reduces)
            # Turn the reduction on again even if a micro-batch raises. Otherwise later backward
            # passes, perhaps of another caller, would not reduce their gradients.
            stack.callback(self.sharded_parts.reduce_gradients, now=True)
            if not reduces:
                for part in self.distributed_parts:
                    stack.enter_context(part.no_sync())
                # With FSDP2, the accelerator's `no_sync` takes no module around the sharded one.
                if self._accelerator is not None and not self.sharded_parts.units:
                    stack.enter_context(self._accelerator.no_sync(self.network))
            yield

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self._accelerator is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self._accelerator.autocast()
        return context


@final
class GradientsAsWeights:
    """In the place of `Float32Gradients`: gradients have the dtypes of their weights."""

    is_active = False
    backward = contextlib.nullcontext

    def accumulate(self, *, on: bool) -> None:
        """Change no dtype."""

    def restore(self) -> None:
        """Change no dtype."""


def detached(part: LossParts, device: torch.device) -> LossParts:
    """Return a micro-batch's loss without its graph, in float32 on `device`."""
    denominator = None if part.denominator is None else on_device(part.denominator, device)
    named = {name: on_device(value, device) for name, value in part.named.items()}
    return LossParts(on_device(part.numerator.detach().float(), device), denominator, named)


def mean_by_name(of_micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the losses of each name over the micro-batches that have a loss of this name.

    Args:
        of_micro_batches: For each micro-batch, tensors of shape ``()``, float32, by name.
    """
    return {name: torch.stack(losses).mean() for name, losses in _by_name(of_micro_batches).items()}


def _by_name(of_micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[str, list[Tensor]]:
    names = dict.fromkeys(name for losses in of_micro_batches for name in losses)
    return {name: [each[name] for each in of_micro_batches if name in each] for name in names}


def normalizer_of(
    local: Tensor, parts: Sequence[DistributedDataParallel], sharded_parts: ShardedParts
) -> Normalizer:
    """Return the remaining divisor of gradients that were averaged over ranks.

    The sum of numerators over all ranks must be divided by the sum of denominators over all ranks.
    The reduction has already divided by the number of ranks. So the remaining divisor is the sum of
    denominators divided by the number of ranks.

    Args:
        local: Sum of this rank's denominators, shape ``()``, float32.
        parts: DistributedDataParallel modules of the network; all their ranks must call this
            function.
        sharded_parts: Modules of the network that ``fully_shard`` has sharded.
    """
    if not parts:
        is_partial = bool(sharded_parts.units)
        reduced = local / sharded_parts.divisor if is_partial else local
        return Normalizer(reduced, local, is_partial)
    group = parts[0].process_group
    total = local.clone()
    add_over_ranks(total, group)
    return Normalizer(total / group.size(), local)
