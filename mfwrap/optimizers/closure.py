"""The closure that an optimizer's ``step`` takes."""

from collections.abc import Callable
from typing import Any

import torch


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a closure, which may compute gradients; ``None`` without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
