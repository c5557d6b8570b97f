"""Which gradients are wanted of a function, checked once, in MindSpore's terms."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from mfwrap.arguments import check_bool, described

__all__ = ["GradientRequest", "as_list", "checked_weights"]


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
