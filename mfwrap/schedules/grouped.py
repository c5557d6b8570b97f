"""`GroupedLR`: a schedule of its own for each parameter group."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mfwrap.arguments import described
from mfwrap.schedules.formula import FormulaLR


@final
class GroupedLR(LRScheduler):
    """Give each parameter group a schedule of its own.

    The first update uses the rates of step 0. The state dict holds only numbers.

    Source: MindFormers, ``grouped_lr_schedule``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        schedules: For each parameter group, in order, a function that takes an optimizer and
            returns a schedule of mfwrap, such as
            ``functools.partial(CosineWithWarmUpLR, total_steps=100, warmup_steps=10)``. It is
            called once, with an optimizer that has only the group's learning rate.
        last_epoch: Last step of an earlier run to continue from; -1 starts at step 0.

    Raises:
        TypeError: If a function returns anything else than a schedule of mfwrap.
        ValueError: If the number of functions is not that of the parameter groups.

    Example:
        >>> import functools
        >>> from mfwrap.schedules import ConstantWarmUpLR, LinearWithWarmUpLR
        >>> network = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.AdamW(
        ...     [
        ...         {"name": "body", "params": network[1].parameters(), "lr": 1e-3},
        ...         {"name": "embeddings", "params": network[0].parameters(), "lr": 2e-4},
        ...     ]
        ... )
        >>> body = functools.partial(LinearWithWarmUpLR, total_steps=10, warmup_steps=0)
        >>> embeddings = functools.partial(ConstantWarmUpLR, warmup_steps=4)
        >>> GroupedLR(optimizer, [body, embeddings]).get_last_lr()
        [0.001, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedules: Sequence[Callable[[Optimizer], FormulaLR]],
        last_epoch: int = -1,
    ) -> None:
        groups = optimizer.param_groups
        if len(schedules) != len(groups):
            msg = (
                f"`schedules` must have a function for each of the {len(groups)} parameter groups, "
                f"got {len(schedules)}"
            )
            raise ValueError(msg)
        self._formulas = tuple(map(_formula, schedules, groups))
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the rate of each parameter group at the current step."""
        return [
            formula.rate(learning_rate, self.last_epoch)
            for formula, learning_rate in zip(self._formulas, self.base_lrs, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the rates; the schedules of the groups are not part of it."""
        return {name: value for name, value in super().state_dict().items() if name != "_formulas"}


def _formula(make: Callable[[Optimizer], FormulaLR], group: dict[str, Any]) -> FormulaLR:
    # A schedule sets the rates of all groups of its optimizer, so each gets an optimizer of its own
    # and only computes rates.
    formula = make(SGD([torch.zeros(1)], lr=group.get("initial_lr", group["lr"])))
    if not isinstance(formula, FormulaLR):
        msg = f"`schedules` must return schedules of mfwrap, got {described(formula)}"
        raise TypeError(msg)
    return formula
