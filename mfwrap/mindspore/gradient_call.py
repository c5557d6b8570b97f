"""One call of a function together with the gradients of its outputs."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mfwrap.arguments import described
from mfwrap.mindspore.gradient_request import GradientRequest, as_list

__all__ = ["gradients_of"]

_inside: ContextVar[bool] = ContextVar("inside a gradient function", default=False)
"""Whether what runs now is going to be differentiated by a gradient function around it."""


def gradients_of(
    request: GradientRequest,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    sens: Any = None,
) -> tuple[Any, Any]:
    """Call a function once and differentiate it.

    Args:
        request: What is wanted.
        args: Positional arguments of the function.
        keywords: Keyword arguments of the function.
        sens: Gradients of the outputs: a number, or tensors nested like the outputs; ``None`` for
            ones.

    Returns:
        Outputs of the function as it returns them, and gradients in the structure of `request`.

    Raises:
        TypeError: If an input or an output has the wrong type.
        ValueError: If the request does not fit the call.
    """
    recording, nested = torch.is_grad_enabled(), _inside.get()
    weights = as_list(request.weights)
    _check_trainable(weights)
    args, inputs = _with_leaves(request, args)
    token = _inside.set(True)
    try:
        with torch.enable_grad():
            outputs = request.fn(*args, **keywords)
            roots, cotangents = _roots(request, outputs, sens)
            again = recording and _is_differentiated_again(
                roots, inputs, args, nested=nested, with_weights=bool(weights)
            )
            gradients = _differentiate(roots, cotangents, [*inputs, *weights], create_graph=again)
    finally:
        _inside.reset(token)
    value = _value(request, outputs, detached=not again)
    return value, request.nested(gradients[: len(inputs)], gradients[len(inputs) :])


def _with_leaves(
    request: GradientRequest, args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Replace the inputs that are differentiated by tensors that nothing else depends on."""
    replaced, inputs = list(args), []
    for position in as_list(request.positions):
        if position >= len(args):
            msg = f"`grad_position` must be < {len(args)}, the number of inputs, got {position}"
            raise ValueError(msg)
        argument = args[position]
        differentiable = isinstance(argument, Tensor) and _is_inexact(argument)
        if not differentiable and not request.integers_have_zeros:
            kind = argument.dtype if isinstance(argument, Tensor) else described(argument)
            msg = f"input {position} of `fn` must be a floating-point tensor, got {kind}"
            raise TypeError(msg)
        if differentiable:
            # A view keeps the way to whatever the argument itself was computed from.
            argument = (
                argument.view_as(argument)
                if argument.requires_grad and torch.is_grad_enabled()
                else argument.detach().requires_grad_()
            )
        replaced[position] = argument
        inputs.append(argument)
    return tuple(replaced), inputs


def _roots(request: GradientRequest, outputs: Any, sens: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that are differentiated, and the gradients of each."""
    if request.has_aux:
        if not isinstance(outputs, (tuple, list)) or len(outputs) < 2:
            kind = f"{len(outputs)}" if isinstance(outputs, (tuple, list)) else "a single one"
            msg = f"`has_aux=True` needs a function of at least two outputs, got {kind}"
            raise ValueError(msg)
        outputs = outputs[0]
    roots = pytree.tree_leaves(outputs)
    for root in roots:
        if not isinstance(root, Tensor):
            msg = f"`fn` must return tensors to be differentiated, got {described(root)}"
            raise TypeError(msg)
    cotangents = _cotangents(roots, sens)
    pairs = [
        (root, cotangent)
        for root, cotangent in zip(roots, cotangents, strict=True)
        if root.requires_grad
    ]
    return [root for root, _ in pairs], [cotangent for _, cotangent in pairs]


def _cotangents(roots: Sequence[Tensor], sens: Any) -> list[Tensor]:
    if sens is None:
        return [torch.ones_like(root) for root in roots]
    if isinstance(sens, (int, float)):
        return [torch.full_like(root, sens) for root in roots]
    cotangents = pytree.tree_leaves(sens)
    for cotangent in cotangents:
        if not isinstance(cotangent, Tensor):
            msg = f"`sens` must be a number or hold tensors, got {described(cotangent)}"
            raise TypeError(msg)
    shapes = [tuple(root.shape) for root in roots]
    given = [tuple(cotangent.shape) for cotangent in cotangents]
    if given != shapes:
        msg = f"`sens` must have the shapes of the outputs, {shapes}, got {given}"
        raise ValueError(msg)
    return [c.to(root.dtype) for c, root in zip(cotangents, roots, strict=True)]


def _differentiate(
    roots: list[Tensor], cotangents: list[Tensor], leaves: list[Tensor], *, create_graph: bool
) -> list[Tensor]:
    # torch refuses what requires no gradient: integers, or anything if no output depends on it.
    wanted = [leaf for leaf in leaves if leaf.requires_grad] if roots else []
    if not wanted:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = iter(
        torch.autograd.grad(
            roots,
            wanted,
            cotangents,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]


def _is_differentiated_again(
    roots: Sequence[Tensor],
    inputs: Sequence[Tensor],
    args: Sequence[Any],
    *,
    nested: bool,
    with_weights: bool,
) -> bool:
    """Tell whether the graph of the gradients has to be kept, as far as can be seen.

    A training step differentiates with respect to weights and is done: to record it would keep all
    activations for nothing. Without weights nothing but the function's own graph says whether a
    network's parameters are to be reached.
    """
    own = {id(tensor) for tensor in inputs if tensor.is_leaf}
    if nested or any(
        isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in own
        for leaf in pytree.tree_leaves(args)
    ):
        return True
    return not with_weights and _reaches_other_leaves(roots, own)


def _reaches_other_leaves(roots: Sequence[Tensor], own: set[int]) -> bool:
    seen: set[Any] = set()
    nodes = [root.grad_fn for root in roots]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Only the nodes of leaves have a variable.
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            return True
        nodes.extend(function for function, _ in node.next_functions)
    return any(root.is_leaf and id(root) not in own for root in roots)


def _value(request: GradientRequest, outputs: Any, *, detached: bool) -> Any:
    """Return the outputs; what was not differentiated, or cannot be again, without its graph."""
    kept = set()
    if not detached:
        kept = {id(leaf) for leaf in pytree.tree_leaves(outputs[0] if request.has_aux else outputs)}

    def value(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) and id(leaf) not in kept else leaf

    return pytree.tree_map(value, outputs)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _check_trainable(weights: Sequence[Tensor]) -> None:
    frozen = [index for index, weight in enumerate(weights) if not weight.requires_grad]
    if frozen:
        msg = f"`weights` must require gradients, got weights that do not at the places {frozen}"
        raise ValueError(msg)
