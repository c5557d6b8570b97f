"""MindSpore's loop: `Model`, its callbacks and metrics."""

from typing import TYPE_CHECKING

from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.model.callback import Callback, CallbackParameters, RunContext
    from mfwrap.model.callback_adapter import as_trainer_callback
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

__getattr__ = package_getattr(
    __name__,
    {
        "Callback": "mfwrap.model.callback",
        "CallbackParameters": "mfwrap.model.callback",
        "Model": "mfwrap.model.model",
        "RunContext": "mfwrap.model.callback",
        "as_trainer_callback": "mfwrap.model.callback_adapter",
        "named_output": "mfwrap.outputs",
    },
)
