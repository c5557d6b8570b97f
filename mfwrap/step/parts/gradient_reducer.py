"""Average gradients over data-parallel ranks outside of backward."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, distributed, nn

from mfwrap.arguments import described
from mfwrap.collectives import add_over_ranks
from mfwrap.step.ranks.agreement import reduced_by
from mfwrap.tensors.wrappers import distributed_parts


@final
class GradientReducer:
    """Average gradients over the ranks of a network's DistributedDataParallel modules.

    `mfwrap.grad` and `GradOperation` do not run the hooks by which DistributedDataParallel averages
    gradients in backward. This class averages the same gradients over the same ranks afterwards,
    without communication hooks. All other gradients are returned unchanged: those of a network
    without DistributedDataParallel, those of parameters that DistributedDataParallel ignores, and
    those of ``fully_shard``, which are averages already.

    Source: MindSpore, ``nn.DistributedGradReducer``.

    Args:
        network: Network, with or without DistributedDataParallel.
        weights: Parameters to which the gradients belong, in order.
    """

    def __init__(self, network: nn.Module, weights: Sequence[Tensor]) -> None:
        self._num_weights = len(weights)
        self._shared: list[tuple[distributed.ProcessGroup, list[int]]] = []
        for part in distributed_parts(network):
            reduced = {id(parameter) for parameter in reduced_by(part)}
            positions = [index for index, weight in enumerate(weights) if id(weight) in reduced]
            if positions and part.process_group.size() > 1:
                self._shared.append((part.process_group, positions))

    @property
    def sends(self) -> bool:
        """Whether there are gradients to average over several ranks."""
        return bool(self._shared)

    @torch.no_grad()
    def __call__(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the averages of gradients over the ranks. Does not synchronize with the device.

        All ranks must call it, with gradients of the same shapes and dtypes. It sends one message
        per process group, device and dtype.

        Args:
            grads: One gradient for each weight, in the order of the weights.

        Raises:
            TypeError: If `grads` is not a list or a tuple.
            ValueError: If there are more or fewer gradients than weights.
        """
        averaged = list(checked_gradients(grads, self._num_weights))
        for group, positions in self._shared:
            alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for position in positions:
                gradient = averaged[position]
                alike.setdefault((gradient.device, gradient.dtype), []).append(position)
            for message in alike.values():
                means = _means([averaged[position] for position in message], group)
                for position, mean in zip(message, means, strict=True):
                    averaged[position] = mean
        return tuple(averaged)


def checked_gradients(grads: object, num_weights: int) -> Sequence[Tensor]:
    """Return `grads` if it holds one gradient for each weight.

    Raises:
        TypeError: If `grads` is not a list or a tuple.
        ValueError: If there are more or fewer gradients than weights.
    """
    if not isinstance(grads, (list, tuple)):
        msg = f"`grads` must be a list or a tuple of gradients, got {described(grads)}"
        raise TypeError(msg)
    if len(grads) != num_weights:
        msg = f"`grads` must hold one gradient per weight, {num_weights}, got {len(grads)}"
        raise ValueError(msg)
    return grads


def _means(gradients: Sequence[Tensor], group: distributed.ProcessGroup) -> list[Tensor]:
    message = torch.cat([gradient.reshape(-1) for gradient in gradients])
    # Divide before the sum, as DistributedDataParallel does. Otherwise the sum of float16 gradients
    # over many ranks could overflow.
    message.mul_(1 / group.size())
    add_over_ranks(message, group)
    parts = message.split([gradient.numel() for gradient in gradients])
    return [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
