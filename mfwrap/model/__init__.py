"""MindSpore's training loop: `Model`, its callbacks and metrics."""

from mfwrap.model.callback import Callback, CallbackParameters, RunContext, as_trainer_callback
from mfwrap.model.model import Model
from mfwrap.outputs import named_output

__all__ = [
    "Callback",
    "CallbackParameters",
    "Model",
    "RunContext",
    "as_trainer_callback",
    "named_output",
]
