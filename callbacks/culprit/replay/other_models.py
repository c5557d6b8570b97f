"""Find non-finite weights of models that a loss may call beside the network, such as a teacher."""

from collections.abc import Iterator, Mapping

from torch import nn

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.tensors.shards import local_tensors

_MOST_HELD = 64
"""Largest number of items of a list or a dictionary that may hold models, and no rows of data."""


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
        if name in _OF_TORCH:
            continue
        full = f"{prefix}.{name}" if prefix else name
        values: list[tuple[str, object]] = [(full, value)]
        if isinstance(value, (Mapping, list, tuple)) and len(value) > _MOST_HELD:
            continue
        if isinstance(value, Mapping):
            values = [(f"{full}.{key}", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            values = [(f"{full}.{number}", item) for number, item in enumerate(value)]
        yield from ((key, item) for key, item in values if isinstance(item, nn.Module))


_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes in which a module keeps its own parts."""


def _non_finite(model: nn.Module) -> Iterator[str]:
    for name, weight in model.named_parameters():
        if any(not part.isfinite().all() for part in local_tensors([weight.detach()])):
            yield name
