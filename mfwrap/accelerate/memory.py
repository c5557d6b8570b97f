"""Follow the micro-batches of an accelerate loop, to explain an error of a forward.

A loop calls its models itself, so a hook of torch on each prepared model notes the shapes of what
the model gets. torch calls the hook after an error, too (``always_call``). A model that was
compiled in place has no hook, and one that ``torch.compile`` compiles later calls none after an
error.
"""

import sys
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mfwrap.compatibility.torch import compiled_call
from mfwrap.memory import shapes_of
from mfwrap.step.error_notes import explain_error
from mfwrap.tensors.module_hooks import keep_out_of_copies

Shapes = Mapping[str, tuple[int, ...]]


class ForwardObserver(Protocol):
    """Learns of each forward of a model in training."""

    def after_forward(self, shapes: Shapes, error: BaseException | None) -> None:
        """Note a forward.

        Args:
            shapes: Shapes of the tensors that the model got, by name.
            error: Error of the forward; ``None`` without one.
        """


_FOLLOWED: "WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ref[ForwardObserver]]]" = (
    WeakKeyDictionary()
)
"""Here and not in the hook, so that a model neither keeps the step alive nor pickles with it."""


def follow_forward(model: nn.Module, observer: ForwardObserver) -> None:
    """Tell `observer` of each forward of a model from now on, instead of an earlier observer."""
    if model in _FOLLOWED:
        handle, _ = _FOLLOWED[model]
    elif compiled_call(model) is None:
        handle = model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)
        keep_out_of_copies(model, handle)
    else:
        return
    _FOLLOWED[model] = handle, ref(observer)


def leave_forward(observer: ForwardObserver) -> None:
    """Tell `observer` of no forward any longer."""
    for model, (handle, known) in list(_FOLLOWED.items()):
        if known() is observer:
            handle.remove()
            del _FOLLOWED[model]


def _after_forward(model: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not model.training or model not in _FOLLOWED:
        return
    _, known = _FOLLOWED[model]
    observer = known()
    if observer is not None:
        error = sys.exception() if output is None else None
        if error is not None:
            explain_error(error, model, inputs, keywords)
        observer.after_forward(shapes_of(inputs, keywords), error)
