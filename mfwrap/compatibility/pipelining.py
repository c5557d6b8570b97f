"""Schedules of ``torch.distributed.pipelining``, whose parts have no public names."""

from typing import Any

from mfwrap.compatibility.foreign import ForeignName

_SCHEDULES = "torch.distributed.pipelining.schedules"

NAMES = (
    ForeignName(_SCHEDULES, "PipelineScheduleSingle._stage", "stage of this rank"),
    ForeignName(_SCHEDULES, "PipelineScheduleMulti._stages", "stages of this rank"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._loss_fn", "replaced: scale the loss"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._n_microbatches", "number of micro-batches"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._args_chunk_spec", "how inputs are split"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._kwargs_chunk_spec", "how keywords are split"),
    ForeignName(_SCHEDULES, "_PipelineSchedule._internal_losses", "losses of a failed step"),
)


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


def forget_losses(schedule: Any) -> None:
    """Remove the losses of a failed step; torch finds losses by their position."""
    schedule._internal_losses.clear()
