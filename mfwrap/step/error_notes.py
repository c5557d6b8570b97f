"""After an error of forward or backward, say what the cause is likely to be, and what to do.

torch names neither the argument nor the limit: "index out of range in self", "Target 2 is out of
bounds". Nothing here runs before there is an error, so it may read tensors on the host.
"""

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mfwrap.tensors.embedding_tables import num_embeddings, num_positions
from mfwrap.tensors.wrappers import unwrapped_network

IGNORED = -100
"""Label that the losses of torch and of transformers' models ignore."""

_OF_DTYPES = re.compile(
    r"expected scalar type|Found dtype|can't be cast to|must have the same dtype"
)
"""Texts of torch's errors about the dtype of an argument."""

_OF_TARGETS = "is out of bounds"
_TARGET = re.compile(rf"Target (-?\d+) {_OF_TARGETS}")
"""Text of torch's error for a label that is no class."""

_LOSSES = {nn.functional.cross_entropy.__code__, nn.functional.nll_loss.__code__}
"""Losses of torch whose labels are numbers of classes."""

_OF_GRAPHS = {
    "backward through the graph a second time": (
        "the loss depends on a tensor of an earlier step, whose graph is gone; detach what is kept "
        "from step to step, for example `total += loss.detach()`"
    ),
    "modified by an inplace operation": (
        "the network changes a tensor that backward needs; replace the operation in place: write "
        "`x = x + y` for `x += y`, and `relu(x)` for `relu_(x)` or `inplace=True`"
    ),
    "Expected to have finished reduction in the prior iteration": (
        "some weights had no gradient in the step before; use them in the loss, freeze them "
        "(`requires_grad_(False)`), or let DistributedDataParallel find them: with accelerate by "
        "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]),"
        " with a Trainer by TrainingArguments(ddp_find_unused_parameters=True)"
    ),
}
"""Notes by a text of torch's error."""


def explain_error(
    error: BaseException, network: nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Add a note to an error of a forward or a backward whose cause can be told.

    The cause may be a tensor of the micro-batch that does not fit the network, a graph that was
    freed or changed, or weights without a gradient on several ranks.

    Args:
        error: Any error.
        network: Network that was called, also wrapped.
        arguments: Positional arguments of the call.
        keywords: Keyword arguments of the call.
    """
    graph = next((note for text, note in _OF_GRAPHS.items() if text in str(error)), None)
    if graph is not None:
        error.add_note(graph)
        return
    try:
        batch = _named(arguments, keywords)
        fault = _target_fault(error, batch) or batch_fault(network, batch, str(error))
    except Exception:  # noqa: BLE001  (a device repeats its error, and a network may raise any)
        return
    if fault is not None:
        error.add_note(fault)


def explain_targets(error: BaseException, network: nn.Module, batch: Mapping[str, Any]) -> None:
    """Add a note to an error of a loss that is computed behind the network, if labels do not fit.

    Args:
        error: Any error; one that the forward has explained stays as it is.
        network: Network whose outputs the loss takes, also wrapped.
        batch: The micro-batch, on any device.
    """
    inner = unwrapped_network(network)
    is_explained = hasattr(error, "__notes__") or _OF_TARGETS not in str(error)
    if is_explained or not isinstance(inner, nn.Module):
        return
    fault = _target_fault(error, _named((), batch)) or _label_fault(inner, _named((), batch))
    if fault is not None:
        error.add_note(fault)


def batch_fault(network: nn.Module, batch: Mapping[str, Tensor], error: str) -> str | None:
    """Return what in a micro-batch does not fit a network; ``None`` if nothing is found.

    Args:
        network: Network that was called, also wrapped.
        batch: Tensors of the micro-batch by name.
        error: Text of the error.
    """
    inner = unwrapped_network(network)
    if not isinstance(inner, nn.Module):  # the stages of a pipeline
        return None
    checks: tuple[Callable[[nn.Module, Mapping[str, Tensor]], str | None], ...] = (
        _device_fault,
        _input_fault,
        _token_fault,
        _label_fault,
        _length_fault,
    )
    found = next(filter(None, (check(inner, batch) for check in checks)), None)
    return found if found is not None else _dtype_fault(inner, batch, error)


def _named(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    values = {f"inputs[{index}]": value for index, value in enumerate(arguments)} | dict(keywords)
    return dict(found for name, value in values.items() for found in _tensors(name, value))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(str(key), inner)


def _device_fault(network: nn.Module, batch: Mapping[str, Tensor]) -> str | None:
    devices = {parameter.device for parameter in network.parameters()}
    for name, tensor in batch.items():
        if devices and tensor.dim() > 0 and tensor.device not in devices:
            own = " and ".join(sorted(map(str, devices)))
            return (
                f"`{name}` is on {tensor.device}, and the weights are on {own}; move the batch to "
                "the device of the weights before the step"
            )
    return None


def _input_fault(network: nn.Module, batch: Mapping[str, Tensor]) -> str | None:
    """Say that a model of transformers did not get its main input."""
    main = getattr(network, "main_input_name", None)
    is_given = main in batch or any(name.startswith("inputs") for name in batch)
    if main is None or is_given:
        return None
    return (
        f"the batch has no `{main}`, only {sorted(batch)}; pass the tokenized rows (a Trainer "
        "leaves out columns that are no arguments of the model, such as texts)"
    )


def _token_fault(network: nn.Module, batch: Mapping[str, Tensor]) -> str | None:
    tokens, size = batch.get("input_ids"), num_embeddings(network)
    if tokens is None or size is None or tokens.numel() == 0 or int(tokens.max()) < size:
        return None
    return (
        f"the largest token in `input_ids` is {int(tokens.max())}, and the model has embeddings "
        f"for tokens below {size}; use the tokenizer of this model, or call "
        "`model.resize_token_embeddings(len(tokenizer))` after you have added tokens"
    )


def _target_fault(error: BaseException, batch: Mapping[str, Tensor]) -> str | None:
    """Say which label is no class, from the call of torch's loss that has raised the error."""
    found = _TARGET.search(str(error))
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    given = next((frame.f_locals for frame in frames if frame.f_code in _LOSSES), None)
    if found is None or given is None:
        return None
    target, outputs = given["target"], given["input"]
    # A module may make its targets from the labels. Those of tokens are flat, without rows.
    is_of_rows = target.shape[:1] in {tensor.shape[:1] for tensor in batch.values()}
    labels = target if is_of_rows and target.dim() > 0 else batch.get("labels")
    if labels is None or labels.dim() == 0 or int(found[1]) not in labels:
        return None
    number = outputs.shape[min(1, outputs.dim() - 1)]
    return _class_fault(labels, number, given["ignore_index"])


def _label_fault(network: nn.Module, batch: Mapping[str, Tensor]) -> str | None:
    """Say that labels are no classes of a classifier of transformers."""
    config: Any = getattr(network, "config", None)
    labels, number = batch.get("labels"), getattr(config, "num_labels", None)
    is_of_rows = labels is not None and labels.dim() == 1
    is_of_tokens = "TokenClassification" in type(network).__name__
    if labels is None or number is None or number < 2 or not (is_of_rows or is_of_tokens):
        return None
    if labels.is_floating_point():
        return (
            f"`labels` are {labels.dtype}, and the model has {number} classes, whose numbers must "
            "be integers; to predict a number, build the model with num_labels=1"
        )
    return _class_fault(labels, number)


def _class_fault(labels: Tensor, number: int, ignored: int = IGNORED) -> str | None:
    """Say which row has a label that is none of a number of classes."""
    targets = labels[labels != ignored]
    if targets.numel() == 0:
        return None
    low, high = int(targets.min()), int(targets.max())
    row = int((labels == (low if low < 0 else high)).nonzero()[0, 0])
    if low < 0:
        return (
            f"labels begin at 0 ({ignored} is ignored), but row {row} of the batch has the label "
            f"{low}; number the classes from 0"
        )
    if high < number:
        return None
    return (
        f"row {row} of the batch has the label {high}, and the model has {number} classes, 0 to "
        f"{number - 1}; build the model with num_labels={high + 1} or more (the largest label of "
        "all rows plus 1), or number the classes from 0"
    )


def _length_fault(network: nn.Module, batch: Mapping[str, Tensor]) -> str | None:
    tokens, limit = batch.get("input_ids"), num_positions(network)
    if tokens is None or limit is None or tokens.dim() == 0 or tokens.shape[-1] <= limit:
        return None
    return (
        f"rows of `input_ids` have {tokens.shape[-1]} tokens, and the model has {limit} positions; "
        "shorten the rows when you tokenize them (truncation=True, max_length=...)"
    )


def _dtype_fault(network: nn.Module, batch: Mapping[str, Tensor], error: str) -> str | None:
    if _OF_DTYPES.search(error) is None:
        return None
    dtypes = {parameter.dtype for parameter in network.parameters()}
    for name, tensor in batch.items():
        if tensor.dtype is torch.float64 and torch.float64 not in dtypes:
            own = " and ".join(sorted(map(str, dtypes)))
            return (
                f"`{name}` is torch.float64, as NumPy's arrays are, and the weights are {own}; "
                "convert it, for example with `.float()`"
            )
    given = ", ".join(f"`{name}` {tensor.dtype}" for name, tensor in batch.items())
    return (
        f"the batch has {given}; convert the targets to the dtype that the loss takes: class "
        "numbers to int64, other targets to the dtype of the outputs"
    )
