"""Schedules of ``torch.distributed.pipelining``, whose parts have no public names."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mfwrap.compatibility.foreign import ForeignName, is_installed

_SCHEDULES = "torch.distributed.pipelining.schedules"

NAMES = (
    ForeignName(_SCHEDULES, "PipelineScheduleSingle._stage"),
    ForeignName(_SCHEDULES, "PipelineScheduleMulti._stages"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._loss_fn"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._n_microbatches"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._args_chunk_spec"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._kwargs_chunk_spec"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._internal_losses"),
)


GLOO_RELEASE = "2.10"
"""First release of torch whose stages can send to each other over gloo; 2.9 aborts all ranks."""


def can_use_gloo() -> bool:
    """Return whether the stages of a pipeline can send to each other over gloo."""
    return is_installed("torch", GLOO_RELEASE)


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of this rank."""
    return list(getattr(schedule, "_stages", None) or [schedule._stage])


def num_micro_batches(schedule: Any) -> int:
    """Return the number of micro-batches into which a schedule splits a batch."""
    number: int = schedule._n_microbatches
    return number


def loss_function(schedule: Any) -> Any:
    """Return the loss function of a schedule; ``None`` for a schedule that does not train."""
    return schedule._loss_fn


def set_loss_function(schedule: Any, function: Any) -> None:
    """Replace the loss function of a schedule."""
    schedule._loss_fn = function


def splits_by_rows(schedule: Any) -> tuple[bool, bool]:
    """Return whether positional arguments and keywords are split along their first dimension."""
    return schedule._args_chunk_spec is None, schedule._kwargs_chunk_spec is None


def run(schedule: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Run forward and backward of all micro-batches, and discard the outputs.

    Args:
        schedule: The schedule.
        arguments: Positional arguments of the first stage.
        keywords: ``target`` of the loss function, and keyword arguments of all stages.
    """
    # torch before 2.10 would pass an option that it does not know on to the stages.
    has_option = "return_outputs" in inspect.signature(schedule.step).parameters
    options = {"return_outputs": False} if has_option else {}
    schedule.step(*arguments, **keywords, **options)


def forget_losses(schedule: Any) -> None:
    """Remove the losses of a failed step; torch finds losses by their position."""
    schedule._internal_losses.clear()
