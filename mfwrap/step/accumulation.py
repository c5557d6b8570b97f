"""The half of a training step up to backward: micro-batches to gradients."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.collectives import add_over_ranks
from mfwrap.step.forward import LossParts, MeanLoss, NetworkCall, Normalizer, PerTokenLoss
from mfwrap.step.fsdp import ShardedParts
from mfwrap.tensors.shards import on_device
from mfwrap.tensors.wrappers import distributed_parts, unwrapped_network

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Accumulated", "GradientAccumulation"]


class Accumulated(NamedTuple):
    """What the micro-batches of one update leave beside their gradients."""

    loss: Tensor
    """Shape ``()``, float32, detached: unscaled loss of this rank."""

    normalizer: Normalizer | None
    """What the gradients are still to be divided by; ``None`` if nothing."""


@final
class GradientAccumulation:
    """Run forward and backward of every micro-batch; reduce gradients on the last one only.

    Args:
        network: The network that is called, in DistributedDataParallel, sharded, or neither.
        per_token: Divide the sum of numerators by the sum of denominators instead of averaging
            the losses of the micro-batches.
        accelerator: Its autocast, ``no_sync`` and gradient state are used; ``None`` for none.
    """

    def __init__(
        self, network: nn.Module, *, per_token: bool, accelerator: "Accelerator | None" = None
    ) -> None:
        self._network = network
        self._accelerator = accelerator
        self._distributed_parts = distributed_parts(network)
        self.sharded_parts = ShardedParts(network)
        """Where ``fully_shard`` reduces gradients."""
        self._forward = (
            PerTokenLoss(network, unwrapped_network(network)) if per_token else MeanLoss(network)
        )

    def __call__(self, calls: Sequence[NetworkCall], loss_scale: Tensor) -> Accumulated:
        """Add the scaled gradients of all micro-batches to the parameters' ``grad``.

        Args:
            calls: At least one.
            loss_scale: Shape ``()``, float32.

        Raises:
            TypeError: If the network returns no loss.
            ValueError: If the loss is not one element, or depends on no trainable parameter.
        """
        parts: list[LossParts] = []
        try:
            for index, call in enumerate(calls):
                with self._reduction(last=index == len(calls) - 1):
                    with self._autocast():
                        part = self._forward(call)
                    self._backward(part, loss_scale, len(calls))
                parts.append(_detached(part, loss_scale.device))
        except BaseException:
            self.sharded_parts.discard_half_a_step()
            raise
        finally:
            if self._accelerator is not None:
                # accelerate's scheduler stands still while gradients are not reduced.
                self._accelerator.sync_gradients = True
        return self._accumulated(parts)

    def _backward(self, part: LossParts, loss_scale: Tensor, num_micro_batches: int) -> None:
        # Float32 before the product: a float16 loss times the scale would overflow at once.
        numerator = part.numerator.float()
        share = 1 if part.denominator is not None else num_micro_batches
        with torch.autocast(numerator.device.type, enabled=False):
            scale = on_device(loss_scale / share, numerator.device)
            (numerator * scale).backward()

    def _accumulated(self, parts: Sequence[LossParts]) -> Accumulated:
        total = torch.stack([part.numerator for part in parts]).sum()
        denominators = [part.denominator for part in parts if part.denominator is not None]
        if not denominators:
            return Accumulated(total / len(parts), None)
        local = torch.stack(denominators).sum()
        return Accumulated(total / local, self._normalizer(local))

    def _normalizer(self, local: Tensor) -> Normalizer:
        """Return the divisor of gradients that ranks have averaged."""
        if not self._distributed_parts:
            is_partial = bool(self.sharded_parts.units)
            reduced = local / self.sharded_parts.divisor if is_partial else local
            return Normalizer(reduced, local, is_partial)
        group = self._distributed_parts[0].process_group
        total = local.clone()
        add_over_ranks(total, group)
        return Normalizer(total / group.size(), local)

    @contextlib.contextmanager
    def _reduction(self, *, last: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._accelerator is not None:
                self._accelerator.sync_gradients = last
            self.sharded_parts.reduce_gradients(now=last)
            # Also when this raises: what others do with the network is reduced as usual.
            stack.callback(self.sharded_parts.reduce_gradients, now=True)
            if not last:
                for part in self._distributed_parts:
                    stack.enter_context(part.no_sync())
                if self._accelerator is not None and not self._is_parallel:
                    stack.enter_context(self._accelerator.no_sync(self._network))
            yield

    @property
    def _is_parallel(self) -> bool:
        return bool(self._distributed_parts or self.sharded_parts.units)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self._accelerator is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self._accelerator.autocast()
        return context


def _detached(part: LossParts, device: torch.device) -> LossParts:
    denominator = None if part.denominator is None else on_device(part.denominator, device)
    return LossParts(on_device(part.numerator.detach().float(), device), denominator)
