"""`LoopMonitor`: the monitors of a loop of your own, in two lines."""

import atexit
import contextlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from mfwrap import MFTrainOneStepCell, StepReport
from mfwrap.accelerate import AttachedStep
from mfwrap.arguments import check_int, described, directory_name
from mfwrap.callbacks.loop.arguments import LoopArguments, loop_arguments
from mfwrap.callbacks.loop.csv_file import CsvFile
from mfwrap.callbacks.loop.source import AttachedSource, OptimizerSource, source_of
from mfwrap.callbacks.loop.trackers import Tracker, Trackers
from mfwrap.callbacks.memory.monitor import with_memory_monitor
from mfwrap.callbacks.shared.progress import UNKNOWN_LENGTH
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.training_state.monitor import TrainingStateMonitor
from mfwrap.checkpoints.file_formats import json_content
from mfwrap.checkpoints.ownership import OwnedFolders
from mfwrap.checkpoints.whole import whole_file
from mfwrap.checkpoints.written_files import list_own
from mfwrap.collectives import this_rank
from mfwrap.records.checkpoint_requests import CheckpointRequests
from mfwrap.records.own_names import begin_folder, check_own
from mfwrap.records.run_facts import PROGRESS, RunFacts
from mfwrap.records.run_files import owning_record_folders
from mfwrap.records.run_record import FACTS, LOOP_STATE
from mfwrap.schedules import BatchGrowth
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.wrappers import unwrapped_network, unwrapped_optimizer
from mfwrap.trainer import MonitorCallback

_FORMATS = ("jsonl", "trackers")
_STEPS_BETWEEN_TIMES = 10
_CSV = "metrics.csv"

_WRITERS: "weakref.WeakValueDictionary[Path, LoopMonitor]" = weakref.WeakValueDictionary()
"""The monitor that writes each run folder in this process."""

_WAITING: "weakref.WeakValueDictionary[tuple[Path, int], LoopMonitor]" = (
    weakref.WeakValueDictionary()
)
"""Monitors whose loop has not begun, by folder and the ids of what they follow."""


@final
class LoopMonitor:
    """Monitor a loop of your own: send the events, count the steps, and write each step's record.

    Two lines are enough: one that makes the monitor, after the model and the optimizer are
    prepared, and `end_step` after each update. Each update then has a record in
    ``training_state.jsonl`` and a row in ``metrics.csv`` in `folder`, with its loss, learning rate,
    loss scale, flags and, if the step computes them, norm and local norms; bad steps have a record
    in ``anomalies.jsonl``. The trackers get the same numbers, at the step that they belong to. A
    `MemoryMonitor` writes ``memory.jsonl``.

    A step's numbers are copied to the host in the background, and written in the next update: with
    `attach` after its last backward, otherwise just before the weights change. The last step is
    written by `close`, by ``accelerator.end_training``, or when the program ends.

    With `attach`, ``save_state`` and ``load_state`` save and restore the monitor, too. Make the
    monitor on every rank: the ranks bring their numbers together in a save.

    Args:
        step: What does the updates: the result of `mfwrap.accelerate.attach`, a cell, or, in a
            plain torch loop, the optimizer.
        folder: Run folder.
        model: Network, in a plain torch loop; ``None`` takes that of the cell, or the first one
            that the accelerator has prepared.
        trackers: Where to log besides the files, see `mfwrap.callbacks.loop.trackers.Tracker`.
            ``None`` takes the trackers of the attached accelerator, which ``init_trackers`` may
            start later.
        callbacks: Further monitors, which get the events.
        prefix: Beginning of the names in trackers, so that they differ from those of the loop.
        first_step: Updates before this loop; ``load_state`` of an attached loop sets it.
        max_steps: Updates of the whole run; ``None`` if unknown.
        global_batch_size: Samples of one update on all processes, for the throughput and the noise
            scale of all monitors; 0 if unknown. For a batch that grows, its
            `mfwrap.schedules.BatchGrowth`.
        configuration: Settings of the loop, for ``run.json`` and the run page, which shows in what
            runs differ. The settings of the step and the optimizer are there anyway.
        settings: Keywords of `TrainingStateMonitor`, such as ``weight_state_format``. The formats
            ``"jsonl"`` and ``"trackers"`` write to the files and to the trackers; the CSV file has
            what the trackers get.

    The monitor owns the run folder from the first forward pass, for all ranks, until `close`. No
    other program can then write it: its first forward pass raises ``BlockingIOError``. In the same
    program, a new monitor for the folder takes the place of an older one whose loop has ended, or
    which has the same model or optimizer and whose loop has not begun.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        step: AttachedStep | MFTrainOneStepCell | torch.optim.Optimizer,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        trackers: Sequence[Tracker] | Tracker | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        prefix: str = "mfwrap/",
        first_step: int = 0,
        max_steps: int | None = None,
        global_batch_size: int | BatchGrowth = 0,
        configuration: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        check_int("first_step", first_step, minimum=0)
        self._growth = global_batch_size if isinstance(global_batch_size, BatchGrowth) else None
        size = global_batch_size if self._growth is None else self._growth.sizes[-1]
        self._global_batch_size = check_int("global_batch_size", size, minimum=0)
        if max_steps is not None:
            check_int("max_steps", max_steps, minimum=1)
        for callback in callbacks:
            if not isinstance(callback, TrainerCallback):
                msg = (
                    f"`callbacks` must hold transformers.TrainerCallback, got {described(callback)}"
                )
                raise TypeError(msg)
        self._source = source_of(step, model)
        self._folder = Path(directory_name("folder", folder) or "")
        self._trackers = Trackers(self._chosen(trackers), prefix)
        self._csv: CsvFile | None = None
        self._facts: RunFacts | None = None
        formats: dict[str, Any] = {
            "local_norm_format": _FORMATS,
            "local_loss_format": _FORMATS,
        }
        self._monitor = TrainingStateMonitor(**formats | settings, folder=folder, log_to=self._log)
        self._callbacks: list[TrainerCallback] = [
            self._monitor,
            *with_memory_monitor(callbacks, folder),
        ]
        self._control = TrainerControl()
        self._state = TrainerState(
            global_step=first_step,
            max_steps=max_steps or UNKNOWN_LENGTH,
            is_world_process_zero=this_rank() == 0,
            is_local_process_zero=this_rank() == 0,
        )
        self._max_steps = max_steps
        self._configuration = dict(configuration or {})
        self._has_begun = self._is_updating = False
        self._handled: BaseException | None = None
        self._requests = CheckpointRequests()
        self._owned = OwnedFolders()
        self._predecessor = _WRITERS.get(self._folder.resolve())
        optimizer = self._source.optimizer
        network = None if self._source.model is None else unwrapped_network(self._source.model)
        self._followed = step, network, optimizer and unwrapped_optimizer(optimizer)
        self._keys = {
            (self._folder.resolve(), id(one)) for one in self._followed if one is not None
        }
        self._args: LoopArguments | None = None
        self._last_report: StepReport | None = None
        self._ends: list[Callable[[], None]] = [
            self._source.call_before_update(self._before_update)
        ]
        self._replace_waiting()
        self._connect()

    def _chosen(self, trackers: Any) -> Sequence[Tracker]:
        if trackers is None:
            return [] if self._source.accelerator is None else [self._source.accelerator]
        return trackers if isinstance(trackers, (list, tuple)) else [trackers]

    def _replace_waiting(self) -> None:
        """Close older monitors of the same loop that have not begun.

        Hooks keep a monitor alive. If a notebook's cell that makes a monitor is run twice, the
        first one would begin as well, and own the folder.
        """
        for key in self._keys:
            older = _WAITING.get(key)
            if older is not None:
                older.close()
            _WAITING[key] = self

    def _end_waiting(self) -> None:
        for key in self._keys:
            if _WAITING.get(key) is self:
                del _WAITING[key]

    def _connect(self) -> None:
        """Begin at the first forward pass; follow the checkpoints and the end of the loop."""
        model = self._source.model
        if model is not None:
            hook = model.register_forward_pre_hook(self._begin_at_call, with_kwargs=True)
            keep_out_of_copies(model, hook)
            self._ends.append(hook.remove)
        if isinstance(self._source, AttachedSource):
            observers = self._source.attached.attachment.observers
            events = _AttachedEvents(self, self._monitor, self._requests, self._stop)
            observers.append(events)
            self._ends.append(lambda: observers.remove(events))
        itself, process = weakref.WeakMethod(self._close), os.getpid()

        def close_at_exit() -> None:
            close = itself()
            # What is pending is its parent's, if this is a forked process.
            if close is not None and os.getpid() == process:
                # Python keeps here what has ended the program.
                close(getattr(sys, "last_value", None))

        self._at_exit = atexit.register(close_at_exit)
        self._ends.append(lambda: atexit.unregister(close_at_exit))

    @property
    def global_step(self) -> int:
        """Number of updates so far; log your own numbers of the last update at this step."""
        return self._state.global_step

    @property
    def should_save(self) -> bool:
        """Whether `mfwrap checkpoint` has asked for a checkpoint, which is due now.

        Read it after each `end_step`, on every rank; it is the same on all ranks. If it is true,
        save as at any other step: ``accelerator.save_state`` of an attached loop answers the
        request; in any other loop the next `end_step` does. A loop that never reads it takes no
        requests. Does not synchronize with the device.
        """
        if not self._has_begun:
            return False
        if not self._requests.is_open:
            self._requests.open(self._folder)
        return self._requests.is_due(self.global_step)

    def end_step(
        self, loss: Tensor | float | None = None, *, grad_norm: Tensor | float | None = None
    ) -> None:
        """Record the update that the loop has just done. Does not synchronize with the device.

        With `attach` or a cell, it does nothing if there was no update since the last call, so a
        loop that accumulates gradients may call it after each micro-batch.

        Args:
            loss: Loss of the update, in a plain torch loop; leave it out otherwise.
            grad_norm: Norm of its gradients before clipping, in a plain torch loop.

        Raises:
            ValueError: If `loss` is missing in a plain torch loop, or given in another loop.
        """
        if isinstance(self._source, OptimizerSource) != (loss is not None):
            is_plain = isinstance(self._source, OptimizerSource)
            expected = "must be given" if is_plain else "must be left out"
            msg = (
                f"`loss` {expected} in a loop with {described(self._source.optimizer)}, got {loss}"
            )
            raise ValueError(msg)
        report = self._source.report()
        if isinstance(self._source, OptimizerSource) and loss is not None:
            output: Any = self._source.output(loss, grad_norm)
        elif report is None or report is self._last_report:
            return
        else:
            output = report.output
        self._begin()
        self._is_updating = False
        if not isinstance(self._source, AttachedSource):
            self._requests.saved(Path())
        self._last_report = report
        self._state.global_step += 1
        if self._args is not None:
            self._args.max_grad_norm = self._source.max_grad_norm
        self._send("on_step_end", step_output=output, step_report=report)
        if self._facts is not None and self._state.global_step % _STEPS_BETWEEN_TIMES == 0:
            self._facts.note(self._state.global_step)
        self._send("on_step_begin")

    def note_batch(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """Note a micro-batch whose targets the network does not get, for `replay`.

        A loss that is computed in the loop may be non-finite because they are: the record then
        names them and their rows. Call it after the forward of each micro-batch. Does not
        synchronize with the device; without ``replay=True`` it does nothing.

        Args:
            batch: All tensors of the micro-batch; those that the network got are left out.
        """
        self._monitor.take_batch(batch)

    def flush(self) -> None:
        """Write what is pending. Call it on every rank before you save a checkpoint yourself."""
        if self._has_begun:
            self._send("on_pre_save")
            if self._facts is not None:
                self._facts.note(self._state.global_step)
                self._facts.save()

    def close(self) -> None:
        """Write the last step, close all files, and stop following the loop.

        In a ``finally`` block, it also writes the error that has ended the loop.
        """
        error = sys.exception()
        # The loop as a whole may be the answer to an earlier error.
        self._close(None if error is self._handled else error)

    def _close(self, error: BaseException | None = None) -> None:
        """Close, and note what has ended the loop; ``None`` if it has ended by itself."""
        self._end_waiting()
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(ValueError):
                end()
        try:
            self._stop(error)
        finally:
            self._requests.close()
            self._owned.close()
            if _WRITERS.get(self._folder.resolve()) is self:
                del _WRITERS[self._folder.resolve()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        # An error of the loop is more important than one of its last record.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self._close(error)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the states of the monitors, ready for JSON."""
        return {
            "global_step": self._state.global_step,
            "callbacks": [dict(one.state()["attributes"]) for one in self._stateful()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: If the state is that of another list of monitors.
        """
        saved, own = state_dict["callbacks"], list(self._stateful())
        if len(saved) != len(own):
            msg = f"the state must be that of {len(own)} monitors, got {len(saved)}"
            raise ValueError(msg)
        self._stop()
        self._state.global_step = state_dict["global_step"]
        for callback, attributes in zip(own, saved, strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def _stateful(self) -> Iterator[ExportableState]:
        return (one for one in self._callbacks if isinstance(one, ExportableState))

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._own_folder()
        self._end_waiting()
        self._has_begun, self._handled = True, sys.exception()
        self._args = loop_arguments(
            self._folder,
            self._state.max_steps,
            self._source.accelerator,
            global_batch_size=self._global_batch_size,
        )
        self._last_report = self._source.report()
        for callback in self._callbacks:
            if isinstance(callback, MonitorCallback):
                callback.take_samples(None if self._growth is None else self._growth.samples)
        with owning_record_folders(self._owned):
            self._send("on_train_begin", train_dataloader=self._source.loader)
        if self._state.is_world_process_zero:
            # The monitors have checked their own files by now.
            begin_folder(self._folder)
            list_own(self._folder / _CSV)
            self._csv = CsvFile(self._folder / _CSV, self._state.global_step)
            self._facts = RunFacts(
                self._folder,
                {**self._configuration, **self._source.settings},
                self._source.model,
                first_step=self._state.global_step,
                max_steps=self._max_steps,
            )
        self._send("on_step_begin")

    def _begin_at_call(self, model: nn.Module, positional: Any, keywords: Any) -> None:
        if not self._has_begun:
            self._begin()
            # The monitors have put hooks on the model just now, which this call does not run.
            self._monitor.record_call(model, positional, keywords)

    def _own_folder(self) -> None:
        """Own the run folder, and check that the loop replaces nobody's files in it."""
        key = self._folder.resolve()
        writer = _WRITERS.get(key)
        if writer is not None and writer is not self:
            if writer is not self._predecessor:
                msg = (
                    f"{self._folder} is in use: another LoopMonitor of this program is writing it; "
                    "give each loop a folder of its own"
                )
                raise BlockingIOError(msg)
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001  (not an error of the new loop)
                run_logger(__package__).warning(
                    "The last records of an older loop in %s are missing: %s", self._folder, error
                )
        self._predecessor = None
        own = [self._folder / name for name in (_CSV, FACTS, PROGRESS)]
        self._owned.own(self._folder, lambda: check_own(own))
        _WRITERS[key] = self

    def _before_update(self) -> None:
        self._begin()
        # Several optimizers make one update: what the weights were is known before the first one.
        if not self._is_updating:
            self._is_updating = True
            self._send("on_pre_optimizer_step")

    def _stop(self, error: BaseException | None = None) -> None:
        if self._has_begun:
            self._has_begun = False
            self._send("on_train_end")
            if self._facts is not None and isinstance(error, Exception):
                self._facts.fail(error, self._state.global_step)
            elif self._facts is not None:
                self._facts.end(self._state.global_step)
            self._facts = None

    def _send(self, event: str, **keywords: Any) -> None:
        known = {"model": self._source.model, "optimizer": self._source.optimizer, **keywords}
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self._args, self._state, self._control, **known)

    def _log(self, values: dict[str, float], step: int) -> None:
        """Write a step's numbers to the CSV file and the trackers; on the main process only."""
        if self._csv is not None:
            self._csv.append(step, values)
        self._trackers.log(values, step)


@final
class _AttachedEvents:
    """Pass the events of an attached loop on to a `LoopMonitor`; see `LoopObserver`."""

    def __init__(
        self,
        monitor: LoopMonitor,
        steps: TrainingStateMonitor,
        requests: CheckpointRequests,
        stop: Callable[[], None],
    ) -> None:
        self._monitor = monitor
        self._steps = steps
        self._requests = requests
        self._stop = stop

    def before_save(self, folder: Path) -> None:
        """Write what is pending, and the monitors' state into a checkpoint of `attach`."""
        self._monitor.flush()
        if this_rank() == 0:
            with whole_file(folder / LOOP_STATE) as partial:
                partial.write_text(json.dumps(self._monitor.state_dict()), encoding="utf-8")

    def after_save(self, folder: Path) -> None:
        """Answer a request for the checkpoint of `attach`."""
        self._requests.saved(folder.absolute())

    def after_load(self, folder: Path) -> None:
        """Continue from a checkpoint of `attach`; one without a state begins at `global_step`."""
        self._stop()
        if (folder / LOOP_STATE).is_file():
            self._monitor.load_state_dict(json_content(folder / LOOP_STATE))

    def after_backward(self) -> None:
        """Write the record of the last update, before the loop logs numbers of the next one."""
        # Forward and backward are queued, so the device has work while the host waits, as it does
        # just before the update. The record is older than that work.
        self._steps.write(waits=True)

    def before_log(self, step: int | None) -> None:
        """Write the record of the last update if the loop logs the next one, before its backward.

        The record is not written before numbers of the last update itself, whatever they are
        counted in: trackers that have one row for each step then show both in one row.
        """
        if step == self._monitor.global_step + 1:
            # The device may not have any other work, so the host must not wait here.
            self._steps.write(waits=False)

    def before_end(self) -> None:
        """Write the last step, because the trackers are about to be closed."""
        self._monitor.close()
