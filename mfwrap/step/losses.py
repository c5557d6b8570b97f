"""Read the loss from the output of a network or a loss function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.arguments import described
from mfwrap.step.calls import NetworkCall, tensors_in


class LossParts(NamedTuple):
    """Loss of one micro-batch: a mean, or a sum with the number of its targets."""

    numerator: Tensor
    """Tensor to differentiate, with its graph, shape ``()``, in the network's dtype."""

    denominator: Tensor | None
    """Number of targets, detached, shape ``()``, float32; ``None`` if `numerator` is a mean."""

    named: Mapping[str, Tensor] = MappingProxyType({})
    """Losses that are reported beside `numerator`, see `named_losses`."""


class Normalizer(NamedTuple):
    """Divisors that turn gradients of a sum of losses into gradients of the mean loss.

    Both divisors are zero for a batch without targets.
    """

    reduced: Tensor
    """Divisor of the gradients after their reduction over ranks, shape ``()``, float32."""

    local: Tensor
    """Divisor of this rank's own gradients, shape ``()``, float32."""

    is_partial: bool = False
    """Whether `reduced` must still be summed over the ranks that hold shards."""

    def divisors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divisors of scaled gradients: after their reduction, and of this rank's own.

        Args:
            scale: Loss scale, shape ``()``, float32.
        """
        # A batch without targets has zero gradients and a zero divisor: 0 / 0 would give a nan
        # norm.
        reduced, local = (
            scale * torch.where(divisor == 0, 1.0, divisor)
            for divisor in (self.reduced, self.local)
        )
        return reduced, local


class Accumulated(NamedTuple):
    """Result of the micro-batches of one update; the gradients are in ``parameter.grad``."""

    loss: Tensor
    """Unscaled loss of this rank, detached, shape ``()``, float32."""

    normalizer: Normalizer | None
    """Divisor of the gradients besides the loss scale; ``None`` if there is none."""

    losses: Mapping[str, Tensor] = MappingProxyType({})
    """As in `StepReport`."""

    num_summed: int = 1
    """Number of micro-batches whose gradients were added up in float32, without a division by it;
    1 if they were added up in the dtype of the weights."""


@final
class MeanLoss:
    """Call a network that returns the mean loss of its micro-batch.

    Args:
        network: Network that returns a tensor of one element, an output with a ``loss``, a mapping
            of named losses, or a tuple that begins with the loss.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def __call__(self, call: NetworkCall) -> LossParts:
        """Run the forward pass.

        Raises:
            TypeError: If the network returns no loss.
            ValueError: If the micro-batch is empty, or the loss does not have exactly one element
                or does not depend on a trainable parameter.
        """
        _check_has_elements(call)
        output = self._network(*call.arguments, **call.keywords)
        return LossParts(loss_of(output), None, named_losses(output))


def _check_has_elements(call: NetworkCall) -> None:
    """Refuse an empty micro-batch: its mean loss is NaN, and its gradients are finite zeros."""
    tensors = [tensor for tensor in tensors_in(call) if tensor.dim() > 0]
    if tensors and not any(tensor.numel() for tensor in tensors):
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        msg = (
            "a micro-batch must have at least one row, because the mean loss of no rows is NaN; "
            f"got only tensors without elements, of shape {' and '.join(map(str, shapes))}"
        )
        raise ValueError(msg)


def loss_of(output: Any, source: str = "network") -> Tensor:
    """Return the loss in the output of a network or a loss function, shape ``()``.

    Args:
        output: Tensor of one element, output with a ``loss``, or tuple that begins with the loss.
            The loss of a mapping without ``loss`` is the sum of its named losses: the entries whose
            names contain "loss". A named tuple with only such fields is treated like a mapping.
        source: Name of the argument that has returned `output`, for errors.

    Raises:
        TypeError: If `output` has no loss.
        ValueError: If the loss does not have exactly one element, or requires no gradient.
    """
    entries = _entries(output)
    if entries is not None:
        loss = entries.get("loss")
        if loss is None:
            loss = _sum_of_losses(entries, source)
    elif isinstance(output, (tuple, list)):
        loss = output[0] if output else None
    elif isinstance(output, Tensor):
        loss = output
    else:
        loss = getattr(output, "loss", None)
    if loss is None:
        msg = (
            f"`{source}` must return a loss: a tensor of one element, an output with `loss`, a "
            "dict of losses whose names contain `loss`, or a tuple that begins with the loss; got "
            f"{type(output).__name__} without a loss (a Hugging Face model computes it if the "
            "batch has `labels`)"
        )
        raise TypeError(msg)
    return _differentiable("loss", loss, source)


def named_losses(output: Any) -> dict[str, Tensor]:
    """Return the losses that an output has beside its ``loss``, by name.

    These are the entries of a mapping whose names contain "loss" and whose values are
    floating-point tensors of one element: ``lm_loss``, ``load_balancing_loss`` and ``mtp_loss``,
    for example, or the ``aux_loss`` of a Hugging Face mixture of experts.

    Source: MindFormers, ``print_separate_loss``.

    Args:
        output: Output of a network. Only mappings, and the named tuples that `loss_of` treats like
            mappings, have named losses.

    Returns:
        Detached tensors of shape ``()``, float32.
    """
    return {
        name: value.detach().float().reshape(())
        for name, value in (_entries(output) or {}).items()
        if name != "loss" and _is_loss_name(name)
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    }


def _is_loss_name(name: object) -> bool:
    return isinstance(name, str) and "loss" in name.lower()


def _entries(output: Any) -> Mapping[str, Any] | None:
    """Return a mapping as it is, and a named tuple of losses as a mapping; ``None`` otherwise."""
    if isinstance(output, Mapping):
        return output
    names = getattr(output, "_fields", ())
    if isinstance(output, tuple) and names and all(map(_is_loss_name, names)):
        return dict(zip(names, output, strict=True))
    return None


def _sum_of_losses(entries: Mapping[str, Any], source: str) -> Tensor | None:
    """Return the sum of the named losses; ``None`` if no entry has the name of a loss."""
    losses = []
    for name, value in entries.items():
        if _is_loss_name(name) and value is not None:
            loss = _one_element(name, value, source)
            if not loss.is_floating_point():
                msg = (
                    f"the {name} that `{source}` returns must be a floating-point tensor, because "
                    f"entries whose names contain `loss` are added up, got {loss.dtype}; rename it"
                )
                raise TypeError(msg)
            losses.append(loss)
    return torch.stack([loss.float() for loss in losses]).sum() if losses else None


def pair_of(output: Any, source: str = "network") -> LossParts:
    """Return the numerator and the denominator in the output of a network or a loss function.

    Args:
        output: Pair of a tensor of one element, and a tensor of one element or a number. The first
            may be a mapping of named losses, which are added up; see `loss_of`.
        source: Name of the argument that has returned `output`, for errors.

    Raises:
        TypeError: If `output` is not such a pair.
        ValueError: If a tensor does not have exactly one element, or the numerator requires no
            gradient.
    """
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        size = f" of {len(output)}" if isinstance(output, (tuple, list)) else ""
        msg = (
            f"`{source}` must return (numerator, denominator) with calculate_per_token_loss=True, "
            f"got {type(output).__name__}{size}"
        )
        raise TypeError(msg)
    first, denominator = output
    entries = _entries(first)
    total = first if entries is None else _sum_of_losses(entries, source)
    numerator = _differentiable("numerator", total, source)
    if isinstance(denominator, (int, float)):
        denominator = torch.full((), denominator, dtype=torch.float32, device=numerator.device)
    number = _one_element("denominator", denominator, source).detach().float()
    return LossParts(numerator, number, named_losses(first))


def _one_element(name: str, value: Any, source: str) -> Tensor:
    if not isinstance(value, Tensor):
        msg = f"the {name} that `{source}` returns must be a tensor, got {described(value)}"
        raise TypeError(msg)
    if value.numel() != 1:
        msg = (
            f"the {name} that `{source}` returns must have exactly one element, got shape "
            f"{tuple(value.shape)}; return its mean, for example"
        )
        raise ValueError(msg)
    return value.reshape(())


def _differentiable(name: str, value: Any, source: str) -> Tensor:
    scalar = _one_element(name, value, source)
    if not scalar.requires_grad:
        advice = (
            "do not detach it, and unfreeze a parameter"
            if torch.is_grad_enabled()
            else "gradients are disabled here: leave torch.no_grad() before the step"
        )
        msg = (
            f"the {name} that `{source}` returns must depend on a trainable parameter, got a "
            f"tensor that does not require a gradient; {advice}"
        )
        raise ValueError(msg)
    return scalar
