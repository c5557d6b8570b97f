"""Write the local norms of all ranks to files of the main process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from transformers import TrainerState, TrainingArguments

from mfwrap import DeferredReads, LocalNormStepOutput, StepReport
from mfwrap.arguments import check_int, directory_name
from mfwrap.callbacks.shared.run_folder import required_run_folder
from mfwrap.callbacks.shared.run_log import WarnOnce
from mfwrap.callbacks.shared.tensorboard import EventsFile, summary_writer_class
from mfwrap.collectives import gather_on_main, num_ranks, this_rank
from mfwrap.records.json_lines import JsonLines, rank_file
from mfwrap.records.run_files import open_records
from mfwrap.trainer import MonitorCallback

_NO_LOCAL_NORMS = (
    "LocalNormMonitor writes nothing: the step has no local norms; StepConfig(local_norm=True) "
    "computes them"
)


@final
class LocalNormMonitor(MonitorCallback):
    """Gather the local norms of all ranks on the main process and write them there.

    Every `step_interval` steps each rank sends the norms of its ``G`` groups of gradients to the
    main process, in one message of ``4 G`` bytes. The main process writes them one step later,
    without host-device synchronization in the step:

    - ``local_norms.jsonl`` in the run folder for rank 0, and ``local_norms_rank<rank>.jsonl`` for
      each other rank: records ``{"step": ..., "local_norm/<group>": ...}``. The run page draws them
      as a map of layers and ranks.
    - with `tensorboard_dir`, curves ``local_norm/<group>`` in a folder ``rank_<rank>`` for each
      rank.

    All ranks must have the callback. The step must compute local norms
    (``StepConfig(local_norm=True)``); if it does not, nothing is sent, and a warning is logged
    once.

    `TrainingStateMonitor` writes the same norms without messages: each rank writes its own file.
    With several machines, each file may be on a disk that only the machine of its rank can read.

    Args:
        step_interval: Steps from one message to the next.
        folder: Run folder; ``None`` for ``args.output_dir``.
        tensorboard_dir: Folder for TensorBoard curves; ``None`` writes none.

    Raises:
        ImportError: If `tensorboard_dir` is given and TensorBoard is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If `step_interval` is < 1. At ``on_train_begin``, or else at the end of the
            first step, if the loop has no ``args.output_dir`` and `folder` is missing.
    """

    def __init__(
        self,
        step_interval: int = 1,
        *,
        folder: str | Path | None = None,
        tensorboard_dir: str | Path | None = None,
    ) -> None:
        check_int("step_interval", step_interval, minimum=1)
        self._step_interval = step_interval
        self._folder = directory_name("folder", folder)
        self._events_folder = directory_name("tensorboard_dir", tensorboard_dir)
        if tensorboard_dir is not None:
            summary_writer_class()
        self._lines: list[JsonLines] = []
        self._is_open = False
        self._events: list[EventsFile] = []
        self._reads = DeferredReads()
        self._warn_once = WarnOnce(__name__)

    def on_train_begin(
        self, args: TrainingArguments | None, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Open the files on the main process.

        Raises:
            OSError: If files cannot be written to the run folder.
            ValueError: If the loop has no ``args.output_dir`` and `folder` is missing.
        """
        self._reads.discard()
        self._close()
        self._open(args, state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        step_report: StepReport | None = None,
        **__: Any,
    ) -> None:
        """Write the norms of an earlier step; start to gather the norms of this step."""
        self._reads.flush()
        if not self._is_open:
            self._open(args, state.global_step - 1)
        if state.global_step % self._step_interval:
            return
        output = None if step_report is None else step_report.output
        if step_report is None or not isinstance(output, LocalNormStepOutput):
            self._warn_once(_NO_LOCAL_NORMS)
            return
        gathered = gather_on_main(output.local_norm)
        if gathered is None:
            return
        step, names = state.global_step, step_report.local_norm_names

        def receive(values: Sequence[float]) -> None:
            for rank in range(len(self._lines)):
                self._write(step, rank, names, values[rank * len(names) :][: len(names)])

        self._reads.submit(gathered.reshape(-1), receive)

    def on_log(self, *_: Any, **__: Any) -> None:
        """Write pending norms; before a save, so that they belong to the checkpoint."""
        self._reads.flush()

    on_pre_save = on_save = on_epoch_end = on_log

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write pending norms and close the TensorBoard files."""
        self._reads.flush()
        self._close()

    def _open(self, args: TrainingArguments | None, global_step: int) -> None:
        folder = required_run_folder(self._folder, args, type(self).__name__)
        self._is_open = True
        if this_rank():
            return
        files = [rank_file(folder, "local_norms", rank) for rank in range(num_ranks())]
        self._lines = [open_records(file, global_step) for file in files]
        if self._events_folder is not None:
            paths = [Path(self._events_folder, f"rank_{rank}") for rank in range(num_ranks())]
            self._events = [EventsFile(path) for path in paths]

    def _close(self) -> None:
        for events in self._events:
            events.close()
        self._lines, self._events, self._is_open = [], [], False

    def _write(self, step: int, rank: int, names: Sequence[str], norms: Sequence[float]) -> None:
        tagged = {f"local_norm/{name}": n for name, n in zip(names, norms, strict=True)}
        self._lines[rank].append({"step": step, **tagged})
        if self._events:
            for tag, norm in tagged.items():
                self._events[rank].add(tag, norm, step)
