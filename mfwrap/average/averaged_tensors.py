"""Which tensors an average of weights follows, and which fit it."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from mfwrap.arguments import described
from mfwrap.tensors.wrappers import plain_name, reshard, unwrapped_network

__all__ = ["BufferPlace", "buffer_places", "check_names", "fitting_tensors", "named_weights"]


class BufferPlace(NamedTuple):
    """Where a buffer is found: ``module.to()`` replaces the tensor, so the tensor is not kept."""

    module: nn.Module
    attribute: str

    def tensor(self) -> Tensor:
        return self.module.get_buffer(self.attribute)


def named_weights(parameters: nn.Module | Iterable[Tensor]) -> dict[str, Tensor]:
    """Return what is averaged by name, each tensor once."""
    weights: dict[str, Any]
    if isinstance(parameters, nn.Module):
        reshard(parameters)
        network = unwrapped_network(parameters)
        weights = {plain_name(n): p for n, p in network.named_parameters() if p.requires_grad}
    elif isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        msg = (
            f"`parameters` must be a module or an iterable of tensors, got {described(parameters)}"
        )
        raise TypeError(msg)
    else:
        unique = {id(tensor): tensor for tensor in parameters}
        weights = {str(index): tensor for index, tensor in enumerate(unique.values())}
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            msg = f"`parameters` must be floating-point tensors, got {_kind(weight)} at {name!r}"
            raise TypeError(msg)
    if not weights:
        msg = "`parameters` must hold a tensor that can be trained, got none"
        raise ValueError(msg)
    return weights


def buffer_places(parameters: object) -> dict[str, BufferPlace]:
    """Return where the persistent buffers of a module are, by name."""
    if not isinstance(parameters, nn.Module):
        return {}
    network = unwrapped_network(parameters)
    persistent = network.state_dict(keep_vars=True)
    places = {}
    for name, _ in network.named_buffers():
        if name in persistent:
            path, _, attribute = name.rpartition(".")
            places[plain_name(name)] = BufferPlace(network.get_submodule(path), attribute)
    return places


def check_names(label: str, given: object, expected: Mapping[str, object]) -> None:
    """Check that there is all that is expected, and no more."""
    if not isinstance(given, Mapping):
        msg = f"`{label}` must be a mapping, got {described(given)}"
        raise TypeError(msg)
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        msg = f"`{label}` must have this average's names, missing are {missing}, unknown {unknown}"
        raise KeyError(msg)


def fitting_tensors(
    label: str, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return the tensors under the expected names, of fitting shapes and dtypes."""
    for name, tensor in expected.items():
        if name not in given:
            msg = f"`{label}` must have the names that are averaged here, got no {name!r}"
            raise KeyError(msg)
        value = given[name]
        if not isinstance(value, Tensor):
            msg = f"`{label}` must hold a tensor at {name!r}, got {described(value)}"
            raise TypeError(msg)
        both_float = value.is_floating_point() and tensor.is_floating_point()
        if value.shape != tensor.shape or (value.dtype != tensor.dtype and not both_float):
            wanted = f"{tuple(tensor.shape)} {tensor.dtype} at {name!r}"
            msg = f"`{label}` must be like {wanted}, got {tuple(value.shape)} {value.dtype}"
            raise ValueError(msg)
    return [given[name] for name in expected]


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
