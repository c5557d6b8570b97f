"""Local norms under DistributedDataParallel: norms of a rank's own gradients.

DistributedDataParallel reduces gradients while backward is still running. It collects them in
buckets, and averages each bucket over the ranks as soon as the bucket is complete. After backward,
no rank has its own gradients any more.

torch lets one *communication hook* per model replace this reduction. Our hook (`_tapping_hook`)
computes the norms of a bucket's gradients and then calls the hook that does the reduction: torch's
own all-reduce, or the user's hook. So local norms cost one read of the gradients and no messages.

A maintainer must know four facts:

- A model accepts only one communication hook, and the hook cannot be removed. So our hook stays
  registered even after every step object that reports local norms has been deleted. From then on,
  the hook only calls the reduction. A second step on the same model finds and uses the hook of the
  first step (`tap`).
- With gradient accumulation, only the backward of the last micro-batch reduces; the others run
  under ``no_sync``. The buckets then hold the sum over all micro-batches, which is the gradient
  whose norm is reported.
- The reduction overwrites the bucket, so the norms are computed before it starts. Only their
  squares are kept, one number for each parameter.
- The hook runs inside backward, on the autograd thread, maybe under the caller's autocast and with
  gradient recording enabled. Both are switched off for the read.

The norms of networks that ``fully_shard`` has sharded come from `mfwrap.step.ranks.fsdp`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.arguments import described
from mfwrap.collectives import Section, section_clock
from mfwrap.compatibility.torch import communication_hooks
from mfwrap.tensors.module_hooks import keep_item_out_of_copies
from mfwrap.tensors.norms import NormReader
from mfwrap.tensors.shards import on_device

if TYPE_CHECKING:
    from mfwrap.compatibility.torch import GradBucket

CommunicationHook = tuple[Any, "Callable[[Any, GradBucket], torch.futures.Future[Tensor]]"]
"""``(state, hook)``, as ``DistributedDataParallel.register_comm_hook`` takes them."""

Reduction = Callable[
    ["GradBucket", Callable[[Sequence[Tensor], Sequence[Tensor]], None]],
    "torch.futures.Future[Tensor] | None",
]
"""Begins to reduce a bucket, after it has called `GradientTap.read` for this rank's own gradients;
``None`` if it leaves the bucket to the communication hook."""


class LocalSquares(Protocol):
    """Source of the sums of squares of this rank's own gradients."""

    def squares(self, reduced: Tensor) -> Tensor:
        """Return the sums of squares of this rank's own gradients.

        Does not synchronize with the device. Called after the last backward of an update, maybe
        more than once.

        Args:
            reduced: Sums of squares of the gradients after the reduction, shape ``(N,)``, float32.
                Returned unchanged for parameters whose gradients are not reduced over ranks.

        Returns:
            Sums of squares of the scaled gradients, summed over this rank's micro-batches, before
            the reduction: shape ``(N,)``, float32, on the device of `reduced`, in the order of
            `TrainedParameters`.
        """

    def reset(self) -> None:
        """Forget all sums. Called when the gradients have been used or are discarded."""


@final
class GradientTap:
    """Read the gradients of one DistributedDataParallel module before they are reduced.

    A `GradientTap` is the state of our communication hook.

    Args:
        communication_hook: Hook that reduces the gradients.
    """

    def __init__(self, communication_hook: CommunicationHook) -> None:
        self.communication_hook = communication_hook
        self.readers: WeakSet[DistributedLocalSquares] = WeakSet()
        """Weak references to the objects that use `squares`. With none left, gradients are not
        read and only the reduction runs."""
        self._reduction: Reduction | None = None
        self.squares: dict[int, Tensor] = {}
        """Sum of squares of this rank's own gradient just before its last reduction, by the
        parameter's ``id``; shape ``()``, float32."""
        # One reader for each bucket: torch sorts parameters into other buckets after the first
        # step.
        self._norms: dict[tuple[int, ...], NormReader] = {}

    def reduce_by(self, reduction: Reduction | None) -> None:
        """Let a function reduce buckets from now on; ``None`` for the communication hook alone."""
        self._reduction = reduction

    def reduce(self, bucket: "GradBucket") -> "torch.futures.Future[Tensor]":
        """Read this rank's own gradients in a bucket, and begin to reduce the bucket."""
        with section_clock.within(Section.REDUCTION):
            reduced = None if self._reduction is None else self._reduction(bucket, self.read)
        if reduced is not None:
            return reduced
        self.read(bucket.parameters(), bucket.gradients())
        state, hook = self.communication_hook
        with section_clock.within(Section.REDUCTION):
            return hook(state, bucket)

    def read(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the sums of squares of a bucket's gradients, reading each gradient once."""
        if not self.readers:
            return
        device = gradients[0].device
        # Backward may run inside the caller's autocast, which must not change the result.
        bucket = tuple(map(id, parameters))
        norms = self._norms.setdefault(bucket, NormReader(device))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            squares = norms.squares(gradients).unbind()
        self.squares.update(zip(bucket, squares, strict=True))


def checked_communication_hook(communication_hook: object) -> CommunicationHook | None:
    """Return `communication_hook` if it is ``None`` or a pair of a state and a callable.

    Raises:
        TypeError: If `communication_hook` is anything else.
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
    """Return the `GradientTap` of a DistributedDataParallel module; register our hook if needed.

    The first call for a module registers the communication hook. Later calls return the same
    `GradientTap`.

    Args:
        part: DistributedDataParallel module without a communication hook, or with ours.
        communication_hook: Hook that reduces the gradients. In the first call, ``None`` means
            torch's ``allreduce_hook``, which reduces in the same way as a module without a hook.
            In later calls, ``None`` keeps the hook of the first call.

    Raises:
        RuntimeError: If another hook is registered already.
    """
    registered = communication_hooks(part)
    for _, state in registered:
        if isinstance(state, GradientTap):
            _refuse_another(state.communication_hook, communication_hook)
            return state
    if registered:
        name = getattr(registered[0][0], "__qualname__", described(registered[0][0]))
        msg = (
            f"`network` already has the communication hook {name}, and torch allows only one; "
            "instead of registering the hook, pass it as `communication_hook=(state, hook)`"
        )
        raise RuntimeError(msg)
    if communication_hook is None:
        from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: PLC0415  (slow to load)
            default_hooks,
        )

        communication_hook = part.process_group, default_hooks.allreduce_hook
    new = GradientTap(communication_hook)
    part.register_comm_hook(new, _tapping_hook(communication_hook[1]))
    # Torch does not register the hooks of a copied module with its reducer.
    registered = communication_hooks(part)
    for item in registered:
        if item[1] is new:
            keep_item_out_of_copies(part, registered, item)
    return new


def _refuse_another(present: CommunicationHook, given: CommunicationHook | None) -> None:
    if given is None or list(map(id, given)) == list(map(id, present)):
        return
    msg = (
        "`communication_hook` must be the hook that the network's first step was built with, got a "
        "different hook; torch cannot replace a registered communication hook"
    )
    raise RuntimeError(msg)


def _tapping_hook(inner: Callable[..., Any]) -> Callable[..., Any]:
    # torch checks that the annotation of `bucket` is this class. It does not accept the name of
    # the class as a string, so import the class here.
    from mfwrap.compatibility.torch import GradBucket  # noqa: PLC0415  (not in every torch)

    def tapping_hook(state: GradientTap, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return state.reduce(bucket)

    # Keep the inner hook's name: torch logs the name, and uses it to detect hooks that a device
    # does not support.
    tapping_hook.__name__ = getattr(inner, "__name__", tapping_hook.__name__)
    tapping_hook.__qualname__ = getattr(inner, "__qualname__", tapping_hook.__name__)
    return tapping_hook


@final
class DistributedLocalSquares:
    """`LocalSquares` of parameters under DistributedDataParallel, from communication hooks.

    With accumulation, a loop should run every backward of an update except the last under
    ``no_sync``. The last backward then reduces this rank's sum over all micro-batches, and the norm
    is the norm of this sum.

    If a loop reduces several times before an update, the norm is that of the gradient just before
    the last reduction. This gradient is the sum of two terms: this rank's own gradient since the
    second-last reduction, and the earlier gradients, which are already means over the ranks.

    Args:
        parameters: ``N`` trained parameters, in order.
        taps: Pairs of a DistributedDataParallel module that holds some of the parameters, and the
            `GradientTap` that reads its gradients.
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
        # If a gradient was set to None after its reduction, return None. The caller then uses the
        # sum of squares of the present gradient, which is zero.
        if owner is None or parameter.grad is None:
            return None
        return owner.squares.get(id(parameter))

    def reset(self) -> None:
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            if owner is not None:
                owner.squares.pop(id(parameter), None)


def replicated_squares_of(
    parts: Sequence[DistributedDataParallel],
    parameters: Sequence[nn.Parameter],
    communication_hook: CommunicationHook | None = None,
    *,
    are_asked_for: bool,
) -> DistributedLocalSquares | None:
    """Register communication hooks, and return the source of local norms.

    Args:
        parts: All DistributedDataParallel modules of the network.
        parameters: Trained parameters, in order.
        communication_hook: Hook that reduces the gradients; see `tap`.
        are_asked_for: Whether the step reports local norms.

    Returns:
        The source; ``None`` if the step reports no local norms. Also ``None`` on a single rank
        without a `communication_hook`, because no gradient is reduced there.

    Raises:
        RuntimeError: If another hook is registered already.
    """
    are_reduced = any(part.process_group.size() > 1 for part in parts)
    if communication_hook is None and not (are_asked_for and are_reduced):
        return None
    taps = [(part, tap(part, communication_hook)) for part in parts]
    return DistributedLocalSquares(parameters, taps) if are_asked_for else None
