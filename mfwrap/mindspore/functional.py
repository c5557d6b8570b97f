"""MindSpore's functions that return gradient functions, over torch's autograd."""

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import Tensor, nn

from mfwrap.arguments import check_bool, described
from mfwrap.mindspore.gradient_call import GradientRequest, checked_weights, gradients_of

__all__ = ["GradOperation", "grad", "value_and_grad"]

Weights = Tensor | Iterable[Tensor]
"""One parameter, or several: a list, or what ``module.parameters()`` returns."""


def grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Weights | None = None,
    has_aux: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
    return_ids: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
) -> Callable[..., Any]:
    """Return a function that returns the gradients of `fn`.

    | grad_position | weights | gradients |
    | --- | --- | --- |
    | ``0`` | ``None`` | of the first input |
    | ``(0, 1)`` | ``None`` | (of the first input, of the second) |
    | ``None`` | a list | (of each weight, ...) |
    | ``None`` | one parameter | of the weight |
    | ``0`` | a list | (of the first input, (of each weight, ...)) |
    | ``(0, 1)`` | a list | ((of the first input, of the second), (of each weight, ...)) |
    | ``None`` | ``None`` | ``ValueError`` |

    A tuple of one position is as the position itself. Outputs of any shape count as the sum of
    their elements. Tensors that `fn` does not depend on have gradients of zeros. ``parameter.grad``
    is neither read nor written, so `DistributedDataParallel` does not reduce these gradients.

    Gradients can be differentiated again inside another function of this kind, if an argument
    requires gradients, or if, without `weights`, `fn` depends on anything else that does: a
    network's parameters. Otherwise, and under ``torch.no_grad()``, nothing is recorded.

    Source: MindSpore, ``mindspore.grad``.

    Args:
        fn: A function or module of floating-point tensors that returns a tensor, or tensors
            nested in tuples and lists.
        grad_position: Which positional inputs, >= 0 and each once; ``None`` for none.
        weights: Which parameters; ``None`` for none. They must require gradients.
        has_aux: Differentiate the first output alone, and return the others beside the gradients.
            If False, gradients are those of the sum of all outputs.
        return_ids: Return ``(position, gradient)`` and ``(name, gradient)`` in the place of each
            gradient.

    Returns:
        A function of the arguments of `fn`: gradients as above, or with `has_aux`
        ``(gradients, (second output, ...))``.

    Raises:
        TypeError: If an argument has the wrong type; of the returned function: if an input at
            `grad_position` is no floating-point tensor, or `fn` returns anything but tensors.
        ValueError: If both `grad_position` and `weights` are ``None``, a position is negative or
            given twice, `weights` is empty, or `return_ids` asks for names of weights that `fn`
            does not have; of the returned function: if there are fewer inputs than positions,
            `has_aux` finds one output only, or a weight does not require gradients.

    Example:
        >>> import torch
        >>> grad(lambda x, y: x**2 * y)(torch.tensor(3.0), torch.tensor(2.0))
        tensor(12.)
        >>> grad(grad(torch.sin))(torch.tensor(0.0))
        tensor(-0.)
    """
    request = GradientRequest.checked(fn, grad_position, weights, has_aux, return_ids)

    def gradient_function(*args: Any, **keywords: Any) -> Any:
        value, gradients = gradients_of(request, args, keywords)
        return (gradients, tuple(value[1:])) if has_aux else gradients

    return gradient_function


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Weights | None = None,
    has_aux: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
    return_ids: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that returns the outputs of `fn` and its gradients.

    Source: MindSpore, ``mindspore.value_and_grad``.

    Args:
        fn: As for `grad`, like everything that is not described here.
        grad_position: As for `grad`.
        weights: As for `grad`.
        has_aux: Differentiate the first output alone.
        return_ids: As for `grad`.

    Returns:
        A function of the arguments of `fn` that returns ``(outputs, gradients)``: all outputs,
        with `has_aux`, too, as `fn` returns them; detached unless the gradients can be
        differentiated again.

    Raises:
        TypeError: As `grad`.
        ValueError: As `grad`.

    Example:
        >>> import torch
        >>> network = torch.nn.Linear(2, 1, bias=False)
        >>> loss, gradients = value_and_grad(
        ...     lambda x: network(x).sum(), grad_position=None, weights=network.parameters()
        ... )(torch.tensor([[2.0, 3.0]]))
        >>> gradients
        (tensor([[2., 3.]]),)
    """
    request = GradientRequest.checked(fn, grad_position, weights, has_aux, return_ids)

    def value_and_gradient_function(*args: Any, **keywords: Any) -> tuple[Any, Any]:
        return gradients_of(request, args, keywords)

    return value_and_gradient_function


@final
class GradOperation:
    """Make gradient functions of one kind; MindSpore's older form of `grad`.

    | get_all | get_by_list | gradients |
    | --- | --- | --- |
    | False | False | of the first input |
    | True | False | (of each input, ...) |
    | False | True | (of each weight, ...) |
    | True | True | ((of each input, ...), (of each weight, ...)) |

    Inputs are the positional ones that are tensors; gradients of integers are zeros.

    Source: MindSpore, ``ops.GradOperation``.

    Args:
        get_all: Gradients of all inputs.
        get_by_list: Gradients of weights.
        sens_param: The gradient function takes one more positional argument, the last one: what
            the gradients of the outputs are, a number or tensors shaped like the outputs. If
            False, they are ones.

    Raises:
        TypeError: If an argument is not a bool.

    Example:
        >>> import torch
        >>> GradOperation(get_all=True)(lambda x, y: x * y)(torch.tensor(3.0), torch.tensor(2.0))
        (tensor(2.), tensor(3.))
        >>> GradOperation(sens_param=True)(lambda x: x * x)(torch.tensor(3.0), 8.0)
        tensor(48.)
    """

    def __init__(
        self,
        get_all: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        get_by_list: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
        sens_param: bool = False,  # noqa: FBT001, FBT002  (MindSpore's signature)
    ) -> None:
        self.get_all = check_bool("get_all", get_all)
        self.get_by_list = check_bool("get_by_list", get_by_list)
        self.sens_param = check_bool("sens_param", sens_param)

    def __call__(
        self, fn: Callable[..., Any], weights: Weights | None = None
    ) -> Callable[..., Any]:
        """Return the gradient function of `fn`.

        Args:
            fn: As for `grad`.
            weights: With `get_by_list`, which parameters; ``None`` for all of a module `fn` that
                require gradients. An error without `get_by_list`.

        Returns:
            A function of the arguments of `fn`.

        Raises:
            TypeError: As `grad`.
            ValueError: If `weights` is missing or not asked for; of the returned function: if
                `sens_param` finds no argument, or one that is shaped otherwise than the outputs.
        """
        listed = self._weights(fn, weights)

        def gradient_function(*args: Any, **keywords: Any) -> Any:
            sens = None
            if self.sens_param:
                if not args:
                    msg = "`sens_param` needs a last positional argument, got none"
                    raise ValueError(msg)
                *inputs, sens = args
                args = tuple(inputs)
            request = GradientRequest(
                fn, self._positions(args), listed, integers_have_zeros=self.get_all
            )
            return gradients_of(request, args, keywords, sens=sens)[1]

        return gradient_function

    def _weights(self, fn: Callable[..., Any], weights: Weights | None) -> Any:
        if not callable(fn):
            msg = f"`fn` must be a function or module, got {described(fn)}"
            raise TypeError(msg)
        if not self.get_by_list:
            if weights is not None:
                msg = "`weights` must be None without `get_by_list=True`, got weights"
                raise ValueError(msg)
            return None
        if weights is None and isinstance(fn, nn.Module):
            weights = [p for p in fn.parameters() if p.requires_grad]
        if weights is None:
            msg = "`weights` must be given with `get_by_list=True` and a function, got None"
            raise ValueError(msg)
        return checked_weights(weights)

    def _positions(self, args: tuple[Any, ...]) -> Any:
        if self.get_all:
            return [index for index, argument in enumerate(args) if isinstance(argument, Tensor)]
        return None if self.get_by_list else 0
