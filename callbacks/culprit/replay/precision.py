"""Tell in which precision a network computes, by a look at its operations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.replay import attempted


def computes_in_float16(recorder: StepRecorder) -> bool:
    """Run the first call of the last step again, and tell whether an operation gives float16.

    The network itself may begin an autocast, so neither its weights nor its callers tell.

    Args:
        recorder: Recorder that holds the step.

    Returns:
        False if nothing was recorded, or if the call raises an error.
    """

    def has_seen() -> bool:
        watch = _Float16()
        with torch.no_grad(), watch:
            for call in recorder.last_step[:1]:
                call.run(recorder)
        return watch.has_seen

    return attempted(recorder, has_seen, default=False)


@final
class _Float16(TorchFunctionMode):
    """Notice float16 results of the functions of torch that are called in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.has_seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.has_seen |= isinstance(result, Tensor) and result.dtype == torch.float16
        return result
