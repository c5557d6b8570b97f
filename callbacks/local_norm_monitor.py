"""The local norms of all ranks, in the main process's files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from transformers import TrainerCallback, TrainerState, TrainingArguments

from mfwrap import DeferredReads, LocalNormStepOutput, StepReport
from mfwrap.arguments import (
    check_int,
    directory_name,
)
from mfwrap.callbacks.culprit.anomaly_log import rank_file
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.tensorboard import (
    summary_writer_class,
)
from mfwrap.collectives import gather_on_main
from mfwrap.records.json_lines import JsonLines

__all__ = ["LocalNormMonitor"]


@final
class LocalNormMonitor(TrainerCallback):
    """Gather each rank's local norms on the main process, and write them there.

    Every `step_interval` steps each rank sends its ``(G,)`` norms, one message of ``4 G`` bytes,
    to the main process, which copies them to the host without waiting and writes them a step
    later: ``local_norms.jsonl`` in the run folder, ``local_norms_rank1.jsonl`` and so on for the
    other ranks, one record ``{"step": ..., "local_norm/<group>": ...}`` each; and curves
    ``local_norm/<group>``, each rank's in a folder ``rank_<n>``. The run page draws them layer by
    rank.

    All ranks have to have the callback. The step must have local norms
    (``StepConfig(local_norm=True)``); without them a warning says so once and nothing is sent.

    (`TrainingStateMonitor` writes each rank's norms from that rank, without a message, into files
    that other machines may not see.)

    Args:
        step_interval: Steps from one message to the next.
        folder: Of the run; ``None`` for ``args.output_dir``.
        tensorboard_dir: Where curves go; ``None`` writes none.

    Raises:
        ImportError: If `tensorboard_dir` is given and TensorBoard is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If `step_interval` is < 1; at ``on_step_end`` if the folder is not known.
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
        self._make_events = None if tensorboard_dir is None else summary_writer_class()
        self._lines: list[JsonLines] = []
        self._events: list[Any] = []
        self._reads: DeferredReads | None = None
        self._said_what_is_missing = False

    def on_step_end(
        self,
        args: TrainingArguments | None,
        state: TrainerState,
        *_: Any,
        step_report: StepReport | None = None,
        **__: Any,
    ) -> None:
        """Write what was gathered before; gather the norms of this step."""
        self._flush()
        if state.global_step % self._step_interval:
            return
        output = None if step_report is None else step_report.output
        if step_report is None or not isinstance(output, LocalNormStepOutput):
            self._say_what_is_missing()
            return
        gathered = gather_on_main(output.local_norm)
        if gathered is None:
            return
        if not self._lines:
            self._open(args, len(gathered))
        step, names = state.global_step, step_report.local_norm_names

        def receive(values: Sequence[float]) -> None:
            for rank in range(len(self._lines)):
                self._write(step, rank, names, values[rank * len(names) :][: len(names)])

        if self._reads is None:
            self._reads = DeferredReads(gathered.device)
        self._reads.submit(gathered.reshape(-1), receive)

    def on_log(self, *_: Any, **__: Any) -> None:
        """Write what is pending."""
        self._flush()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Write what is pending."""
        self._flush()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Write what is pending."""
        self._flush()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write what is pending and close the events files."""
        self._flush()
        self._lines = []
        for events in self._events:
            events.close()
        self._events = []

    def _flush(self) -> None:
        if self._reads is not None:
            self._reads.flush()

    def _open(self, args: TrainingArguments | None, num_ranks: int) -> None:
        folder = self._folder
        if folder is None and args is not None:
            folder = args.output_dir
        if folder is None:
            msg = "`folder` must be given in a loop of your own, got None"
            raise ValueError(msg)
        ranks = range(num_ranks)
        self._lines = [JsonLines(rank_file(Path(folder), "local_norms", rank)) for rank in ranks]
        if self._make_events is not None and self._events_folder is not None:
            paths = [Path(self._events_folder, f"rank_{rank}") for rank in ranks]
            self._events = [self._make_events(str(path)) for path in paths]

    def _write(self, step: int, rank: int, names: Sequence[str], norms: Sequence[float]) -> None:
        tagged = {f"local_norm/{name}": n for name, n in zip(names, norms, strict=True)}
        self._lines[rank].append({"step": step, **tagged})
        if self._events:
            for tag, norm in tagged.items():
                self._events[rank].add_scalar(tag, norm, global_step=step)

    def _say_what_is_missing(self) -> None:
        if not self._said_what_is_missing:
            self._said_what_is_missing = True
            run_logger(__name__).warning(
                "LocalNormMonitor gets no local norms in this loop; "
                "StepConfig(local_norm=True) computes them"
            )
