"""One call of a function together with the gradients of its outputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mfwrap.arguments import check_bool, described

__all__ = [
    "GradientRequest",
    "checked_weights",
    "gradients_of",
]


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """Which gradients are wanted of a function, and how they are nested.

    Gradients of inputs and those of weights are each bare or a tuple, and a pair if both are
    wanted.
    """

    fn: Callable[..., Any]
    positions: int | Sequence[int] | None
    """Of positional inputs; an int for a bare gradient."""
    weights: Tensor | Sequence[Tensor] | None
    """A tensor for a bare gradient."""
    has_aux: bool = False
    """Only the first output is differentiated."""
    names: Sequence[str] | None = None
    """Of the weights; ``None`` to return gradients without names and positions."""
    integers_have_zeros: bool = False
    """Inputs that are no floating-point tensors have gradients of zeros; else they are an error."""

    @classmethod
    def checked(
        cls, fn: Any, grad_position: Any, weights: Any, has_aux: object, return_ids: object
    ) -> Self:
        """Return a request in MindSpore's terms.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, or nothing is asked for.
        """
        if not callable(fn):
            msg = f"`fn` must be a function or module, got {described(fn)}"
            raise TypeError(msg)
        if grad_position is None and weights is None:
            msg = "`grad_position` and `weights` must not both be None"
            raise ValueError(msg)
        listed = None if weights is None else checked_weights(weights)
        with_ids = check_bool("return_ids", return_ids)
        return cls(
            fn,
            _checked_positions(grad_position),
            listed,
            check_bool("has_aux", has_aux),
            _names(fn, as_list(listed)) if with_ids else None,
        )

    def nested(self, of_inputs: Sequence[Tensor], of_weights: Sequence[Tensor]) -> Any:
        """Return gradients in their structure, with ids if wanted."""
        parts = []
        if self.positions is not None:
            ids = None if self.names is None else as_list(self.positions)
            parts.append(_part(of_inputs, ids, bare=isinstance(self.positions, int)))
        if self.weights is not None:
            parts.append(_part(of_weights, self.names, bare=isinstance(self.weights, Tensor)))
        return parts[0] if len(parts) == 1 else tuple(parts)


def as_list(given: Any) -> list[Any]:
    """Return what is given one by one or bare: nothing for ``None``."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _checked_positions(grad_position: Any) -> int | tuple[int, ...] | None:
    if grad_position is None:
        return None
    positions = grad_position if isinstance(grad_position, tuple) else (grad_position,)
    for position in positions:
        if isinstance(position, bool) or not isinstance(position, int):
            msg = f"`grad_position` must be an int, a tuple of ints or None, got {grad_position!r}"
            raise TypeError(msg)
    if not positions or min(positions) < 0 or len(set(positions)) < len(positions):
        msg = f"`grad_position` must hold positions >= 0, each once, got {grad_position}"
        raise ValueError(msg)
    return positions[0] if len(positions) == 1 else positions


def checked_weights(weights: Any) -> Tensor | list[Tensor]:
    """Return one weight, or all of them as a list.

    Raises:
        TypeError: If anything but tensors is among them.
        ValueError: If there are none.
    """
    if isinstance(weights, Tensor):
        return weights
    if not isinstance(weights, Iterable):
        msg = f"`weights` must be a parameter or a list of parameters, got {described(weights)}"
        raise TypeError(msg)
    listed = list(weights)
    for weight in listed:
        if not isinstance(weight, Tensor):
            msg = f"`weights` must hold parameters alone, got {described(weight)}"
            raise TypeError(msg)
    if not listed:
        msg = "`weights` must hold at least one parameter, got none"
        raise ValueError(msg)
    return listed


def _part(gradients: Sequence[Tensor], ids: Sequence[Any] | None, *, bare: bool) -> Any:
    part = tuple(gradients) if ids is None else tuple(zip(ids, gradients, strict=True))
    return part[0] if bare else part


def _names(fn: Any, weights: Sequence[Tensor]) -> list[str]:
    parameters = fn.named_parameters(remove_duplicate=False) if isinstance(fn, nn.Module) else ()
    names: dict[int, str] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), name)
    if any(id(weight) not in names for weight in weights):
        msg = (
            "`return_ids=True` needs weights that are parameters of the module `fn`, which knows "
            f"their names, got {described(fn) if not names else 'weights of another module'}"
        )
        raise ValueError(msg)
    return [names[id(weight)] for weight in weights]


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
