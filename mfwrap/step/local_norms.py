"""Norms of a rank's own gradients, from before they are reduced over ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.arguments import described
from mfwrap.tensors.norms import sum_of_squares
from mfwrap.tensors.shards import on_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = [
    "CommunicationHook",
    "DistributedLocalSquares",
    "GradientTap",
    "LocalSquares",
    "checked_communication_hook",
    "local_squares_of",
    "tap",
]

CommunicationHook = tuple[Any, "Callable[[Any, GradBucket], torch.futures.Future[Tensor]]"]
"""``(state, hook)``, as ``DistributedDataParallel.register_comm_hook`` takes them."""


class LocalSquares(Protocol):
    """Where an update gets the sums of squares of this rank's own gradients from."""

    def squares(self, reduced: Tensor) -> Tensor:
        """Return the sums of squares of this rank's own gradients. Does not wait for the device.

        Called once the gradients of an update are final, maybe more than once.

        Args:
            reduced: Shape ``(N,)``, float32: sums of squares of the gradients as they are now, for
                parameters of which no reduction was seen.

        Returns:
            Shape ``(N,)``, float32, on the device of `reduced`, in the order of
            `TrainedParameters`: of the scaled gradients that this rank's micro-batches have added
            up to, before they were reduced.
        """

    def reset(self) -> None:
        """Forget what was seen: the gradients have been used, or are given up."""


@final
class GradientTap:
    """Sees the gradients of one DistributedDataParallel on their way to the reduction.

    The state of its communication hook, which cannot be taken out again: without a reader it only
    hands the gradients on.

    Args:
        communication_hook: What reduces the gradients.
    """

    def __init__(self, communication_hook: CommunicationHook) -> None:
        self.communication_hook = communication_hook
        self.readers: WeakSet[DistributedLocalSquares] = WeakSet()
        """Who asks for the squares; without any they are not computed."""
        self.squares: dict[int, Tensor] = {}
        """Shape ``()``, float32, by the parameter's ``id``: of its last reduction."""

    def read(self, bucket: "GradBucket") -> None:
        """Note the sums of squares of a bucket, whose gradients are read once."""
        if not self.readers:
            return
        device = bucket.buffer().device
        # The backward that calls may run inside a caller's autocast.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            squares = sum_of_squares(bucket.gradients(), device).unbind()
        identities = map(id, bucket.parameters())
        self.squares.update(zip(identities, squares, strict=True))


def checked_communication_hook(communication_hook: object) -> CommunicationHook | None:
    """Return `communication_hook` if it is a pair of a state and a callable, or ``None``.

    Raises:
        TypeError: If it is something else.
    """
    if communication_hook is None:
        return None
    if isinstance(communication_hook, tuple) and len(communication_hook) == 2:
        state, hook = communication_hook
        if callable(hook):
            return state, hook
    msg = (
        "`communication_hook` must be (state, hook), as `register_comm_hook` takes them, or None, "
        f"got {described(communication_hook)}"
    )
    raise TypeError(msg)


def tap(
    part: DistributedDataParallel, communication_hook: CommunicationHook | None = None
) -> GradientTap:
    """Return the tap of a DistributedDataParallel, which is put in the first time.

    Args:
        part: One that no other communication hook was registered with.
        communication_hook: What reduces the gradients; ``None`` for what the tap that is there
            does, or else torch's ``allreduce_hook``, which does what no hook does.

    Raises:
        RuntimeError: If another hook was registered.
    """
    registered = getattr(part, "_comm_hooks", [])
    for _, state in registered:
        if isinstance(state, GradientTap):
            _refuse_another(state.communication_hook, communication_hook)
            return state
    if registered:
        name = getattr(registered[0][0], "__qualname__", described(registered[0][0]))
        msg = (
            "`network` must have no communication hook but the one given as "
            "`communication_hook=(state, hook)`, which sees the gradients after their local norms "
            f"were taken, got {name}, registered already"
        )
        raise RuntimeError(msg)
    if communication_hook is None:
        from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415  (slow to load)
            default_hooks,
        )

        communication_hook = part.process_group, default_hooks.allreduce_hook
    new = GradientTap(communication_hook)
    part.register_comm_hook(new, _tapping_hook(communication_hook[1]))
    return new


def _refuse_another(present: CommunicationHook, given: CommunicationHook | None) -> None:
    if given is None or all(a is b for a, b in zip(present, given, strict=True)):
        return
    msg = (
        "`communication_hook` must be the one that the network's first step was built with, "
        "because torch lets none be replaced, got another"
    )
    raise RuntimeError(msg)


def _tapping_hook(inner: Callable[..., Any]) -> Callable[..., Any]:
    # torch compares the annotation of `bucket` with the class: its name would be refused.
    from torch._C._distributed_c10d import GradBucket  # noqa: PLC0415  (not in every torch)

    def tapping_hook(state: GradientTap, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.read(bucket)
        inner_state, hook = state.communication_hook
        return hook(inner_state, bucket)

    # torch logs a hook's name, and by it tells which ones a device cannot do.
    tapping_hook.__name__ = getattr(inner, "__name__", tapping_hook.__name__)
    tapping_hook.__qualname__ = getattr(inner, "__qualname__", tapping_hook.__name__)
    return tapping_hook


@final
class DistributedLocalSquares:
    """`LocalSquares` of parameters under DistributedDataParallel, from communication hooks.

    One read of each bucket before its reduction, and no message. With accumulation the bucket
    holds the sum over all micro-batches if those before the last are not reduced (``no_sync``).
    Where gradients are reduced several times before an update, the last reduction counts: what
    earlier ones have left in the gradients is part of it, as the mean over ranks that it is.

    Args:
        parameters: ``N`` trained parameters, in order.
        taps: Of all DistributedDataParallel parts that hold some of them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], taps: Sequence[tuple[nn.Module, GradientTap]]
    ) -> None:
        self._parameters = list(parameters)
        owners = {id(p): each for part, each in taps for p in part.parameters()}
        self._owners = [owners.get(id(parameter)) for parameter in self._parameters]
        for _, each in taps:
            each.readers.add(self)

    def squares(self, reduced: Tensor) -> Tensor:
        seen = map(self._seen, self._parameters, self._owners)
        return torch.stack(
            [
                other if square is None else on_device(square, reduced.device)
                for square, other in zip(seen, reduced.unbind(), strict=True)
            ]
        )

    @staticmethod
    def _seen(parameter: nn.Parameter, owner: GradientTap | None) -> Tensor | None:
        # A gradient that is gone since counts as zero, whatever it was.
        if owner is None or parameter.grad is None:
            return None
        return owner.squares.get(id(parameter))

    def reset(self) -> None:
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            if owner is not None:
                owner.squares.pop(id(parameter), None)


def local_squares_of(
    parts: Sequence[DistributedDataParallel],
    parameters: Sequence[nn.Parameter],
    communication_hook: CommunicationHook | None = None,
    *,
    are_asked_for: bool,
) -> DistributedLocalSquares | None:
    """Register a communication hook, and return where local norms come from.

    Args:
        parts: All DistributedDataParallel parts of the network.
        parameters: The trained ones, in order.
        communication_hook: As in `tap`.
        are_asked_for: Whether anyone reads local norms.

    Returns:
        ``None`` if nobody does, or gradients are this rank's own: there is no other.

    Raises:
        RuntimeError: As `tap`.
    """
    are_reduced = any(part.process_group.size() > 1 for part in parts)
    if communication_hook is None and not (are_asked_for and are_reduced):
        return None
    taps = [(part, tap(part, communication_hook)) for part in parts]
    return DistributedLocalSquares(parameters, taps) if are_asked_for else None
