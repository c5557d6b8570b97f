"""Profile some steps of a training with torch's profiler."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback, TrainerState, TrainingArguments

from mfwrap.arguments import check_bool, check_int, directory_name
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.checkpoints.whole import whole_file
from mfwrap.checkpoints.written_files import list_own, listed_names
from mfwrap.collectives import this_rank
from mfwrap.records.own_names import begin_folder, check_own

_TRACE = "trace.json"
_TABLE = "operators.txt"


@final
class ProfileMonitor(TrainerCallback):
    """Profile some steps of a training with torch's profiler.

    Each rank writes two files to ``<output_path>/rank_<rank>``: ``trace.json`` for Perfetto or
    ``chrome://tracing``, and ``operators.txt``, a table of operators sorted by time. If
    `start_step` is > 1, the profiler warms up in the step before `start_step`. If the training ends
    before `stop_step`, the profile ends with the last step of the training. An earlier profile is
    replaced; if files of these names are not mfwrap's, a warning names them, and nothing is
    profiled.

    Source: MindFormers, ``ProfileMonitor``.

    Args:
        start_step: First step to profile. Steps are counted from 1 at each start of training, also
            after a resume.
        stop_step: Last step to profile.
        output_path: Folder for the profiles; ``None`` for ``profile`` in ``args.output_dir``.
        profile_rank_ids: Ranks that profile; ``None`` for all.
        profile_memory: Also record memory allocations.
        with_stack: Also record the Python stack of each operator.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `start_step` is < 1 or `stop_step` < `start_step`. At the start of training,
            if `output_path` is ``None`` and the loop has no ``args.output_dir``.
    """

    def __init__(
        self,
        start_step: int = 1,
        stop_step: int = 10,
        output_path: str | Path | None = None,
        *,
        profile_rank_ids: Sequence[int] | None = None,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        check_int("start_step", start_step, minimum=1)
        check_int("stop_step", stop_step, minimum=start_step)
        check_bool("profile_memory", profile_memory)
        check_bool("with_stack", with_stack)
        for rank in profile_rank_ids or ():
            check_int("profile_rank_ids", rank, minimum=0)
        self._start_step, self._stop_step = start_step, stop_step
        self._output_path = directory_name("output_path", output_path)
        self._ranks = None if profile_rank_ids is None else tuple(profile_rank_ids)
        self._profile_memory, self._with_stack = profile_memory, with_stack
        self._profiler: profile | None = None
        self._num_steps = 0

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Start the profiler; it records from `start_step` on."""
        del state
        self._stop()
        rank = this_rank()
        if self._ranks is not None and rank not in self._ranks:
            return
        folder = self._folder(args) / f"rank_{rank}"
        files = [folder / name for name in (_TRACE, _TABLE)]
        is_older = _is_older_profile(folder)
        try:
            if not is_older:
                check_own(files)
        except FileExistsError as error:
            # An error of this rank alone would let the other ranks wait for it.
            run_logger(__name__).warning("Nothing is profiled: %s", error)
            return
        begin_folder(folder)
        for path in files if is_older else ():
            list_own(path)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._num_steps = 0
        self._profiler = profile(
            activities=activities,
            schedule=self._schedule(),
            on_trace_ready=lambda profiler: self._write(profiler, folder),
            profile_memory=self._profile_memory,
            with_stack=self._with_stack,
            # torch warns that it clears the events of earlier cycles; there is only one cycle.
            acc_events=True,
        )
        self._profiler.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count the step; write the profile after `stop_step`."""
        if self._profiler is None:
            return
        self._num_steps += 1
        self._profiler.step()
        if self._num_steps >= self._stop_step:
            self._stop()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write the profile if the training ends before `stop_step`."""
        self._stop()

    def _schedule(self) -> Any:
        warmup = int(self._start_step > 1)
        with warnings.catch_warnings():
            # Profiling step 1 is meant to include start-up, so torch's no-warm-up warning is noise.
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            return schedule(
                skip_first=self._start_step - 1 - warmup,
                wait=0,
                warmup=warmup,
                active=self._stop_step - self._start_step + 1,
                repeat=1,
            )

    def _folder(self, args: TrainingArguments | None) -> Path:
        if self._output_path is not None:
            return Path(self._output_path)
        if args is None or args.output_dir is None:
            msg = "ProfileMonitor needs `output_path` in a loop without `args.output_dir`"
            raise ValueError(msg)
        return Path(args.output_dir) / "profile"

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write(self, profiler: profile, folder: Path) -> None:
        with whole_file(folder / _TRACE) as partial:
            profiler.export_chrome_trace(str(partial))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=100)
        with whole_file(folder / _TABLE) as partial:
            partial.write_text(table, encoding="utf-8")
        run_logger(__name__).info("Profile written to %s", folder)


def _is_older_profile(folder: Path) -> bool:
    """Return whether a folder has the profile of an earlier release, which kept no list."""
    files = [folder / name for name in (_TRACE, _TABLE)]
    if listed_names(folder) is not None or not all(
        path.is_file() and not path.is_symlink() for path in files
    ):
        return False
    trace, table = (_start(path) for path in files)
    return '"traceEvents"' in trace and table.startswith("-----") and "Self CPU %" in table


def _start(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(2**16)
    except OSError:
        return ""
