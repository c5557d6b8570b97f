"""Keep the global batch and the schedules of an attached loop that resumes on other ranks."""

import functools
import json
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LambdaLR

from mfwrap.accelerate.attachment import Attachment
from mfwrap.accelerate.schedules import AttachedScheduler, Continued
from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.file_formats import DamagedFileError, json_content
from mfwrap.checkpoints.global_batch import GlobalBatch, positive, resumed_accumulation
from mfwrap.checkpoints.whole import whole_file
from mfwrap.compatibility.accelerate import data_loaders_of, schedulers_of
from mfwrap.compatibility.torch import schedules_inside

_LOG = logging.getLogger(__name__)

_RECORD = "mfwrap_loop.json"
_FORMAT_VERSION = 1
_AHEAD = (0, *sorted({math.floor(1.1**power) for power in range(150)}))
"""Numbers of updates, from 0 to about a million, after which two schedules are compared."""


_Factors = list[list[float | None]]


class _Saved(NamedTuple):
    """A schedule in the record of a checkpoint."""

    steps_per_update: int

    positions: list[int]
    """Position of each of the schedule's functions, such as those of a LambdaLR."""

    factors: _Factors
    """For each function, its values after the numbers of updates in `_AHEAD`."""

    keywords: list[dict[str, Any]] | None
    """Keywords of the functions; ``None`` unless all of them are partial."""


class _Record(NamedTuple):
    """Record of a checkpoint."""

    num_processes: int
    is_sharded: bool

    accumulates: bool
    """Whether the loop used ``accelerator.accumulate``."""

    global_batch: GlobalBatch
    schedules: list[_Saved]


class _Change(NamedTuple):
    """What a resume changes in the loop."""

    accumulation_steps: int

    begins_update: bool
    """Whether the next micro-batch is the first one of an update."""

    accumulates: bool
    """As in the record."""

    schedules: list[Continued]


@final
class LoopBatch:
    """Keep the global batch of a loop that resumes on another number of ranks.

    accelerate deals the batches of one global order to the ranks in turn. So with the same number
    of micro-batches per update on all ranks together, the rows of each update are the same on any
    number of ranks.

    accelerate steps a prepared schedule once per update for each process. So that the learning rate
    does not depend on the number of ranks, a resumed loop steps its schedules as often per update
    as the loop that wrote the checkpoint. If the loop has made its schedules longer or shorter for
    the new number of processes, their positions are converted instead. If only a part of their
    lengths depends on it, the schedules of transformers continue with the saved lengths.

    Without ``accelerator.accumulate``, only the loop knows which micro-batches an update has. The
    accumulation steps of such a loop stay as they are.

    Args:
        attached: Step of the loop.
        accelerator: Accelerator of the loop.
    """

    def __init__(self, attached: Attachment, accelerator: Accelerator) -> None:
        self._attached = attached
        self._accelerator = accelerator
        self._accumulated = True  # in the checkpoint that was loaded last
        self._configured_steps = self._own_steps = accelerator.gradient_accumulation_steps
        self._change: _Change | None = None

    @property
    def _is_sharded(self) -> bool:
        return bool(self._accelerator.distributed_type == DistributedType.FSDP)

    @property
    def _accumulates(self) -> bool:
        has_trained = self._attached.last_report is not None
        return self._attached.numbers_micro_batches or (self._accumulated and not has_trained)

    def _now(self) -> GlobalBatch:
        accelerator = self._accelerator
        steps = accelerator.gradient_accumulation_steps
        if steps != self._own_steps:  # the loop has set it
            self._configured_steps = self._own_steps = steps
        parallelism = accelerator.parallelism_config
        num_ranks = accelerator.num_processes
        if parallelism is not None:
            num_ranks //= parallelism.non_data_parallel_size
        if accelerator.split_batches:
            num_ranks = 1
        return GlobalBatch(num_ranks, 1, steps, self._configured_steps)

    def save(self, folder: Path) -> None:
        """Write the global batch and the positions of the schedules into a checkpoint."""
        content = {
            "format_version": _FORMAT_VERSION,
            "num_processes": self._accelerator.num_processes,
            "is_sharded": self._is_sharded,
            "accumulates": self._accumulates,
            "global_batch": self._now().state_dict(),
            "schedules": [self._state_of(each)._asdict() for each in self._schedules()],
        }
        with whole_file(folder / _RECORD) as partial:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Determine what `apply` has to change after a checkpoint is loaded.

        A checkpoint without a record, of a loop without mfwrap for example, changes nothing. If the
        loop that wrote the checkpoint did not use ``accelerator.accumulate``, another number of
        ranks gives a warning: its global batch changes.

        Raises:
            ValueError: If the record is damaged, only one of both runs uses the FSDP plugin, the
                number of ranks does not divide the global batch, the local norms do not allow the
                accumulation steps that keep it, or a schedule or a data loader cannot continue on
                another number of ranks.
        """
        self._change = None
        path = folder / _RECORD
        if not path.exists():
            return
        saved = _read(path)
        if saved.is_sharded != self._is_sharded:
            with_or_without = ("without", "with")
            msg = (
                f"cannot resume from {folder}, which was written "
                f"{with_or_without[saved.is_sharded]} accelerate's FSDP plugin, "
                f"{with_or_without[self._is_sharded]} it: their files differ; use the same "
                "`fsdp_plugin` as before, which also works with one process"
            )
            raise ValueError(msg)
        steps = self._resumed_steps(saved, folder)
        self._attached.config.check_micro_batches(steps)
        if saved.num_processes != self._accelerator.num_processes:
            self._refuse_stateful_loaders(folder)
        continued = [
            self._continued(own, state, folder)
            for own, state in zip(self._schedules(), saved.schedules, strict=False)
        ]
        begins_update = steps != saved.global_batch.accumulation_steps
        self._change = _Change(steps, begins_update, saved.accumulates, continued)

    def _resumed_steps(self, saved: _Record, folder: Path) -> int:
        """Return the accumulation steps after a resume; raise or warn as `check` says."""
        former, now = saved.global_batch, self._now()
        if saved.accumulates:
            return resumed_accumulation(former, now, folder, "micro-batches")
        if former.num_ranks != now.num_ranks:
            warnings.warn(
                f"the global batch changes, because {folder} was written with {former.num_ranks} "
                f"rank(s), this run has {now.num_ranks}, and without `accelerator.accumulate` only "
                "the loop knows the micro-batches of an update; to keep the global batch, start as "
                "many ranks as before",
                stacklevel=callers_stacklevel(),
            )
        return now.accumulation_steps

    def apply(self) -> None:
        """Change the accelerator and its schedules after a checkpoint is loaded."""
        change, self._change = self._change, None
        if change is None:
            return
        accelerator = self._accelerator
        if accelerator.gradient_accumulation_steps != change.accumulation_steps:
            self._own_steps = change.accumulation_steps
            accelerator.gradient_accumulation_steps = change.accumulation_steps
        if change.begins_update:
            # accelerate numbers the micro-batches of an epoch, and updates at each multiple of the
            # accumulation steps. The saved number is a multiple of the former steps.
            accelerator.step = 0
        self._accumulated = change.accumulates
        for schedule, continued in zip(self._schedules(), change.schedules, strict=False):
            schedule.resume(continued)

    def _schedules(self) -> list[AttachedScheduler]:
        schedulers = schedulers_of(self._accelerator)
        return [
            each
            for each in schedulers
            if isinstance(each, AttachedScheduler) and each.step_with_optimizer
        ]

    def _state_of(self, schedule: AttachedScheduler) -> _Saved:
        each_update = self._steps_per_update(schedule)
        positions = [position for _, position in _functions(schedule.scheduler)]
        return _Saved(
            each_update,
            positions,
            _factors(schedule.scheduler, positions, each_update),
            _keywords(schedule.scheduler),
        )

    def _steps_per_update(self, schedule: AttachedScheduler) -> int:
        own = 1 if schedule.split_batches else self._accelerator.num_processes
        return schedule.steps_per_update or own

    def _continued(self, schedule: AttachedScheduler, saved: _Saved, folder: Path) -> Continued:
        """Return how a schedule continues.

        Args:
            schedule: The loop's schedule.
            saved: Its state in the record.
            folder: Folder of the checkpoint.

        Raises:
            ValueError: If its learning rates would differ from those of the saved schedule.
        """
        own = 1 if schedule.split_batches else self._accelerator.num_processes
        former, positions, factors, keywords = saved
        if former == own:
            return Continued()
        # A schedule loads all its numbers, such as its length, from the checkpoint. Only a function
        # may be another one than in the checkpoint.
        if _agree(factors, _factors(schedule.scheduler, positions, former)):
            return Continued(former)
        has_position = isinstance(schedule.scheduler, LambdaLR)  # that determines its rates
        if not has_position:
            msg = (
                f"cannot resume from {folder} on {self._accelerator.num_processes} process(es): "
                f"functions of the loop's {type(schedule.scheduler).__name__} have other values "
                "than in the checkpoint; use the same functions as before, whatever the number of "
                "processes"
            )
            raise ValueError(msg)
        position = positions[0] if positions else 0
        converted = position * own // former
        if _agree(factors, _factors(schedule.scheduler, [converted] * len(positions), own)):
            return Continued(None, converted)
        present = _keywords(schedule.scheduler)
        if (
            keywords
            and present
            and [each.keys() for each in present] == [*map(dict.keys, keywords)]
        ):
            if self._accelerator.is_main_process:
                _LOG.warning("the schedule continues with %s instead of %s", keywords, present)
            return Continued(former, None, keywords)
        msg = (
            f"cannot resume from {folder} on {self._accelerator.num_processes} process(es): "
            "the loop's schedule has other learning rates than the checkpoint, both at position "
            f"{position} with {former} steps per update and at position {converted} with {own}; "
            "make the schedule as long as before, or multiply its lengths by "
            "`accelerator.num_processes`"
        )
        raise ValueError(msg)

    def _refuse_stateful_loaders(self, folder: Path) -> None:
        loaders = data_loaders_of(self._accelerator)
        if any(getattr(each, "use_stateful_dataloader", False) for each in loaders):
            num_processes = self._accelerator.num_processes
            msg = (
                f"cannot resume from {folder} on {num_processes} process(es) with "
                "`use_stateful_dataloader`: a stateful data loader saves the position of one rank; "
                "turn it off and call `accelerator.skip_first_batches`"
            )
            raise ValueError(msg)


def _read(path: Path) -> _Record:
    """Return the record in a file.

    Raises:
        ValueError: If the file is damaged or has another format version.
    """
    try:
        content = json_content(path)
        version = content["format_version"]
        if version == _FORMAT_VERSION:
            return _parsed(content)
    except DamagedFileError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"{path} is damaged: {error}"
        raise ValueError(msg) from error
    msg = f"{path}: expected format_version {_FORMAT_VERSION}, got {version!r}"
    raise ValueError(msg)


def _parsed(content: dict[str, Any]) -> _Record:
    schedules = [_Saved(**each) for each in content["schedules"]]
    for each in schedules:
        positive(each.steps_per_update)
    return _Record(
        positive(content["num_processes"]),
        bool(content["is_sharded"]),
        bool(content["accumulates"]),
        GlobalBatch.restored(content["global_batch"]),
        schedules,
    )


def _keywords(schedule: Any) -> list[dict[str, Any]] | None:
    """Return the keywords of a LambdaLR's functions; ``None`` unless all of them are partial.

    The schedules of transformers are such functions, with their lengths as keywords.
    """
    functions = getattr(schedule, "lr_lambdas", [])
    if not all(isinstance(each, functools.partial) for each in functions):
        return None
    plain = (int, float, str, type(None))
    keywords = [dict(each.keywords) for each in functions]
    is_plain = all(isinstance(value, plain) for each in keywords for value in each.values())
    return keywords if is_plain else None


def _functions(schedule: Any) -> list[tuple[Callable[[int], Any], int]]:
    """Return the functions of a schedule, and of the schedules it consists of, with positions.

    torch does not save functions: neither those of a LambdaLR or MultiplicativeLR, nor those of
    such a schedule within a SequentialLR or ChainedScheduler.
    """
    own = [
        # A schedule within a SequentialLR that has not begun has position -1, and begins at 0.
        (function, max(schedule.last_epoch, 0))
        for function in getattr(schedule, "lr_lambdas", ())
    ]
    return own + [pair for part in schedules_inside(schedule) for pair in _functions(part)]


def _factors(schedule: Any, positions: Sequence[int], each_update: int) -> _Factors:
    """Return the values of a schedule's functions now and after later updates.

    Args:
        schedule: The schedule.
        positions: Position of each function.
        each_update: Number of the schedule's steps per update.

    Returns:
        For each function, its values after the numbers of updates in `_AHEAD`. A value is ``None``
        where the function fails.
    """
    return [
        [_factor(function, position + ahead * each_update) for ahead in _AHEAD]
        for (function, _), position in zip(_functions(schedule), positions, strict=False)
    ]


def _factor(function: Callable[[int], Any], position: int) -> float | None:
    try:
        return float(function(position))
    except Exception:  # noqa: BLE001  (a user's function, which may end before the last position)
        return None


def _agree(saved: _Factors, own: _Factors) -> bool:
    return len(saved) == len(own) and all(
        a is b or (a is not None and b is not None and math.isclose(a, b, abs_tol=1e-9))
        for saved_group, own_group in zip(saved, own, strict=False)
        for a, b in zip(saved_group, own_group, strict=False)
    )
