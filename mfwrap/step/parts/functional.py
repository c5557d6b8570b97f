"""MindSpore's `grad`, `value_and_grad` and `GradOperation`, computed by torch's autograd."""

from collections.abc import Callable, Iterable
from typing import Any, final

from torch import Tensor, nn

from mfwrap.arguments import check_bool, check_callable
from mfwrap.step.parts.gradient_call import GradientRequest, checked_weights, gradients_of

Weights = Tensor | Iterable[Tensor]
"""One parameter or several: a list, or the result of ``module.parameters()``."""


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

    A tuple of one position means the same as that position. Outputs that are not scalars are
    summed. Tensors that `fn` does not depend on have gradients of zeros. ``parameter.grad`` is
    neither read nor changed, so `DistributedDataParallel` does not reduce these gradients; call the
    ``grad_reducer`` of a training cell, or ``accelerator.reduce``. The gradients of ``fully_shard``
    are averages over its ranks.

    Gradients can be differentiated again in three cases: inside another gradient function, if an
    argument requires gradients, or if `weights` is ``None`` and `fn` depends on other tensors that
    require gradients, such as a network's parameters. Otherwise, and under ``torch.no_grad()``, no
    graph is recorded. Gradients by weights under ``fully_shard`` cannot be differentiated again.

    Source: MindSpore, ``mindspore.grad``.

    Args:
        fn: Function or module. Its inputs at `grad_position` are floating-point tensors. It returns
            a tensor, or tensors nested in tuples and lists.
        grad_position: Positions of the inputs to differentiate by, >= 0, without repetition;
            ``None`` for no input.
        weights: Parameters to differentiate by, which must require gradients; ``None`` for no
            parameter.
        has_aux: Differentiate only the first output, and return the other outputs with the
            gradients. If False, the sum of all outputs is differentiated.
        return_ids: Replace each gradient by a pair: ``(position, gradient)`` for inputs,
            ``(name, gradient)`` for weights.

    Returns:
        A function that takes the arguments of `fn` and returns gradients as in the table, or with
        `has_aux` ``(gradients, (second output, ...))``.

    Raises:
        TypeError: If an argument has the wrong type. The returned function raises ``TypeError`` if
            an input at `grad_position` is not a floating-point tensor, or `fn` returns anything but
            tensors.
        ValueError: If both `grad_position` and `weights` are ``None``, a position is negative or
            repeated, `weights` is empty, or `return_ids` is set and a weight is not a parameter of
            `fn`. The returned function raises ``ValueError`` if there is no input at a position, a
            weight does not require gradients, or `has_aux` is set and `fn` has only one output.
        RuntimeError: The returned function raises it inside another gradient function if the
            weights are under ``fully_shard``.

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
        fn: As for `grad`.
        grad_position: As for `grad`.
        weights: As for `grad`.
        has_aux: Differentiate only the first output.
        return_ids: As for `grad`.

    Returns:
        A function that takes the arguments of `fn` and returns ``(outputs, gradients)``. `outputs`
        are all outputs of `fn`, even with `has_aux`. They are detached, with one exception: if the
        gradients can be differentiated again (see `grad`), the outputs that were differentiated
        keep their graph, too.

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
    """Build gradient functions: MindSpore's older interface to `grad`.

    | get_all | get_by_list | gradients |
    | --- | --- | --- |
    | False | False | of the first input |
    | True | False | (of each input, ...) |
    | False | True | (of each weight, ...) |
    | True | True | ((of each input, ...), (of each weight, ...)) |

    Inputs are the positional arguments that are tensors. With `get_all`, the gradients of integer
    tensors are zeros.

    Source: MindSpore, ``ops.GradOperation``.

    Args:
        get_all: Differentiate by all inputs.
        get_by_list: Differentiate by weights.
        sens_param: If True, the gradient function takes the gradients of the outputs as its last
            positional argument: a number, or tensors of the outputs' shapes (for a single output of
            shape ``()`` also a tensor of shape ``(1,)``). If False, the gradients of the outputs
            are ones.

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
            weights: Parameters to differentiate by; allowed only with `get_by_list`. If ``None``,
                `fn` must be a module, and its parameters that require gradients are used.

        Returns:
            A function that takes the arguments of `fn` and returns gradients as in the table.

        Raises:
            TypeError: As `grad`.
            ValueError: If `weights` is given without `get_by_list`. Also if `get_by_list` is set,
                `weights` is ``None`` and `fn` is not a module. With `sens_param`, the returned
                function raises ``ValueError`` if its last argument is missing, or if the shapes of
                that argument differ from those of the outputs.
        """
        listed = self._weights(fn, weights)

        def gradient_function(*args: Any, **keywords: Any) -> Any:
            sens = None
            if self.sens_param:
                if not args:
                    msg = (
                        "`sens_param=True` needs a last positional argument with the gradients of "
                        "the outputs, got none"
                    )
                    raise ValueError(msg)
                *inputs, sens = args
                args = tuple(inputs)
            request = GradientRequest(
                fn, self._positions(args), listed, integers_have_zeros=self.get_all
            )
            return gradients_of(request, args, keywords, sens=sens)[1]

        return gradient_function

    def _weights(self, fn: Callable[..., Any], weights: Weights | None) -> Any:
        check_callable("fn", fn)
        if not self.get_by_list:
            if weights is not None:
                msg = "`weights` must be None without `get_by_list=True`, got weights"
                raise ValueError(msg)
            return None
        if weights is None and isinstance(fn, nn.Module):
            weights = [p for p in fn.parameters() if p.requires_grad]
        if weights is None:
            msg = "`weights` must be given if `get_by_list=True` and `fn` is not a module, got None"
            raise ValueError(msg)
        return checked_weights(weights)

    def _positions(self, args: tuple[Any, ...]) -> Any:
        if self.get_all:
            return [index for index, argument in enumerate(args) if isinstance(argument, Tensor)]
        return None if self.get_by_list else 0
