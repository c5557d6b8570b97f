"""Networks and optimizers that need more memory than any machine has, when they are told to."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TOO_MUCH", "Filling", "FillingSGD"]

TOO_MUCH = 2**50
"""Bytes that the allocator of a CPU refuses: more than an address space has."""


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        del ctx
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del ctx
        torch.empty(TOO_MUCH, dtype=torch.uint8, device=gradients[0].device)
        return gradients


class Filling(nn.Module):
    """Return a loss; fill the memory in one of the calls.

    Args:
        call: Number of the call in training, from 1; 0 for none.
        where: ``"forward"`` or ``"backward"``.
        most_rows: Rows from which on every call fills the memory.
    """

    def __init__(self, call: int = 0, where: str = "forward", most_rows: int = 1000) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.call, self.where, self.most_rows = call, where, most_rows
        self.num_calls = 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.num_calls += self.training
        values = self.inner(x)
        if self.num_calls == self.call or len(x) > self.most_rows:
            if self.where == "forward":
                torch.empty(TOO_MUCH, dtype=torch.uint8, device=x.device)
            values = _InBackward.apply(values)
        return (values - (0.0 if y is None else y)).square().mean()


class FillingSGD(torch.optim.SGD):
    """SGD that fills the memory in one of its steps."""

    def __init__(self, parameters: Any, fills_at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.left = fills_at

    def step(self, closure: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return super().step(closure)
