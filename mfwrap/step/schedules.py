"""Learning-rate schedules that a step can advance by itself."""

from typing import Any, Protocol

from torch.optim import Optimizer

from mfwrap.arguments import described, needed_arguments


class Schedule(Protocol):
    """A learning-rate schedule that is stepped once per applied update."""

    def step(self) -> None:
        """Set the rates of the next update."""


def checked_schedule(lr_scheduler: Any, optimizer: Optimizer) -> Schedule | None:
    """Return `lr_scheduler` if the step can advance it.

    Args:
        lr_scheduler: Schedule of torch, alone or in accelerate's wrapper; ``None`` for no schedule.
        optimizer: Optimizer without accelerate's wrapper.

    Raises:
        TypeError: If the schedule has no ``step``, or its ``step`` needs an argument, such as a
            metric.
        ValueError: If the schedule belongs to another optimizer.
    """
    if lr_scheduler is None:
        return None
    if not callable(getattr(lr_scheduler, "step", None)):
        msg = f"`lr_scheduler` must be a learning-rate scheduler, got {described(lr_scheduler)}"
        raise TypeError(msg)
    inner = getattr(lr_scheduler, "scheduler", lr_scheduler)
    needed = needed_arguments(inner, "step")
    if needed:
        msg = (
            f"`lr_scheduler` must advance by itself, got {type(inner).__name__}, whose step needs "
            f"{', '.join(needed)}; leave it out and step it where you evaluate"
        )
        raise TypeError(msg)
    if getattr(inner, "optimizer", optimizer) is not optimizer:
        msg = (
            "`lr_scheduler` must belong to the cell's optimizer, got a schedule of another "
            "optimizer"
        )
        raise ValueError(msg)
    schedule: Schedule = lr_scheduler
    return schedule
