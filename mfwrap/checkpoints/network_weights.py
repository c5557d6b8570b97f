"""Check that the weights in a checkpoint belong to a network."""

import copy
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mfwrap.checkpoints.file_formats import INDEX, stored_weights
from mfwrap.compatibility.torch import loading_functions
from mfwrap.compatibility.transformers import shapes_in_original_format, unsaved_keys
from mfwrap.tensors.wrappers import is_instance_of

EXPORT = "ema"
"""Folder of the averaged model in a checkpoint."""

_WEIGHTS = "model.safetensors"


def foreign_weights(
    folder: Path, network: nn.Module, *, may_be_partial: bool = False
) -> str | None:
    """Return why a checkpoint's weights do not belong to a network; ``None`` if they do.

    A stock Trainer would load the weights that fit and ignore the others. Reads only the headers of
    ``model.safetensors``, or of the files that its index lists; adapters are not checked.

    Also not checked are the weights of a module, and of the modules in it, whose own code changes
    how they are loaded: a hook before ``load_state_dict``, or an override of ``load_state_dict`` or
    ``_load_from_state_dict``. Such code may resize a buffer or rename weights, so only loading the
    weights shows whether they fit. Code of torch and transformers does not count: it converts older
    formats.

    Args:
        folder: Folder of the checkpoint.
        network: The network.
        may_be_partial: Whether the user's own code has saved the weights, which may then lack
            weights and have others. One of them at least must be a weight of the network, and
            shapes must be equal.

    Raises:
        DamagedFileError: If a header is damaged.
        OSError: If a file cannot be read.
    """
    path = folder / _WEIGHTS
    if not path.is_file() and not path.with_name(_WEIGHTS + INDEX).is_file():
        return None
    stored = stored_weights(path).tensors
    expected = network.state_dict(keep_vars=True)
    unchecked = _prefixes_with_own_loading(network)
    for name, tensor in stored.items():
        if name.startswith(unchecked):
            continue
        if name not in expected:
            if may_be_partial:
                continue
            return f"{_WEIGHTS} has {name}, which is not in the network"
        shape = tuple(expected[name].shape)
        if tensor.shape != shape:
            return (
                f"{_WEIGHTS} has {name} with shape {list(tensor.shape)}, but the network has it "
                f"with shape {list(shape)}"
            )
    if may_be_partial:
        is_known = any(name in expected or name.startswith(unchecked) for name in stored)
        return None if is_known else f"{_WEIGHTS} has no weight of the network"
    # Only one name of a tied weight is stored. The other names have the same address, so a name is
    # missing only if its address is missing, too.
    present = {expected[name].data_ptr() for name in stored if name in expected}
    ignored = unsaved_keys(network)
    for name, parameter in expected.items():
        is_saved = name not in ignored and parameter.numel()
        is_missing = name not in stored and parameter.data_ptr() not in present
        if is_saved and is_missing and not name.startswith(unchecked):
            return f"{_WEIGHTS} has no {name}"
    return None


def is_in_original_format(folder: Path, network: nn.Module) -> bool:
    """Return whether a checkpoint has a network's weights by the names of its format on the hub.

    A stock Trainer saves this format, and when it resumes, it loads only the weights whose names it
    finds in the network. Reads only the headers of files. False for a network that its class does
    not build from its configuration: transformers could not load the checkpoint into it.

    Args:
        folder: Folder of the checkpoint.
        network: The network.

    Raises:
        DamagedFileError: If a header is damaged.
        OSError: If a file cannot be read.
    """
    path = folder / _WEIGHTS
    if not path.is_file() and not path.with_name(_WEIGHTS + INDEX).is_file():
        return False
    shapes = shapes_in_original_format(network)
    stored = stored_weights(path).tensors if shapes else {}
    return (
        not network.state_dict().keys() >= stored.keys()
        and all(shapes.get(name) == tuple(tensor.shape) for name, tensor in stored.items())
        and _is_built_from_its_configuration(network)
    )


def _is_built_from_its_configuration(network: Any) -> bool:
    try:
        with torch.device("meta"):
            again = type(network)(copy.deepcopy(network.config))
    except Exception:  # noqa: BLE001  (the user's own class may raise any error)
        return False
    shapes, own = (
        {name: each.shape for name, each in model.state_dict().items()}
        for model in (again, network)
    )
    return bool(shapes == own)


def load_original_format(folder: Path, network: Any) -> None:
    """Load a checkpoint for which `is_in_original_format` is true; takes a second model in memory.

    The second model has the most precise dtype of the network, so that no weight is rounded.

    Raises:
        ValueError: If the checkpoint lacks weights.
    """
    dtypes = {each.dtype for each in network.parameters() if each.is_floating_point()}
    loaded, found = type(network).from_pretrained(
        folder,
        config=network.config,
        dtype=functools.reduce(torch.promote_types, dtypes),
        use_safetensors=True,
        output_loading_info=True,
    )
    if found["missing_keys"]:
        msg = f"{folder / _WEIGHTS} has no {min(found['missing_keys'])}"
        raise ValueError(msg)
    network.load_state_dict(loaded.state_dict())


def _prefixes_with_own_loading(network: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the weights that a module's own code loads."""
    # `load_state_dict` is called on the whole network only, not on the modules in it.
    prefixes = [""] if _is_own(type(network).load_state_dict) else []
    for name, module in network.named_modules(remove_duplicate=False):
        if any(_is_own(function) for function in loading_functions(module)):
            prefixes.append(f"{name}." if name else "")
    return tuple(prefixes)


def _is_own(function: Callable[..., Any]) -> bool:
    return function.__module__.partition(".")[0] not in {"torch", "transformers"}


def adapters_of(network: Any) -> set[str]:
    """Return the names of the adapters of a model of PEFT; empty for any other."""
    return {*network.peft_config} if is_instance_of(network, "peft", "PeftModel") else set()


def drop_loaded_average(network: Any, known: Collection[str]) -> None:
    """Remove the adapter that a resume has made of an averaged adapter in its checkpoint.

    The Trainer loads each folder of the checkpoint in which there is an adapter of PEFT.

    Args:
        network: Network that has been loaded, with or without adapters.
        known: Names of the adapters that it had before.
    """
    if EXPORT not in known and EXPORT in adapters_of(network):
        network.delete_adapter(EXPORT)
