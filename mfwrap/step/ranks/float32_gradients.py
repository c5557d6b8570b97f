"""Accumulate the gradients of half-precision weights in float32, and reduce them in float32.

By default torch adds a gradient to ``parameter.grad`` in the dtype of the weight. In bfloat16,
which has 8 significant bits, 1024 + 1 is 1024: a small gradient is lost when it is added to a large
sum. `Float32Gradients` keeps the sum in float32. Three cases differ:

- **One process.** torch's ``Tensor.grad_dtype`` makes backward convert each gradient to float32
  before it adds the gradient to ``grad``.
- **DistributedDataParallel.** Its buckets have the dtype of the weights and accept no other
  gradients. So the sums of the earlier micro-batches are taken out of ``grad`` before the backward
  that reduces. Our communication hook (`Float32Buckets`) adds these sums to each bucket in float32,
  and averages the result over the ranks, still while backward is running. After backward, the
  averages become the ``grad``.
- **fully_shard.** torch accumulates whole gradients in the unit's ``reduce_dtype``. It becomes
  float32. torch would then cast the reduced shard to the dtype of the weight, which
  `mfwrap.step.ranks.fsdp.ReductionSeam` prevents.

In all cases ``grad`` is a float32 tensor until the optimizer's step, so norms, clipping and the
overflow flag are computed from float32. The step rounds each gradient to the dtype of its weight
once (`mfwrap.step.skipping.round_gradients`).

The names used by peers: Megatron-LM's ``accumulate_allreduce_grads_in_fp32``, DeepSpeed's
``grad_accum_dtype``, ``fully_shard``'s ``reduce_dtype``.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import begin_adding_over_ranks
from mfwrap.compatibility.fully_shard import HALF_PRECISION
from mfwrap.compatibility.gradient_dtypes import set_gradient_dtype
from mfwrap.compatibility.torch import foreach_add_, foreach_norm
from mfwrap.step.losses import Normalizer
from mfwrap.step.parameters import network_parameters
from mfwrap.step.ranks.agreement import reduced_by
from mfwrap.step.ranks.fsdp import ShardedParts
from mfwrap.step.ranks.local_norms import GradientTap, tap

if TYPE_CHECKING:
    from mfwrap.compatibility.torch import GradBucket

_ROUNDS_TO_INF = 65519.0
"""Number that float16 can barely hold: 65520 becomes infinite when it is rounded to float16. The
margin is for the rounding of the division, which differs between devices."""


@final
class Float32Gradients:
    """Keep the gradients of half-precision weights in float32 from one update to the next.

    Args:
        networks: Networks, with their wrappers.
        parts: DistributedDataParallel modules of the networks. A communication hook is registered
            with each of them, which torch cannot remove.

    Raises:
        RuntimeError: If a DistributedDataParallel module has another communication hook.
    """

    def __init__(
        self, networks: Sequence[nn.Module], parts: Sequence[DistributedDataParallel]
    ) -> None:
        self._networks = list(networks)
        self._taps = [(part, tap(part)) for part in parts]
        self._sharded = ShardedParts(*networks)
        self._is_on = False
        self.is_active = False
        """Whether gradients are added up in float32 that otherwise would not be."""
        self._held: list[nn.Parameter] = []
        self._reducing: list[_Reduction] = []

    def accumulate(self, *, on: bool) -> None:
        """Set the dtype of the gradients that backward passes add up from now on.

        Args:
            on: Whether to add up in float32. An update of a single micro-batch adds up nothing, so
                it needs no float32. Gradients that exist already are converted.
        """
        if on:
            if not self._is_on:
                self._turn(on=True)
            for parameter in self._held:
                set_gradient_dtype(parameter, torch.float32)
        elif self._is_on:
            self._turn(on=False)
            self.restore()

    def _turn(self, *, on: bool) -> None:
        self._is_on = on
        self._sharded.accumulate_in_float32(on=on)
        # Look the parameters up late: transformers puts new ones into a network that it shards.
        self._held = [
            parameter
            for network in self._networks
            for parameter in network_parameters(network).values()
            if parameter.dtype in HALF_PRECISION
        ]
        self.is_active = on and (bool(self._held) or self._sharded.computes_in_half_precision)

    def restore(self) -> None:
        """Let gradients have the dtype of their weights again; call it after an update."""
        for parameter in self._held:
            set_gradient_dtype(parameter, parameter.dtype)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Within the block, run the backward of one micro-batch."""
        self.begin_backward()
        try:
            yield
        finally:
            self.end_backward()

    def begin_backward(self) -> None:
        """Prepare the reduction of DistributedDataParallel modules that the next backward does."""
        self.end_backward()
        if self._is_on:
            self._reducing = [
                _Reduction(part, each)
                for part, each in self._taps
                if part.require_backward_grad_sync
            ]

    def end_backward(self) -> None:
        """Make the reduced float32 averages the gradients; do nothing if none were reduced."""
        reducing, self._reducing = self._reducing, []
        for reduction in reducing:
            reduction.finish()


@final
class _Reduction:
    """The reduction of one DistributedDataParallel module in one backward.

    Args:
        part: DistributedDataParallel module.
        gradient_tap: State of the module's communication hook.
    """

    def __init__(self, part: DistributedDataParallel, gradient_tap: GradientTap) -> None:
        self._tap = gradient_tap
        self._parameters = [
            p for p in reduced_by(part) if p.requires_grad and p.dtype in HALF_PRECISION
        ]
        sums = {id(p): p.grad for p in self._parameters if p.grad is not None}
        for parameter in self._parameters:
            parameter.grad = None
            set_gradient_dtype(parameter, parameter.dtype)
        self._buckets = Float32Buckets(part.process_group, sums)
        gradient_tap.reduce_by(self._buckets)

    def finish(self) -> None:
        """Make the averages of the buckets the gradients of their parameters."""
        self._tap.reduce_by(None)
        for parameter in self._parameters:
            # DistributedDataParallel leaves None where no rank has used the parameter.
            is_used = parameter.grad is not None
            parameter.grad = None
            set_gradient_dtype(parameter, torch.float32)
            if is_used:
                parameter.grad = self._buckets.averages.get(id(parameter))


@final
class Float32Buckets:
    """Average the buckets of one backward, and the sums of earlier micro-batches, in float32.

    Args:
        group: Ranks to average over.
        sums: Sum of the gradients of earlier micro-batches by the parameter's ``id``, float32.
            Each is released when its bucket has been added to it.
    """

    def __init__(self, group: "torch.distributed.ProcessGroup", sums: dict[int, Tensor]) -> None:
        self._group = group
        self._sums = sums
        self.averages: dict[int, Tensor] = {}
        """Average over ranks by the parameter's ``id``, float32, shape of the parameter. Valid
        after the backward."""

    def __call__(
        self,
        bucket: "GradBucket",
        read: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
    ) -> "torch.futures.Future[Tensor] | None":
        """Begin to average a bucket, unless its gradients do not have half precision.

        Args:
            bucket: Gradients of the last micro-batch. The bucket itself is not reduced: its values
                are replaced after the backward.
            read: Called with the parameters and this rank's own sums before they are averaged.
        """
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if buffer.dtype not in HALF_PRECISION:
            return None
        with torch.no_grad(), torch.autocast(buffer.device.type, enabled=False):
            total = buffer.float()
            first = buffer.storage_offset()
            views = [
                total.as_strided(each.size(), each.stride(), each.storage_offset() - first)
                for each in bucket.gradients()
            ]
            sums = [self._sums.pop(id(parameter), None) for parameter in parameters]
            pairs = [(view, own) for view, own in zip(views, sums, strict=True) if own is not None]
            if pairs:
                foreach_add_([view for view, _ in pairs], [own for _, own in pairs])
            read(parameters, views)
            total.div_(self._group.size())
        self.averages.update(zip(map(id, parameters), views, strict=True))
        return begin_adding_over_ranks(total, self._group).then(lambda _: buffer)


def squares_after_rounding(
    squares: Tensor,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    num_summed: int,
    normalizer: Normalizer | None,
) -> Tensor:
    """Replace sums of squares by ``inf`` if float16 cannot hold an element of the gradient.

    A loop may add up float16 gradients without dividing them. The sum may be finite in float32 and
    infinite when it is rounded to float16. This must count as an overflow. Reads only float32
    gradients of float16 parameters, and does not synchronize with the device.

    Args:
        squares: Sums of squares of ``N`` gradients, shape ``(N,)``, float32.
        gradients: This rank's shards of ``N`` scaled gradients; ``None`` for none.
        parameters: ``N`` parameters.
        num_summed: As in `Accumulated`: the gradients are divided by it before they are rounded.
        normalizer: Divisor of the gradients besides the loss scale; ``None`` if there is none.
    """
    held = {
        index: gradient
        for index, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True))
        if gradient is not None
        and parameter.dtype == torch.float16
        and gradient.dtype == torch.float32
        # torch has no largest magnitude of an empty tensor: a rank may hold an empty shard.
        and gradient.numel()
    }
    if not held:
        return squares
    largest = [torch.zeros_like(squares[0])] * len(squares)
    norms = foreach_norm(list(held.values()), float("inf"))
    for index, norm in zip(held, norms, strict=True):
        largest[index] = norm
    # An optimizer that is skipped by the host gets gradients that were divided by the whole divisor
    # before they are rounded. Denominators that are fractions make it less than `num_summed`.
    divisor: int | Tensor = num_summed
    if normalizer is not None and not normalizer.is_partial:
        divisor = normalizer.reduced.clamp(max=num_summed)
    overflows = torch.stack(largest) / divisor >= _ROUNDS_TO_INF
    return torch.where(overflows, float("inf"), squares)
