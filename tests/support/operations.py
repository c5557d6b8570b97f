"""Count the operations that torch does on tensors."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Operations"]


class Operations(TorchDispatchMode):
    """Count the operations within the block that compute or copy, and the bytes that they touch."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """Number of operations; views do not count."""

        self.num_bytes = 0
        """Bytes of all tensors that these operations read or write."""

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_leaves((args, result)) if isinstance(each, Tensor)]
            self.number += 1
            self.num_bytes += sum(each.nbytes for each in tensors)
        return result
