"""Call a function once and return its outputs together with their gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from mfwrap.arguments import check_bool, check_callable, described
from mfwrap.compatibility.torch import pytree
from mfwrap.step.parts.forward_reuse import take_output
from mfwrap.tensors.shards import is_distributed, on_device
from mfwrap.tensors.wrappers import sharded_parts


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """State which gradients of a function to compute, and how to nest them.

    The gradients of the inputs are a tensor or a tuple of tensors; so are the gradients of the
    weights. If both are requested, the result is the pair ``(of the inputs, of the weights)``.
    """

    fn: Callable[..., Any]
    """Function or module to differentiate."""

    positions: int | Sequence[int] | None
    """Positions of the inputs to differentiate by. An int gives a tensor instead of a tuple."""

    weights: Tensor | Sequence[Tensor] | None
    """Parameters to differentiate by. A single one gives a tensor instead of a tuple."""

    has_aux: bool = False
    """Whether only the first output is differentiated."""

    names: Sequence[str] | None = None
    """Names of the weights. If set, each gradient is returned in a pair with its id: the position
    of the input, or the name of the weight. ``None`` returns gradients alone."""

    integers_have_zeros: bool = False
    """Whether inputs that are not floating-point tensors have gradients of zeros. If False, such an
    input is an error."""

    @classmethod
    def checked(
        cls, fn: Any, grad_position: Any, weights: Any, has_aux: object, return_ids: object
    ) -> Self:
        """Build a request from the arguments of `mfwrap.grad`.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument has an invalid value, or both `grad_position` and `weights`
                are ``None``.
        """
        check_callable("fn", fn)
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
        """Nest gradients in the structure that this request describes.

        Args:
            of_inputs: Gradient of each requested input.
            of_weights: Gradient of each weight.
        """
        parts = []
        if self.positions is not None:
            ids = None if self.names is None else as_list(self.positions)
            parts.append(_part(of_inputs, ids, bare=isinstance(self.positions, int)))
        if self.weights is not None:
            parts.append(_part(of_weights, self.names, bare=isinstance(self.weights, Tensor)))
        return parts[0] if len(parts) == 1 else tuple(parts)


_inside: ContextVar[bool] = ContextVar("inside a gradient function", default=False)
"""Whether the current code runs in a function that an outer `gradients_of` will differentiate."""


def gradients_of(
    request: GradientRequest,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    sens: Any = None,
) -> tuple[Any, Any]:
    """Call a function once and differentiate it.

    If `forward_reuse` remembers that the function, a network, has just run with the same inputs,
    that forward pass is differentiated instead of a new one.

    Args:
        request: Function, and the gradients to compute.
        args: Positional arguments of the function.
        keywords: Keyword arguments of the function.
        sens: Gradients of the outputs: a number, or tensors nested like the outputs. ``None``
            means ones.

    Returns:
        Outputs of the function, and gradients in the structure of `request`.

    Raises:
        RuntimeError: If the gradients may be differentiated again, but the function's weights are
            under ``fully_shard``.
        TypeError: If an input or an output has the wrong type.
        ValueError: If the request does not fit the arguments or the outputs.
    """
    recording, nested = torch.is_grad_enabled(), _inside.get()
    weights = as_list(request.weights)
    _check_trainable(weights)
    is_nested = nested and recording
    if is_nested and isinstance(request.fn, nn.Module) and sharded_parts(request.fn):
        raise _no_second_derivatives()
    by_shards = not is_nested and any(map(is_distributed, weights))
    if by_shards:
        # Otherwise the backward pass would go on through the graphs of the arguments.
        args, keywords = pytree.tree_map_only(Tensor, _without_graph, (args, dict(keywords)))
    args, inputs = _with_leaves(request, args)
    may_have_run = request.positions is None and not keywords and not nested
    token = _inside.set(True)
    try:
        with torch.enable_grad():
            ran = take_output(request.fn, args) if may_have_run else None
            outputs = request.fn(*args, **keywords) if ran is None else ran
            roots, cotangents = _roots(request, outputs, sens)
            leaves = [*inputs, *weights]
            again = False
            if by_shards:
                gradients = _differentiate_shards(request.fn, roots, cotangents, leaves)
            else:
                again = recording and _is_differentiated_again(
                    roots, inputs, args, nested=nested, with_weights=bool(weights)
                )
                if any(map(is_distributed, weights)):
                    # The graph never contains the shards of `fully_shard`.
                    reached = set(map(id, leaves_of(roots)))
                    if reached.isdisjoint(map(id, weights)):
                        raise _no_second_derivatives()
                gradients = _differentiate(roots, cotangents, leaves, create_graph=again)
    finally:
        _inside.reset(token)
    value = _value(request, outputs, detached=not again)
    return value, request.nested(gradients[: len(inputs)], gradients[len(inputs) :])


def checked_weights(weights: Any) -> Tensor | list[Tensor]:
    """Check weights: return a single tensor as it is, and any other iterable as a list.

    Raises:
        TypeError: If `weights` holds anything but tensors.
        ValueError: If `weights` is empty.
    """
    if isinstance(weights, Tensor):
        return weights
    if not isinstance(weights, Iterable):
        msg = f"`weights` must be a parameter or a list of parameters, got {described(weights)}"
        raise TypeError(msg)
    listed = list(weights)
    for weight in listed:
        if not isinstance(weight, Tensor):
            msg = f"`weights` must hold only parameters, got {described(weight)}"
            raise TypeError(msg)
    if not listed:
        msg = "`weights` must hold at least one parameter, got none"
        raise ValueError(msg)
    return listed


def as_list(given: Any) -> list[Any]:
    """Convert an argument to a list.

    ``None`` gives an empty list, a list or tuple gives a list of its items, and any other value
    gives a list with only that value.
    """
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
        msg = f"`grad_position` must hold different positions >= 0, got {grad_position}"
        raise ValueError(msg)
    return positions[0] if len(positions) == 1 else positions


def _names(fn: Any, weights: Sequence[Tensor]) -> list[str]:
    parameters = fn.named_parameters(remove_duplicate=False) if isinstance(fn, nn.Module) else ()
    names: dict[int, str] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), name)
    if any(id(weight) not in names for weight in weights):
        msg = (
            "`return_ids=True` needs weights that are parameters of the module `fn`, "
            f"got {described(fn) if not names else 'weights of another module'}"
        )
        raise ValueError(msg)
    return [names[id(weight)] for weight in weights]


def _part(gradients: Sequence[Tensor], ids: Sequence[Any] | None, *, bare: bool) -> Any:
    part = tuple(gradients) if ids is None else tuple(zip(ids, gradients, strict=True))
    return part[0] if bare else part


def _check_trainable(weights: Sequence[Tensor]) -> None:
    frozen = [index for index, weight in enumerate(weights) if not weight.requires_grad]
    if frozen:
        msg = f"`weights` must require gradients, got frozen weights at the indices {frozen}"
        raise ValueError(msg)


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _with_leaves(
    request: GradientRequest, args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Replace each requested input with a new tensor that only this call uses.

    Integer tensors are not replaced, because they have no gradients.

    Returns:
        All arguments after the replacement, and a list with only the requested inputs.
    """
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
            # A view keeps the argument's graph, so that the gradients can be differentiated again
            # with respect to the tensors from which the argument was computed.
            argument = (
                argument.view_as(argument)
                if argument.requires_grad and torch.is_grad_enabled()
                else argument.detach().requires_grad_()
            )
        replaced[position] = argument
        inputs.append(argument)
    return tuple(replaced), inputs


def _roots(request: GradientRequest, outputs: Any, sens: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs to differentiate, and the output gradient (cotangent) of each."""
    if request.has_aux:
        if not isinstance(outputs, (tuple, list)) or len(outputs) < 2:
            number = len(outputs) if isinstance(outputs, (tuple, list)) else 1
            msg = f"`has_aux=True` needs a function with at least two outputs, got {number}"
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
    if given == [(1,)] and shapes == [()]:
        # MindSpore's BERT passes the loss scale in this shape.
        cotangents, given = [cotangents[0].reshape(())], shapes
    if given != shapes:
        msg = f"`sens` must have the shapes of the outputs, {shapes}, got {given}"
        raise ValueError(msg)
    return [
        on_device(cotangent, root.device).to(root.dtype)
        for cotangent, root in zip(cotangents, roots, strict=True)
    ]


def _differentiate(
    roots: list[Tensor], cotangents: list[Tensor], leaves: list[Tensor], *, create_graph: bool
) -> list[Tensor]:
    # torch raises if a leaf does not require a gradient (an integer tensor), or if there is no
    # output to differentiate. MindSpore returns zeros in both cases, and so does this function.
    wanted = [leaf for leaf in leaves if leaf.requires_grad] if roots else []
    if not wanted:
        return [torch.zeros_like(leaf) for leaf in leaves]
    gradients = torch.autograd.grad(
        roots, wanted, cotangents, create_graph=create_graph, allow_unused=True
    )
    # `materialize_grads=True` gives zeros, too, but in torch 2.9 they always require gradients.
    found = iter(
        torch.zeros_like(leaf, requires_grad=create_graph) if gradient is None else gradient
        for leaf, gradient in zip(wanted, gradients, strict=True)
    )
    return [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]


def _differentiate_shards(
    fn: Callable[..., Any], roots: list[Tensor], cotangents: list[Tensor], leaves: list[Tensor]
) -> list[Tensor]:
    """Differentiate by a whole backward pass, and leave every ``grad`` as it was.

    ``fully_shard`` gathers its shards outside the graph, and hooks of the backward pass reduce the
    gradients and write them into the ``grad`` of the shards. `torch.autograd.grad` would find no
    path to a shard and return zeros.
    """
    own = fn.parameters() if isinstance(fn, nn.Module) else leaves_of(roots)
    before = {leaf: leaf.grad for leaf in [*leaves, *own]}
    try:
        for leaf in before:
            leaf.grad = None
        if roots:
            torch.autograd.backward(roots, cotangents)
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in before.items():
            leaf.grad = gradient


def _no_second_derivatives() -> RuntimeError:
    return RuntimeError(
        "a gradient function inside another one cannot be differentiated again by weights under "
        "`fully_shard`, because torch gathers these weights outside of the graph; replicate the "
        "network instead, for example by DistributedDataParallel, or call the inner function under "
        "torch.no_grad() if only its values are needed"
    )


def _is_differentiated_again(
    roots: Sequence[Tensor],
    inputs: Sequence[Tensor],
    args: Sequence[Any],
    *,
    nested: bool,
    with_weights: bool,
) -> bool:
    """Return whether the caller may differentiate the gradients again.

    If so, their graph must be recorded. A training step differentiates by weights and does not
    differentiate again; a recorded graph would keep all activations in memory for nothing. The
    graph is recorded in three cases:

    - inside another gradient function;
    - if an argument requires gradients;
    - if there are no weights, and the function depends on a leaf other than its inputs, such as a
      network's parameter: the caller may differentiate the result by that leaf.
    """
    own = {id(tensor) for tensor in inputs if tensor.is_leaf}
    if nested or any(
        isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in own
        for leaf in pytree.tree_leaves(args)
    ):
        return True
    return not with_weights and any(id(leaf) not in own for leaf in leaves_of(roots))


def leaves_of(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves, such as parameters, from which tensors were computed."""
    yield from (root for root in roots if root.is_leaf)
    seen: set[Any] = set()
    nodes = [root.grad_fn for root in roots]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # A node has the attribute `variable` only if it accumulates the gradient of a leaf.
        # `variable` is that leaf.
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        nodes.extend(function for function, _ in node.next_functions)


def _value(request: GradientRequest, outputs: Any, *, detached: bool) -> Any:
    """Detach the outputs; with ``detached=False``, the differentiated outputs keep their graph."""
    kept = set()
    if not detached:
        kept = {id(leaf) for leaf in pytree.tree_leaves(outputs[0] if request.has_aux else outputs)}

    def value(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) and id(leaf) not in kept else leaf

    return pytree.tree_map(value, outputs)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
