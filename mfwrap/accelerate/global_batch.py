"""Keep the global batch and the schedules of an attached loop that resumes on other ranks."""

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import LambdaLR

from mfwrap.accelerate.schedules import AttachedScheduler
from mfwrap.checkpoints.folders import whole_file
from mfwrap.checkpoints.global_batch import GlobalBatch, resumed_accumulation

_LOG = logging.getLogger(__name__)

_RECORD = "mfwrap_loop.json"
_FORMAT_VERSION = 1
_AHEAD = (0, *sorted({math.floor(1.1**power) for power in range(150)}))
"""Numbers of updates, from 0 to about a million, after which two schedules are compared."""


class _Continued(NamedTuple):
    """How a schedule continues after a resume."""

    steps_per_update: int | None = None
    """As `AttachedScheduler.steps_per_update`."""

    position: int | None = None
    """Position to continue from; ``None`` for that of the checkpoint."""

    keywords: Sequence[Mapping[str, Any]] = ()
    """Keywords of the checkpoint, such as ``num_training_steps``, for each function of a LambdaLR;
    empty to keep those of the loop."""


class _Change(NamedTuple):
    """What a resume on another number of ranks changes in the loop."""

    accumulation_steps: int
    schedules: list[_Continued]


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

    Args:
        accelerator: Accelerator of the loop.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._configured_steps = self._own_steps = accelerator.gradient_accumulation_steps
        self._change: _Change | None = None

    @property
    def _is_sharded(self) -> bool:
        return bool(self._accelerator.distributed_type == DistributedType.FSDP)

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
            "global_batch": self._now().state_dict(),
            "schedules": [self._state_of(each) for each in self._schedules()],
        }
        with whole_file(folder / _RECORD) as partial:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Determine what `apply` has to change after a checkpoint is loaded.

        A checkpoint without a record, of a loop without mfwrap for example, changes nothing.

        Raises:
            ValueError: If the record is damaged, only one of both runs uses the FSDP plugin, the
                number of ranks does not divide the global batch, or a schedule or a data loader
                cannot continue on another number of ranks.
        """
        self._change = None
        path = folder / _RECORD
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format_version"]
            saved = GlobalBatch(**content["global_batch"])
            former, schedules = int(content["num_processes"]), list(content["schedules"])
        except (ValueError, KeyError, TypeError) as error:
            msg = f"{path} is damaged: {error}"
            raise ValueError(msg) from error
        if version != _FORMAT_VERSION:
            msg = f"{path}: expected format_version {_FORMAT_VERSION}, got {version!r}"
            raise ValueError(msg)
        if content["is_sharded"] != self._is_sharded:
            with_or_without = ("without", "with")
            msg = (
                f"cannot resume from {folder}, which was written "
                f"{with_or_without[content['is_sharded']]} accelerate's FSDP plugin, "
                f"{with_or_without[self._is_sharded]} it: their files differ; use the same "
                "`fsdp_plugin` as before, which also works with one process"
            )
            raise ValueError(msg)
        steps = resumed_accumulation(saved, self._now(), folder, "micro-batches")
        if former != self._accelerator.num_processes:
            self._refuse_stateful_loaders(folder)
        continued = [
            self._continued(own, state, folder)
            for own, state in zip(self._schedules(), schedules, strict=False)
        ]
        self._change = _Change(steps, continued)

    def apply(self) -> None:
        """Change the accelerator and its schedules after a checkpoint is loaded."""
        change, self._change = self._change, None
        if change is None:
            return
        accelerator = self._accelerator
        if accelerator.gradient_accumulation_steps != change.accumulation_steps:
            self._own_steps = change.accumulation_steps
            accelerator.gradient_accumulation_steps = change.accumulation_steps
            # accelerate numbers the micro-batches of an epoch, and updates at each multiple of the
            # accumulation steps. Begin a new update.
            accelerator.step = 0
        for schedule, continued in zip(self._schedules(), change.schedules, strict=False):
            schedule.steps_per_update = continued.steps_per_update
            if continued.position is not None:
                schedule.scheduler.last_epoch = continued.position
            functions = getattr(schedule.scheduler, "lr_lambdas", ())
            for function, keywords in zip(functions, continued.keywords, strict=False):
                function.keywords.update(keywords)

    def _schedules(self) -> list[AttachedScheduler]:
        schedulers = self._accelerator._schedulers
        return [
            each
            for each in schedulers
            if isinstance(each, AttachedScheduler) and each.step_with_optimizer
        ]

    def _state_of(self, schedule: AttachedScheduler) -> dict[str, Any]:
        each_update = self._steps_per_update(schedule)
        position = schedule.scheduler.last_epoch
        return {
            "steps_per_update": each_update,
            "position": position,
            "factors": _factors(schedule.scheduler, position, each_update),
            "keywords": _keywords(schedule.scheduler),
        }

    def _steps_per_update(self, schedule: AttachedScheduler) -> int:
        own = 1 if schedule.split_batches else self._accelerator.num_processes
        return schedule.steps_per_update or own

    def _continued(
        self, schedule: AttachedScheduler, saved: dict[str, Any], folder: Path
    ) -> _Continued:
        """Return how a schedule continues.

        Args:
            schedule: The loop's schedule.
            saved: Its state in the record.
            folder: Folder of the checkpoint.

        Raises:
            ValueError: If its learning rates would differ from those of the saved schedule.
        """
        own = 1 if schedule.split_batches else self._accelerator.num_processes
        former, position = saved["steps_per_update"], saved["position"]
        if former == own:
            return _Continued()
        factors, keywords = saved["factors"], saved["keywords"]
        # Schedules other than a LambdaLR save their length, and continue with the saved length.
        if factors is None:
            return _Continued(former)
        if _agree(factors, _factors(schedule.scheduler, position, former)):
            return _Continued(former)
        converted = position * own // former
        if _agree(factors, _factors(schedule.scheduler, converted, own)):
            return _Continued(None, converted)
        present = _keywords(schedule.scheduler)
        if (
            keywords
            and present
            and [each.keys() for each in present] == [*map(dict.keys, keywords)]
        ):
            if self._accelerator.is_main_process:
                _LOG.warning("the schedule continues with %s instead of %s", keywords, present)
            return _Continued(former, None, keywords)
        msg = (
            f"cannot resume from {folder} on {self._accelerator.num_processes} process(es): "
            "the loop's schedule has other learning rates than the checkpoint, both at position "
            f"{position} with {former} steps per update and at position {converted} with {own}; "
            "make the schedule as long as before, or multiply its lengths by "
            "`accelerator.num_processes`"
        )
        raise ValueError(msg)

    def _refuse_stateful_loaders(self, folder: Path) -> None:
        loaders = self._accelerator._dataloaders
        if any(getattr(each, "use_stateful_dataloader", False) for each in loaders):
            num_processes = self._accelerator.num_processes
            msg = (
                f"cannot resume from {folder} on {num_processes} process(es) with "
                "`use_stateful_dataloader`: a stateful data loader saves the position of one rank; "
                "turn it off and call `accelerator.skip_first_batches`"
            )
            raise ValueError(msg)


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


_Factors = list[list[float | None]]


def _factors(schedule: Any, position: int, each_update: int) -> _Factors | None:
    """Return the factors of a LambdaLR now and after later updates; ``None`` for other schedules.

    Args:
        schedule: The schedule.
        position: Number of its steps so far.
        each_update: Number of its steps per update.

    Returns:
        For each parameter group, the factors after the numbers of updates in `_AHEAD`. A factor is
        ``None`` where the schedule's function fails.
    """
    if not isinstance(schedule, LambdaLR):
        return None
    return [
        [_factor(function, position + ahead * each_update) for ahead in _AHEAD]
        for function in schedule.lr_lambdas
    ]


def _factor(function: Callable[[int], Any], position: int) -> float | None:
    try:
        return float(function(position))
    except Exception:  # noqa: BLE001  (a user's function, which may end before the last position)
        return None


def _agree(saved: _Factors, own: _Factors | None) -> bool:
    return own is not None and all(
        a is b or (a is not None and b is not None and math.isclose(a, b, abs_tol=1e-9))
        for saved_group, own_group in zip(saved, own, strict=False)
        for a, b in zip(saved_group, own_group, strict=False)
    )
