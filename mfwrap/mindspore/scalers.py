"""MindSpore's loss scalers for your own loop: scale the loss, unscale gradients, adjust."""

import abc
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from mfwrap.arguments import check_int, check_number, described
from mfwrap.compatibility.torch import pytree
from mfwrap.tensors.sharded_norms import has_non_finite
from mfwrap.tensors.shards import on_device

_Structure = TypeVar("_Structure")


def all_finite(inputs: Any) -> Tensor:
    """Return whether every element of every tensor is finite.

    Only this rank's tensors are read. That is enough for gradients that are already reduced over
    ranks, because they are equal on every rank. For other tensors, combine the results of all ranks
    before you use them.

    Source: MindSpore, ``amp.all_finite``.

    Args:
        inputs: A tensor, or tensors nested in tuples, lists and dicts. ``None`` entries are
            ignored, and integers are finite.

    Returns:
        Shape ``()``, bool, on the device of the first tensor. No synchronization with the device.

    Raises:
        TypeError: If `inputs` holds anything but tensors and ``None``, or no tensor at all.

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
    """Base class of the scalers: apply a loss scale that is a tensor on the device.

    Source: MindSpore, ``amp.LossScaler``.

    Args:
        scale_value: The loss scale, >= 1 and finite.

    Raises:
        TypeError: If `scale_value` is not a number.
        ValueError: If `scale_value` is out of range.
    """

    def __init__(self, scale_value: float) -> None:
        number = check_number("scale_value", scale_value, minimum=1)
        if number > torch.finfo(torch.float32).max:
            msg = f"`scale_value` must be finite in float32, got {scale_value}"
            raise ValueError(msg)
        self.scale_value = torch.full((), number, dtype=torch.float32)
        """Current loss scale: shape ``()``, float32. Each change of the scale replaces this tensor.
        The first input on an accelerator replaces it, too: the scale moves to that device."""

    def scale(self, inputs: _Structure) -> _Structure:
        """Multiply the loss by the loss scale, before the backward pass.

        Args:
            inputs: A floating-point tensor, or such tensors nested in tuples, lists and dicts.
                ``None`` entries are returned as they are.

        Returns:
            New differentiable tensors in the same structure, with the dtypes and devices of
            `inputs`. Each product is computed in the tensor's own dtype, so float16 overflows above
            65504. No synchronization with the device.

        Raises:
            TypeError: If `inputs` holds anything but floating-point tensors and ``None``.
        """
        return self._multiplied(inputs, lambda scale: scale)

    def unscale(self, inputs: _Structure) -> _Structure:
        """Divide gradients by the loss scale, after the backward pass.

        Args:
            inputs: As for `scale`.

        Returns:
            As for `scale`. As in MindSpore, the reciprocal of the scale is rounded to the tensor's
            dtype. In float16 it becomes zero for scales of 2**25 or more, which makes every
            gradient zero, so keep gradients in float32.

        Raises:
            TypeError: As `scale`.
        """
        return self._multiplied(inputs, torch.reciprocal)

    @abc.abstractmethod
    def adjust(self, grads_finite: bool | Tensor) -> bool:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            grads_finite: Whether the gradients of the step are finite, as `all_finite` returns it:
                shape ``()``, bool.

        Returns:
            Whether scalers of this class can change their scale. No synchronization with the
            device.
        """

    def _multiplied(self, inputs: _Structure, factor_of: Callable[[Tensor], Tensor]) -> _Structure:
        for leaf in pytree.tree_leaves(inputs):
            if leaf is not None:
                _check_inexact(leaf)
                self._follow(leaf)
        factor = factor_of(self.scale_value)

        def multiplied(leaf: Tensor | None) -> Tensor | None:
            # Multiply in the tensor's own dtype, so that float16 and bfloat16 round as in
            # MindSpore.
            return leaf if leaf is None else leaf * on_device(factor, leaf.device).to(leaf.dtype)

        outputs: _Structure = pytree.tree_map(multiplied, inputs)
        return outputs

    def _follow(self, tensor: Tensor) -> None:
        """Move a scale on the CPU to the tensor's device, so that later calls need no copy."""
        if self.scale_value.device.type == "cpu":
            self.scale_value = on_device(self.scale_value, tensor.device)


@final
class StaticLossScaler(LossScaler):
    """Keep the loss scale fixed.

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
    """Lower the loss scale on overflow, and raise it after enough steps without overflow.

    - On overflow: ``max(scale / scale_factor, 1)``.
    - After `scale_window` consecutive steps with finite gradients: ``scale * scale_factor``, unless
      the product is infinite.

    Source: MindSpore, ``amp.DynamicLossScaler``.

    Args:
        scale_value: Initial loss scale, >= 1 and finite.
        scale_factor: Factor by which the scale grows and falls, an int >= 1.
        scale_window: Number of consecutive finite steps before the scale grows, >= 1.

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
        """Number of consecutive finite steps in the current window: shape ``()``, int64."""

    def adjust(self, grads_finite: bool | Tensor) -> bool:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            grads_finite: Whether the gradients of the step are finite, as `all_finite` returns it:
                shape ``()`` or ``(1,)``, bool.

        Returns:
            True. No synchronization with the device.
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
        msg = f"`inputs` must hold only tensors, got {described(leaf)}"
        raise TypeError(msg)
    return leaf


def _check_inexact(leaf: object) -> None:
    tensor = _check_tensor(leaf)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        msg = f"`inputs` must hold floating-point tensors, got a tensor of {tensor.dtype}"
        raise TypeError(msg)
