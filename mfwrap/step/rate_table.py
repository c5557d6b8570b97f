"""Keep the learning rates of the coming updates on the device.

A captured step cannot ask the host for its learning rate: a schedule advances for applied updates
only, and the host learns one update later whether an update was applied. So the rates of the coming
updates are computed ahead, by a copy of the schedule. The device takes those that belong to the
number of updates applied so far. The schedule itself still advances on the host, one update later.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.step.rates import bad_rate
from mfwrap.step.schedules import Schedule

LENGTH = 256
"""Number of updates whose rates a table holds."""


def coming_rates(schedule: Any, optimizer: Optimizer, number: int) -> list[list[float]]:
    """Return the rates of the next applied updates, without advancing the schedule.

    Args:
        schedule: Schedule of `optimizer`, alone or in accelerate's wrapper.
        optimizer: Optimizer without accelerate's wrapper.
        number: Number of updates.

    Returns:
        The rates of all parameter groups for each update; of fewer updates, at least one, if the
        schedule then raises an error, as torch's ``OneCycleLR`` does at its end.

    Raises:
        TypeError: If the schedule cannot be copied.
        ValueError: If the schedule changes more than learning rates.
    """
    inner = getattr(schedule, "scheduler", schedule)
    ahead, groups = _copied(inner, optimizer)
    before = [fixed_settings(group) for group in groups]
    rates = [[float(group["lr"]) for group in groups]]
    with warnings.catch_warnings():
        # torch warns of a schedule that advances although its optimizer has not updated.
        warnings.simplefilter("ignore")
        for _ in range(number - 1):
            try:
                ahead.step()
            except Exception:  # noqa: BLE001  (the schedule itself raises it, if it gets so far)
                break
            rates.append([float(group["lr"]) for group in groups])
    after = [fixed_settings(group) for group in groups]
    changed = {n for a, b in zip(before, after, strict=True) for n in b if a.get(n) != b[n]}
    if changed:
        msg = (
            "`lr_scheduler` must change learning rates alone with capture=True, got "
            f"{type(inner).__name__}, which changes {', '.join(sorted(changed))}, too"
        )
        raise ValueError(msg)
    return rates


def _copied(schedule: Any, optimizer: Optimizer) -> tuple[Any, list[dict[str, Any]]]:
    """Return a copy of a schedule, and the groups whose rates the copy sets."""
    groups = [
        {**group, "params": [nn.Parameter(torch.zeros((), device="cpu"))]}
        for group in optimizer.param_groups
    ]
    stand_in = Optimizer(groups, {})
    try:
        return copy.deepcopy(schedule, {id(optimizer): stand_in}), stand_in.param_groups
    except Exception as error:
        msg = (
            "`lr_scheduler` must be copyable with capture=True, because its rates are computed "
            f"ahead, got {type(schedule).__name__}: {error}"
        )
        raise TypeError(msg) from error


def fixed_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group without its parameters and its rate.

    A tensor stands as its identity, so that the settings can be compared without a read.
    """
    return {
        name: id(value) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in {"params", "lr"}
    }


@final
class RateTable:
    """Rates of the coming updates, from which the device takes those of the present one.

    Rates that are tensors on the device already stay as they are: the caller changes them in place.

    Args:
        optimizer: Optimizer without accelerate's wrapper.
        schedule: Schedule that sets the rates; ``None`` for rates that only the caller changes.
        device: Training device.

    Raises:
        TypeError: If the schedule cannot be copied.
        ValueError: If the schedule changes more than learning rates, or rates are tensors although
            there is a schedule or on another device.
    """

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule | None, device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._device = device
        self._check_tensors()
        self._length = 1 if schedule is None else LENGTH
        shape = (self._length, len(optimizer.param_groups))
        self._rows: list[list[float]] = []
        self._table = torch.zeros(shape, dtype=torch.float32, device=device)
        # Number of applied updates to which the first row belongs.
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        # Row of the update after those that the host knows to be applied.
        self._known = 0
        # The memory of a copy to the device must live until the copy is done.
        self._sent: Tensor | None = None
        if schedule is not None:
            coming_rates(schedule, optimizer, 2)  # refuse at once

    def _check_tensors(self) -> None:
        rates = [g["lr"] for g in self._optimizer.param_groups if isinstance(g["lr"], Tensor)]
        if rates and self._schedule is not None:
            msg = (
                "the learning rates must be numbers with capture=True and `lr_scheduler`, because "
                "the cell keeps them on the device itself, got tensors"
            )
            raise ValueError(msg)
        elsewhere = [rate.device for rate in rates if rate.device != self._device]
        if elsewhere:
            msg = (
                f"the learning rates must be numbers or tensors on {self._device} with "
                f"capture=True, got a tensor on {elsewhere[0]}"
            )
            raise ValueError(msg)

    def step(self) -> None:
        """Advance the schedule on the host, for an update that has turned out to be applied."""
        if self._schedule is not None:
            self._schedule.step()
            self._known += 1

    @property
    def is_outdated(self) -> bool:
        """Whether the rates of the groups are not those of the table, because somebody set them."""
        return self._known >= len(self._rows) or self._rows[self._known] != self._numbers()

    @property
    def may_end(self) -> bool:
        """Whether the schedule may raise an error for the next update, which the table lacks."""
        return self._schedule is not None and self._known + 2 > len(self._rows)

    def forget(self) -> None:
        """Make the table outdated, because the number of applied updates has been set."""
        self._rows = []

    def restart(self, applied_updates: Tensor) -> None:
        """Fill the table from the present rates of the groups.

        Args:
            applied_updates: Number of updates applied so far, shape ``()``, int64. The host must
                know the results of all of them.

        Raises:
            ValueError: If a rate is a non-finite number.
        """
        fault = bad_rate(self._optimizer)
        if fault is not None:
            raise ValueError(fault)
        self._first.copy_(applied_updates)
        self._known = 0
        self._fill()

    def prolong(self) -> None:
        """Fill the table anew if the rates of the next two updates are not in it any more."""
        if self.may_end and len(self._rows) == self._length:
            self._first.add_(self._known)
            self._known = 0
            self._fill()

    def _fill(self) -> None:
        if self._schedule is None:
            self._rows = [self._numbers()]
        else:
            self._rows = coming_rates(self._schedule, self._optimizer, self._length)
        padded = self._rows + self._rows[-1:] * (self._length - len(self._rows))
        rows = torch.tensor(padded, dtype=torch.float32, device="cpu")
        self._sent = rows if self._device.type == "cpu" else rows.pin_memory()
        self._table.copy_(self._sent, non_blocking=True)

    def _numbers(self) -> list[float]:
        # The caller changes a rate that is a tensor in place, so the table needs no number of it.
        groups = self._optimizer.param_groups
        return [0.0 if isinstance(g["lr"], Tensor) else float(g["lr"]) for g in groups]

    @contextlib.contextmanager
    def in_groups(self, applied_updates: Tensor) -> Iterator[None]:
        """Within the block, the rates of the groups are tensors on the device.

        Args:
            applied_updates: Number of updates applied before this one, shape ``()``, int64.
        """
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        row = (applied_updates - self._first).clamp(min=0, max=self._length - 1)
        present = self._table.index_select(0, row.reshape(1)).squeeze(0).unbind()
        try:
            for group, number, rate in zip(groups, numbers, present, strict=True):
                group["lr"] = number if isinstance(number, Tensor) else rate
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number
