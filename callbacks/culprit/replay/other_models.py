"""Find non-finite weights of models that a loss may call beside the network, such as a teacher."""

from collections.abc import Iterator, Mapping

from torch import nn

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.tensors.shards import local_tensors

_MOST_HELD, _DEPTH = 64, 2
"""Largest number of items of a list or a dictionary that may hold models, and no rows of data; and
how deep they are looked into."""


def bad_weight_of_others(recorder: StepRecorder) -> str | None:
    """Return the first non-finite weight of a model that is held beside the network.

    Such a model is in an attribute of a module of the network, where it is no part of it if it is
    in a list or a dictionary, or in an attribute of what holds the network, such as its Trainer.
    Synchronizes with the device; starts no collective.

    Args:
        recorder: Recorder of the network.

    Returns:
        Name of the attribute and of the weight in it; ``None`` if all are finite.
    """
    known = set(recorder.network.modules())
    owners = [(name, vars(module)) for name, module in recorder.network.named_modules()]
    if recorder.holder is not None:
        owners.append(("", vars(recorder.holder)))
    for prefix, attributes in owners:
        for name, model in _modules_in(attributes, prefix):
            # Wrappers of the network hold it, and what a part of it holds is a part, too.
            if known.isdisjoint(model.modules()):
                known.update(model.modules())
                bad = next(_non_finite(model), None)
                if bad is not None:
                    return f"{name}.{bad}"
    return None


def _modules_in(attributes: Mapping[str, object], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in attributes, and in lists, tuples and dictionaries there, with names."""
    for name, value in attributes.items():
        if name not in _OF_TORCH:
            yield from _held(value, f"{prefix}.{name}" if prefix else name, _DEPTH)


def _held(value: object, name: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield name, value
    if not isinstance(value, (Mapping, list, tuple)) or not depth or len(value) > _MOST_HELD:
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        yield from _held(item, f"{name}.{key}", depth - 1)


_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes in which a module keeps its own parts."""


def _non_finite(model: nn.Module) -> Iterator[str]:
    for name, weight in model.named_parameters():
        if any(not part.isfinite().all() for part in local_tensors([weight.detach()])):
            yield name
