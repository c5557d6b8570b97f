"""MindSpore's loss scalers for a loop of one's own: scale a loss, unscale gradients, adjust."""

import abc
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mfwrap.arguments import check_int, described
from mfwrap.mindspore.managers import check_scale
from mfwrap.step.clipping import has_non_finite
from mfwrap.tensors.shards import on_device

__all__ = ["DynamicLossScaler", "LossScaler", "StaticLossScaler", "all_finite"]

_Structure = TypeVar("_Structure")


def all_finite(inputs: Any) -> Tensor:
    """Tell whether no element of any tensor is inf or nan.

    Looks at this rank alone: gradients that are reduced over ranks are the same on all of them,
    for others the answers have to be combined before anyone acts on them.

    Source: MindSpore, ``amp.all_finite``.

    Args:
        inputs: A tensor, or tensors nested in tuples, lists and dicts; ``None`` among them is
            passed over, and integers are finite.

    Returns:
        Shape ``()``, bool, on the device of the first tensor. Does not wait for it.

    Raises:
        TypeError: If anything else is among `inputs`, or there is no tensor.

    Example:
        >>> all_finite((torch.ones(2), [torch.tensor(float("nan"))]))
        tensor(False)
    """
    tensors = [_check_tensor(leaf) for leaf in pytree.tree_leaves(inputs) if leaf is not None]
    if not tensors:
        msg = f"`inputs` must hold at least one tensor, got {described(inputs)}"
        raise TypeError(msg)
    inexact = (t.detach() for t in tensors if t.is_floating_point() or t.is_complex())
    return ~has_non_finite(inexact, tensors[0].device)


class LossScaler(abc.ABC):
    """Base of the scalers: a loss scale on the device, and how it is applied.

    Source: MindSpore, ``amp.LossScaler``.

    Args:
        scale_value: The loss scale, >= 1 and finite.

    Raises:
        TypeError: If `scale_value` is not a number.
        ValueError: If `scale_value` is out of range.
    """

    def __init__(self, scale_value: float) -> None:
        number = check_scale("scale_value", scale_value)
        if number > torch.finfo(torch.float32).max:
            msg = f"`scale_value` must be finite in float32, got {scale_value}"
            raise ValueError(msg)
        self.scale_value = torch.full((), number, dtype=torch.float32)
        """Shape ``()``, float32: the loss scale as it is. Another tensor takes its place when it
        changes, and when it first meets a tensor on an accelerator, one on that."""

    def scale(self, inputs: _Structure) -> _Structure:
        """Multiply by the loss scale: the loss, before its gradient is taken.

        Args:
            inputs: A floating-point tensor, or such tensors nested in tuples, lists and dicts;
                ``None`` among them stays.

        Returns:
            New tensors of the same dtypes, on the same devices, in the same structure;
            differentiable. The product is taken in each tensor's own dtype, so float16 overflows
            above 65504. Does not wait for the device.

        Raises:
            TypeError: If anything else is among `inputs`.
        """
        return self._multiplied(inputs, lambda scale: scale)

    def unscale(self, inputs: _Structure) -> _Structure:
        """Multiply by the reciprocal of the loss scale: gradients, before they are used.

        Args:
            inputs: As for `scale`.

        Returns:
            As `scale`. In float16 the reciprocal itself becomes zero for scales above 2**24, and
            with it every gradient, as in MindSpore: keep gradients in float32.

        Raises:
            TypeError: If anything else is among `inputs`.
        """
        return self._multiplied(inputs, torch.reciprocal)

    @abc.abstractmethod
    def adjust(self, grads_finite: bool | Tensor) -> bool:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            grads_finite: Shape ``()``, bool: what `all_finite` says of the gradients.

        Returns:
            Whether this scaler changes its scale at all. Does not wait for the device.
        """

    def _multiplied(self, inputs: _Structure, factor_of: Callable[[Tensor], Tensor]) -> _Structure:
        for leaf in pytree.tree_leaves(inputs):
            if leaf is not None:
                _check_inexact(leaf)
                self._follow(leaf)
        factor = factor_of(self.scale_value)

        def multiplied(leaf: Tensor | None) -> Tensor | None:
            # In the tensor's own precision, so that half precision rounds as in MindSpore.
            return leaf if leaf is None else leaf * on_device(factor, leaf.device).to(leaf.dtype)

        outputs: _Structure = pytree.tree_map(multiplied, inputs)
        return outputs

    def _follow(self, tensor: Tensor) -> None:
        """Move to an accelerator once, instead of copying from the CPU at every call."""
        if self.scale_value.device.type == "cpu":
            self.scale_value = on_device(self.scale_value, tensor.device)


@final
class StaticLossScaler(LossScaler):
    """A loss scale that stays.

    Source: MindSpore, ``amp.StaticLossScaler``.

    Args:
        scale_value: The loss scale, >= 1 and finite.

    Raises:
        TypeError: If `scale_value` is not a number.
        ValueError: If `scale_value` is out of range.

    Example:
        >>> scaler = StaticLossScaler(1024.0)
        >>> scaler.scale(torch.tensor(0.5))
        tensor(512.)
        >>> scaler.unscale((torch.tensor([2048.0]),))
        (tensor([2.]),)
    """

    def adjust(self, grads_finite: bool | Tensor) -> bool:  # noqa: FBT001  (MindSpore's signature)
        """Do nothing, and return False."""
        del grads_finite
        return False


@final
class DynamicLossScaler(LossScaler):
    """Lower the loss scale on overflow, raise it after a row of finite steps.

    Not finite: ``max(scale / scale_factor, 1)``. `scale_window` steps in a row that were finite:
    ``scale * scale_factor``, unless that is not finite.

    Source: MindSpore, ``amp.DynamicLossScaler``.

    Args:
        scale_value: Initial loss scale, >= 1 and finite.
        scale_factor: An int, >= 1.
        scale_window: Steps in a row after which the scale grows, >= 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> scaler = DynamicLossScaler(1024.0, scale_factor=2, scale_window=1)
        >>> scaler.adjust(True), scaler.scale_value
        (True, tensor(2048.))
    """

    def __init__(self, scale_value: float, scale_factor: int, scale_window: int) -> None:
        super().__init__(scale_value)
        self.scale_factor = check_int("scale_factor", scale_factor)
        self.scale_window = check_int("scale_window", scale_window)
        self.counter = torch.zeros((), dtype=torch.int64)
        """Shape ``()``, int64: steps in a row that were finite, from 0 again after a window."""

    def adjust(self, grads_finite: bool | Tensor) -> bool:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            grads_finite: Shape ``()`` or ``(1,)``, bool: what `all_finite` says of the gradients.

        Returns:
            True. Does not wait for the device.
        """
        if isinstance(grads_finite, Tensor):
            self._follow(grads_finite)
        scale = self.scale_value
        counter = on_device(self.counter, scale.device)
        if isinstance(grads_finite, Tensor):
            finite = on_device(grads_finite.detach().reshape(()) != 0, scale.device)
        else:
            finite = torch.full((), bool(grads_finite), device=scale.device)
        grown = scale * self.scale_factor
        grows = (counter == self.scale_window - 1) & grown.isfinite()
        fallen = (scale / self.scale_factor).clamp(min=1.0)
        self.scale_value = torch.where(finite, torch.where(grows, grown, scale), fallen)
        self.counter = (counter + 1) % self.scale_window * finite
        return True


def _check_tensor(leaf: object) -> Tensor:
    if not isinstance(leaf, Tensor):
        msg = f"`inputs` must hold tensors alone, got {described(leaf)}"
        raise TypeError(msg)
    return leaf


def _check_inexact(leaf: object) -> None:
    tensor = _check_tensor(leaf)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        msg = f"`inputs` must hold floating-point tensors, got one of {tensor.dtype}"
        raise TypeError(msg)
