"""Load the weights and the tokenizer of a checkpoint, and check that the weights fit."""

import contextlib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mfwrap.recipes.data.places import is_folder, not_a_folder, why_not_on_hub
from mfwrap.recipes.models.checkpoint import file_of_weights

_unused: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()
"""What `unused_weights` returns."""


class ModelError(ValueError):
    """A model that does not fit its data; the message begins with the key of ``model``."""


def load_network(path: str, load: Callable[..., Any], **settings: Any) -> nn.Module:
    """Load a network, and check that the weights of the checkpoint fit.

    transformers only logs a table of weights that are missing, or of another size, and lets them
    start from random numbers.

    Args:
        path: Folder, or name on the hub.
        load: Method ``from_pretrained`` of a class of transformers.
        settings: Its arguments. With ``num_labels`` or ``id2label``, the network may have another
            head than the checkpoint.

    Raises:
        ModelError: If the checkpoint cannot be found on the hub, or if weights are missing, have
            another shape or are not finite.
    """
    with from_hub("path", path):
        network, info = load(
            path,
            # Without `use_safetensors`, transformers would fall back to pickled weights.
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # `check_weights_fit` tells them from those of a head
            output_loading_info=True,
            **settings,
        )
    is_classifier = not {"num_labels", "id2label"}.isdisjoint(settings)
    check_weights_fit(path, network, info, is_classifier=is_classifier)
    _check_are_finite(path, network)
    loaded: nn.Module = network
    return loaded


def check_weights_fit(
    path: str, network: Any, info: Mapping[str, Any], *, is_classifier: bool = False
) -> None:
    """Check that the weights of a checkpoint are those of a network.

    These may be missing: weights that transformers declares as unimportant or tied; buffers of
    integers, such as counters; and, unless the checkpoint is of the same class, poolers and the
    head of a classifier. Only heads, poolers and mask tokens of other classes may be left over
    without a warning.

    Args:
        path: Folder, or name on the hub.
        network: The network that was loaded.
        info: What ``from_pretrained`` returns for ``output_loading_info``.
        is_classifier: Whether the network has a head for the classes of the data, which may have
            another number of classes in the checkpoint.

    Raises:
        ModelError: If weights are missing or have another shape.
    """
    if hasattr(network, "peft_config"):
        return  # the folder has an adapter, and `info` is about the adapter
    file = file_of_weights(path)
    known = dict(network.named_parameters(remove_duplicate=False))
    known |= {name: each for name, each in network.named_buffers() if each.is_floating_point()}
    expected = [name for name in network.state_dict() if name in known]
    number = len({id(known[name]) for name in expected})  # tied weights are one
    is_of_class = type(network).__name__ in (network.config.architectures or ())

    def is_of_head(name: str) -> bool:
        return not (is_of_class or _is_in_base(network, name, is_classifier=is_classifier))

    def is_optional(name: str) -> bool:
        return not _OPTIONAL.isdisjoint(name.split(".")) and not (is_classifier and is_of_class)

    extra = {n for n in expected if is_optional(n) or (is_classifier and is_of_head(n))}
    shapes = {name: shapes for name, *shapes in info["mismatched_keys"]}
    if is_classifier:
        extra |= {name for name in shapes if _is_other_number(network, *shapes[name])}
    if other := [name for name in expected if name in shapes and name not in extra]:
        got, wanted = map(list, shapes[other[0]])
        msg = (
            f"`path` must have weights of the sizes in its config.json, got {file} with "
            f"{other[0]} of shape {got} instead of {wanted} ({len(other)} of {number} "
            f"differ); {_ONE_MODEL}"
        )
        raise ModelError(msg)
    unused = sorted(info["unexpected_keys"])
    kind = type(network).__name__
    if missing := [name for name in expected if name in info["missing_keys"] and name not in extra]:
        saved_as = ", ".join(network.config.architectures or ())
        if saved_as and all(map(is_of_head, missing)):
            todo = f"the checkpoint was saved as {saved_as}; name one that was saved as {kind}"
        else:
            todo = _what_to_do(missing[0], unused)
        msg = (
            f"`path` must have weights for all of the network, got {file} without {missing[0]} "
            f"({len(missing)} of {number} are missing); {todo}"
        )
        raise ModelError(msg)
    if left := [name for name in unused if not (is_optional(name) or is_of_head(name))]:
        _unused[network] = (
            f"{kind} does not use {len(left)} of the weights in {file}, for example {left[0]}; "
            f"{_ONE_MODEL}"
        )


def _check_are_finite(path: str, network: nn.Module) -> None:
    """Raise `ModelError` if a weight has nan or infinite numbers: all losses would be nan."""
    weights = {
        name: weight
        for name, weight in network.named_parameters()
        if weight.is_floating_point() and not weight.is_meta
    }
    # The sum is many times faster than looking at each number, and finite sums have finite numbers.
    bad = [
        name
        for name, weight in weights.items()
        if not weight.sum(dtype=torch.float32).isfinite() and not weight.isfinite().all()
    ]
    if bad:
        msg = (
            f"`path` must have finite weights, got {file_of_weights(path)} with nan or infinite "
            f"numbers in {bad[0]} ({len(bad)} of {len(weights)} weights have them); take another "
            "copy or an earlier checkpoint"
        )
        raise ModelError(msg)


_OPTIONAL = {"pooler", "mask_token"}
"""Parts of a base that only classes for some tasks have."""

_ONE_MODEL = "config.json and weights must be of the same model"


def _what_to_do(missing: str, unused: list[str]) -> str:
    """Return what to do about missing weights."""
    for name in unused:
        prefix = name.removesuffix(missing)
        if name != prefix and prefix.endswith("."):
            return (
                f"the file has it as {name}, so a wrapper of the model has added {prefix!r} to the "
                "names: save the model inside the wrapper, or remove the prefix"
            )
    return _ONE_MODEL


def _is_in_base(network: Any, name: str, *, is_classifier: bool) -> bool:
    """Return whether a name is of the base of a network, which is the network without its head."""
    children = dict(network.named_children())
    base = network.base_model_prefix
    if base not in children and is_classifier:
        # CLIP's classifier, for example, has only a part of the base, by the name of the part.
        base = max(children, key=lambda child: sum(w.numel() for w in children[child].parameters()))
    inner = children.get(base, network)
    # A checkpoint of the base has its names without the prefix.
    names = {base, network.base_model_prefix, *dict(inner.named_children())}
    return name.partition(".")[0] in names


def _is_other_number(network: Any, got: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether two shapes differ only in the number of classes."""
    number, pairs = network.config.num_labels, zip(got, wanted, strict=False)
    return len(got) == len(wanted) and all(other in (one, number) for one, other in pairs)


def unused_weights(network: nn.Module) -> str | None:
    """Return which weights of its checkpoint a network does not use; ``None`` if it uses all.

    Args:
        network: Network of `load_network`, which may be inside an adapter.
    """
    return next((_unused[one] for one in network.modules() if one in _unused), None)


def load_tokenizer(setting: str, name: str, **settings: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        setting: Key that holds the name.
        name: Folder, or name on the hub.
        settings: Arguments of ``AutoTokenizer.from_pretrained``.

    Raises:
        ModelError: If it cannot be loaded, or has no tokens besides special ones.
    """
    check_on_hub(setting, name)
    try:
        with from_hub(setting, name):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **settings)
    except (ImportError, ModelError):
        raise
    except Exception as error:  # the tokenizers' own errors are of the class Exception
        says = said_by(error) if not is_folder(name) or _has_vocabulary(Path(name)) else _WITHOUT
        msg = f"`{setting}` must have a tokenizer that can be loaded, got {name!r}: {says}"
        raise ModelError(msg) from error
    # Without these files, transformers makes some tokenizers of special tokens alone, or with the
    # mark of a space, which drop all that a text says.
    if len(tokenizer) <= len({*tokenizer.all_special_tokens}) + 1:
        msg = f"`{setting}` must have a tokenizer with a vocabulary, got {name!r}: {_WITHOUT}"
        raise ModelError(msg)
    return tokenizer


_VOCABULARIES = ("tokenizer.*json", "vocab*", "*.model", "*.spm", "*tiktoken*", "tekken.json")
_WITHOUT = (
    "it has no tokenizer.json, nor another file with the tokens; copy the files of the tokenizer "
    "from the model that it was made of, or set model.tokenizer to that model"
)


def _has_vocabulary(folder: Path) -> bool:
    return any(True for pattern in _VOCABULARIES for _ in folder.glob(pattern))


def said_by(error: Exception) -> str:
    """Return the class of an error and what it says, at most 300 characters of whole words."""
    text = textwrap.shorten(" ".join(str(error).split()), 300, placeholder=" ...")
    return f"{type(error).__name__}: {text}"


def check_on_hub(setting: str, name: str) -> None:
    """Check that the hub has a model or a tokenizer, unless it is a folder.

    Args:
        setting: Key that holds the name.
        name: Folder, or name on the hub.

    Raises:
        ModelError: If it has not, or does not answer.
    """
    if not is_folder(name) and (why := why_not_on_hub(name)) is not None:
        msg = f"`{setting}` must name what can be loaded; {not_a_folder(name)}, and {why}"
        raise ModelError(msg)


@contextlib.contextmanager
def from_hub(setting: str, name: str) -> Iterator[None]:
    """Convert an error of loading from the hub to a `ModelError` that names the key.

    Args:
        setting: Key that holds the name.
        name: Folder, or name on the hub.
    """
    try:
        yield
    except OSError as error:
        if is_folder(name):
            raise
        said = " ".join(str(error).split())
        msg = f"`{setting}` must name what can be loaded; {not_a_folder(name)}; on the hub: {said}"
        raise ModelError(msg) from error
