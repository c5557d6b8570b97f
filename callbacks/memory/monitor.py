"""Record how much memory a training takes, and warn when the device is nearly full."""

import os
from collections.abc import Sequence
from typing import Any, final

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

from mfwrap.arguments import check_bool, check_int, directory_name
from mfwrap.callbacks.shared.run_folder import required_run_folder
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.checkpoints.whole import whole_file
from mfwrap.checkpoints.written_files import list_own
from mfwrap.collectives import Section, num_ranks, this_rank
from mfwrap.compatibility.torch import MemoryHistory
from mfwrap.memory import (
    GIB,
    DeviceMemory,
    device_memory,
    host_memory,
    peak_memory,
    snapshot_takers,
)
from mfwrap.records.json_lines import JsonLines, rank_file
from mfwrap.records.run_files import open_records
from mfwrap.trainer import MonitorCallback

_FIRST_STEPS = 2
"""Steps that always have a record: the first creates the optimizer's state, and the second is the
first that has it in forward and backward."""

_MOST_SHARE = 0.95


@final
class MemoryMonitor(MonitorCallback):
    """Record the memory of each rank in ``memory.jsonl``, and warn when the device is nearly full.

    Every recipe and every `LoopMonitor` has one. Other ranks than 0 write ``memory_rank<r>.jsonl``.
    The first two steps and every `step_interval`-th step have a record. Its numbers of the device
    are those of torch's caching allocator for this process, in bytes:

    - ``memory_allocated``: what tensors occupy at the end of the step.
    - ``max_memory_allocated``, ``max_memory_reserved``: torch's peaks since the process began, or
      since ``torch.cuda.reset_peak_memory_stats`` was last called. The monitor never resets them,
      so they are those of the steps so far, and not of one step.
    - ``max_memory_share``: the peak of the reserved memory as a share of the device's memory.
    - ``max_memory_section``: where the peak has last risen: ``forward_backward`` (in a loop of your
      own with the loading of its data), ``update``, or ``data``, which is everything between two
      updates: data, evaluations, saves. Absent if it rose in a step without a record.
    - ``num_alloc_retries``: how often since the last record the device was full, so that the
      allocator freed the memory that it kept, and asked again. Each of them synchronizes with the
      device.
    - ``host_memory``, ``max_host_memory``: resident memory of this process now and at its peak, on
      Linux. Without an accelerator, ``max_memory_section`` is that of this peak.

    Two warnings are logged once in a training: at the first retry, and when the reserved memory
    exceeds 95 % of the device.

    All numbers are kept on the host, so reading them does not synchronize with the device. There
    are no messages between ranks.

    Args:
        step_interval: Steps from one record to the next.
        folder: Run folder; ``None`` for ``args.output_dir``.
        memory_snapshot: Whether an error for lack of memory writes ``memory_snapshot.pickle`` (on
            other ranks ``memory_snapshot_rank<r>.pickle``) to the run folder: torch's own record of
            what each block of memory was allocated for, for https://pytorch.org/memory_viz. torch
            then notes the stack of each of the last 100,000 allocations, some microseconds each.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. When the training begins, if the loop has no
            ``args.output_dir`` and `folder` is missing, or if torch takes no snapshots of the
            device.
    """

    def __init__(
        self,
        step_interval: int = 10,
        *,
        folder: str | os.PathLike[str] | None = None,
        memory_snapshot: bool = False,
    ) -> None:
        self._step_interval = check_int("step_interval", step_interval, minimum=1)
        self._folder = directory_name("folder", folder)
        self._takes_snapshot = check_bool("memory_snapshot", memory_snapshot)
        self._lines: JsonLines | None = None
        self._history: MemoryHistory | None = None
        self._device = torch.device("cpu")
        self._peak: int | None = None
        self._section: Section | None = None
        self._num_retries = 0
        self._warned: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Open the file.

        Raises:
            OSError: If files cannot be written to the run folder.
            ValueError: If the run folder is unknown, or torch takes no snapshots of the device.
        """
        self._open(args, state.global_step, known.get("model"))

    def on_step_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Note whether the peak has risen since the last step."""
        if self._lines is None:
            self._open(args, state.global_step, known.get("model"))
        step = state.global_step + 1
        if self._is_due(step):
            self._note(Section.DATA if self._is_due(step - 1) or step == 1 else None)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments | None,  # noqa: ARG002  (the Trainer passes it by position)
        state: TrainerState,
        *_: Any,
        **__: Any,
    ) -> None:
        """Note whether forward and backward have raised the peak."""
        if self._is_due(state.global_step + 1):
            self._note(Section.FORWARD_BACKWARD)

    def on_step_end(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **known: Any
    ) -> None:
        """Write the record of the step."""
        if self._lines is None:
            self._open(args, state.global_step - 1, known.get("model"))
        if self._is_due(state.global_step):
            self._note(Section.UPDATE)
            self._write(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop recording."""
        self._lines = None
        snapshot_takers.discard(self)
        if self._history is not None:
            self._history.stop()

    def take_snapshot(self) -> None:
        """Write torch's snapshot to the run folder; called when memory has run out."""
        if self._lines is not None and self._history is not None:
            name = rank_file(self._lines.path.parent, "memory_snapshot", this_rank())
            file = name.with_suffix(".pickle")
            try:
                list_own(file)
                with whole_file(file) as partial:
                    self._history.write(partial)
            except (OSError, RuntimeError) as error:  # must not hide the error of the training
                run_logger(__package__).warning("%s was not written: %s", file, error)

    def _open(self, args: TrainingArguments | None, global_step: int, model: Any) -> None:
        folder = required_run_folder(self._folder, args, type(self).__name__)
        self._device = _device_of(model)
        self._lines = open_records(rank_file(folder, "memory", this_rank()), global_step)
        if self._takes_snapshot:
            self._history = MemoryHistory(self._device)
            snapshot_takers.add(self)
        memory = device_memory(self._device)
        self._num_retries = 0 if memory is None else memory.num_alloc_retries
        self._peak, self._section, self._warned = peak_memory(self._device), None, set()

    def _is_due(self, step: int) -> bool:
        return 0 < step <= _FIRST_STEPS or step % self._step_interval == 0

    def _note(self, section: Section | None) -> None:
        """Note that the section that ends here, or an unknown one, has perhaps raised the peak."""
        before, self._peak = self._peak, peak_memory(self._device)
        if self._peak != before:
            # The peak is lower if somebody has reset it.
            self._section = section

    def _write(self, step: int) -> None:
        record: dict[str, Any] = {"step": step}
        memory, host = device_memory(self._device), host_memory()
        if memory is not None:
            num_retries = max(0, memory.num_alloc_retries - self._num_retries)
            self._num_retries = memory.num_alloc_retries
            record |= {
                "memory_allocated": memory.allocated,
                "max_memory_allocated": memory.max_allocated,
                "max_memory_reserved": memory.max_reserved,
                "num_alloc_retries": num_retries,
            }
            if memory.share is not None:
                record["max_memory_share"] = round(memory.share, 4)
            self._warn(step, memory, num_retries)
        if host is not None:
            record |= {"host_memory": host.resident, "max_host_memory": host.peak}
        if self._section is not None:
            record["max_memory_section"] = self._section.name.lower()
        if self._lines is not None:
            self._lines.append(record)

    def _warn(self, step: int, memory: DeviceMemory, num_retries: int) -> None:
        place = f"{self._device} of rank {this_rank()}" if num_ranks() > 1 else str(self._device)
        found = {}
        if num_retries:
            found["retries"] = (
                f"{place} was full {num_retries} times by step {step}: torch freed the memory that "
                "it kept, and asked again, which synchronizes with the device"
            )
        if memory.total and memory.max_reserved > _MOST_SHARE * memory.total:
            found["headroom"] = (
                f"less than 5 % of {place} is left at step {step}: torch has reserved "
                f"{memory.max_reserved / GIB:.2f} of {memory.total / GIB:.2f} GiB"
            )
        for kind, text in found.items():
            if kind not in self._warned:
                self._warned.add(kind)
                run_logger(__package__).warning("%s", text)


def with_memory_monitor(
    callbacks: Sequence[TrainerCallback], folder: str | os.PathLike[str]
) -> list[TrainerCallback]:
    """Return some callbacks, after a `MemoryMonitor` of a run folder unless one is among them."""
    has_one = any(isinstance(one, MemoryMonitor) for one in callbacks)
    return [*callbacks] if has_one else [MemoryMonitor(folder=folder), *callbacks]


def _device_of(model: Any) -> torch.device:
    parameter = None if model is None else next(iter(model.parameters()), None)
    if parameter is not None:
        return torch.device(parameter.device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
