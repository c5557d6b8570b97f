"""Record where each rank spends the time of its steps, and name the rank that slows the others."""

import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from transformers import TrainerState, TrainingArguments

from mfwrap import DeferredReads, StepReport
from mfwrap.arguments import check_int, check_positive_number, directory_name
from mfwrap.callbacks.shared.run_folder import required_run_folder
from mfwrap.callbacks.shared.run_log import WarnOnce, run_logger
from mfwrap.collectives import Section, gather_on_main, section_clock, this_rank
from mfwrap.collectives.clock import StepSections
from mfwrap.records.json_lines import JsonLines
from mfwrap.records.run_files import open_records
from mfwrap.tensors.shards import on_device
from mfwrap.trainer import MonitorCallback

_NO_SECTIONS = (
    "RankClock records nothing: this loop passes no `step_report`, or its report has no sections"
)
_UNKNOWN = [math.nan] * len(Section)


class SlowRank(NamedTuple):
    """A rank for which the other ranks wait."""

    rank: int

    section: str
    """Section that takes longer than on the other ranks: ``data``, ``forward_backward``,
    ``reduction`` or ``update``. ``unmeasured`` if no section does, but the other ranks wait."""

    milliseconds: float
    """Mean time of the section in a step; for ``unmeasured`` the mean time of waiting."""

    others: float
    """Median of this time over the other ranks, in milliseconds."""

    def __str__(self) -> str:
        times = f"{self.milliseconds:.3g} ms", f"{self.others:.3g} ms"
        if self.section == "unmeasured":
            return (
                f"rank {self.rank} is slow outside of its measured sections: it waits {times[0]} "
                f"for other ranks, the median of the other ranks is {times[1]}"
            )
        name = self.section.replace("_", "-")
        return (
            f"rank {self.rank} is slow: {name} takes {times[0]}, the median of the other ranks is "
            f"{times[1]}"
        )


@final
class RankClock(MonitorCallback):
    """Record the time of each section of each step on every rank, and name a slow rank.

    All ranks of a training wait for the slowest one. The time of a step therefore looks the same on
    every rank, and says neither which rank is slow nor why. This monitor separates the own work of
    a rank from its waiting for other ranks. A step has five sections:

    - ``data``: between two steps. Time from the end of an evaluation, a log or a save backwards to
      the step before is left out. `MFTrainer` leaves out all callbacks of these events; in another
      loop, callbacks that are called after this one count as data. Of a log within a step, only the
      callbacks are left out. In an attached loop, the time between micro-batches counts, too, and
      that between the backward and ``optimizer.step``.
    - ``forward_backward``: forward and backward of all micro-batches.
    - ``reduction``: the communication hook that was passed to the step.
    - ``update``: norms, optimizer, average, loss scale.
    - ``waiting``: collectives that are not complete: waiting for other ranks, and transfers.

    Every `step_interval` steps each rank sends its times since the last message, except those of
    the present step, to the main process: ``20 n`` bytes for ``n`` steps. Before a checkpoint, each
    rank sends all times that it has not sent yet. There is no other message, so the times of the
    steps after the last message are not written. The end of a training sends nothing, because a
    rank may end alone, and would wait for the others. In a loop of your own, call `on_pre_save` on
    every rank after the last step to write all times. The main process writes

    - ``rank_clock.jsonl`` in the run folder: for each step a record with the milliseconds of all
      ranks, ``{"step": 7, "data": [0.2, 0.1], "forward_backward": [...], ...}``, and for each
      message that shows slow ranks a record ``{"step": 9, "slow": [{"rank": 1, "section": "data",
      "milliseconds": 118.0, "others": 0.2}]}``;
    - a warning in the log when a rank becomes slow: ``rank 2 is slow: forward-backward takes 131
      ms, the median of the other ranks is 11 ms (steps 2 to 9)``.

    A rank is slow if the mean time of one of its own sections exceeds the median of the other ranks
    by more than `tolerance` of the time of a step. The first step is recorded but does not count.
    All ranks must have the callback.

    Under ``fully_shard``, all time in torch's gathers and reductions counts as ``waiting``. What a
    rank does inside of them, such as a slow custom reduction, cannot be told from waiting. Under
    DistributedDataParallel, a hook that was registered with ``register_comm_hook``, and not passed
    as `communication_hook`, counts as ``forward_backward``, and so does the waiting of a pipeline's
    stage for another one. If the other ranks wait for a rank although none of its sections is slow,
    the rank is named with the section ``unmeasured``.

    Steps measure nothing unless this monitor asks for it. They then call a clock some ten times,
    about a microsecond each on a CPU. On other devices they record events, which are read when
    they are complete: the monitor never synchronizes with the device. It adds no graph breaks to a
    compiled network. If a loop calls ``torch.compile(model)`` after ``accelerator.prepare``, the
    forward counts as ``data``.

    Args:
        step_interval: Steps from one message to the next.
        tolerance: Excess from which a rank is slow, as a share of the time of a step.
        folder: Run folder; ``None`` for ``args.output_dir``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. At ``on_train_begin``, or else at the end of the
            first step, if the loop has no ``args.output_dir`` and `folder` is missing.
    """

    def __init__(
        self,
        step_interval: int = 10,
        *,
        tolerance: float = 0.2,
        folder: str | Path | None = None,
    ) -> None:
        check_int("step_interval", step_interval, minimum=1)
        self._step_interval = step_interval
        self._tolerance = check_positive_number("tolerance", tolerance)
        self._folder = directory_name("folder", folder)
        self._lines: JsonLines | None = None
        self._is_open = False
        self._steps: list[tuple[int, StepSections | None]] = []
        self._first_step: int | None = None
        self._slow: set[tuple[int, str]] = set()
        self._device = torch.device("cpu")
        self._reads = DeferredReads()
        self._warn_once = WarnOnce(__name__)

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Start the clock, and open the file on the main process.

        Raises:
            OSError: If files cannot be written to the run folder.
            ValueError: If the loop has no ``args.output_dir`` and `folder` is missing.
        """
        self._reads.discard()
        self._open(args, state.global_step)

    def on_step_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Start the clock if ``on_train_begin`` was not called."""
        if not self._is_open:
            self._open(args, state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        step_report: StepReport | None = None,
        **__: Any,
    ) -> None:
        """Write the times of an earlier message; keep those of this step, or send all kept ones."""
        self._reads.flush()
        if not self._is_open:
            # The clock was not running in this step.
            self._open(args, state.global_step)
            return
        sections = None if step_report is None else step_report.sections
        if step_report is not None and state.global_step % self._step_interval == 0 and self._steps:
            self._send()
        if step_report is None or sections is None:
            self._warn_once(_NO_SECTIONS)
        if step_report is not None:
            self._steps.append((state.global_step, sections))
            self._device = step_report.skipped.device

    def on_log(self, *_: Any, **__: Any) -> None:
        """Write pending times, and leave the time of the event out of the data section."""
        with section_clock.left_out():
            self._reads.flush()

    on_evaluate = on_save = on_log

    def on_pre_save(self, *_: Any, **__: Any) -> None:
        """Send and write all times, so that they belong to the checkpoint."""
        if self._steps:
            self._send()
        self._reads.flush()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Write pending times."""
        self._reads.flush()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write pending times, and stop the clock."""
        self._reads.flush()
        section_clock.stop_for(self)
        self._is_open, self._lines = False, None

    def _open(self, args: TrainingArguments | None, global_step: int) -> None:
        folder = required_run_folder(self._folder, args, type(self).__name__)
        self._is_open = True
        self._steps, self._first_step, self._slow = [], None, set()
        if this_rank() == 0:
            self._lines = open_records(folder / "rank_clock.jsonl", global_step)
        section_clock.start_for(self)

    def _send(self) -> None:
        """Send the times of the kept steps to the main process.

        All ranks have kept the same steps. Usually the device has finished them, because the update
        of the present step has read a result of the one before. If not, their times are unknown.
        """
        steps = [step for step, _ in self._steps]
        rows = [
            (None if sections is None else sections.seconds()) or _UNKNOWN
            for _, sections in self._steps
        ]
        self._steps.clear()
        # Pinned, so that the copy to the device does not wait for the device.
        is_pinned = self._device.type != "cpu"
        own = torch.tensor(rows, dtype=torch.float32, device="cpu", pin_memory=is_pinned)
        gathered = gather_on_main(on_device(own, self._device))
        if gathered is None:
            return
        self._reads.submit(gathered.reshape(-1), functools.partial(self._receive, steps))

    def _receive(self, steps: Sequence[int], times: Sequence[float]) -> None:
        """Write the times of some steps.

        Args:
            steps: Numbers of ``n`` steps.
            times: For each rank ``5 n`` times in seconds, step by step.
        """
        width, size = len(Section), len(Section) * len(steps)
        of_ranks = [times[start : start + size] for start in range(0, len(times), size)]
        for index, step in enumerate(steps):
            record: dict[str, Any] = {"step": step}
            for section in Section:
                seconds = [values[width * index + section] for values in of_ranks]
                record[section.name.lower()] = [round(1e3 * each, 3) for each in seconds]
            self._write(record)
        if self._first_step is None:
            # The first step also allocates, compiles and compares the ranks.
            self._first_step = steps[0]
        counted = [i for i, step in enumerate(steps) if step > self._first_step]
        means = [
            [_mean([values[width * i + section] for i in counted]) for section in Section]
            for values in of_ranks
        ]
        slow = slow_ranks(means, self._tolerance)
        if slow:
            self._write({"step": steps[-1], "slow": [each._asdict() for each in slow]})
        for each in slow:
            if (each.rank, each.section) not in self._slow:
                run_logger(__name__).warning(
                    "%s (steps %d to %d)", each, steps[counted[0]], steps[-1]
                )
        self._slow = {(each.rank, each.section) for each in slow}

    def _write(self, record: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.append(record)


def slow_ranks(means: Sequence[Sequence[float]], tolerance: float) -> list[SlowRank]:
    """Return the ranks that the other ranks wait for, in their order.

    Args:
        means: For each rank the mean time of each `Section` in a step, in seconds; NaN if unknown.
        tolerance: Smallest excess over the median of the other ranks that is slow, as a share of
            the time of a step.
    """
    known = {rank: times for rank, times in enumerate(means) if all(map(math.isfinite, times))}
    if len(known) < 2:
        return []
    limit = tolerance * statistics.median(map(sum, known.values()))
    found = []
    for rank, times in known.items():
        others = [each for other, each in known.items() if other != rank]
        medians = [statistics.median(column) for column in zip(*others, strict=True)]
        excess = [time - median for time, median in zip(times, medians, strict=True)]
        own = [section for section in Section if section is not Section.WAITING]
        slowest: Section = max(own, key=lambda section: excess[section])
        name = slowest.name.lower()
        if excess[slowest] <= limit:
            if excess[Section.WAITING] >= -limit:
                continue
            slowest, name = Section.WAITING, "unmeasured"
        found.append(SlowRank(rank, name, 1e3 * times[slowest], 1e3 * medians[slowest]))
    return found


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan
