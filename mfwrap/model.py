"""The public names of MindSpore's training loop: `Model` and its callbacks."""

from mfwrap.mindspore.callback import Callback, CallbackParameters, RunContext, as_trainer_callback
from mfwrap.mindspore.model import Model
from mfwrap.outputs import named_output

__all__ = [
    "Callback",
    "CallbackParameters",
    "Model",
    "RunContext",
    "as_trainer_callback",
    "named_output",
]
