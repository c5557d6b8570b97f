"""Save checkpoints by steps or time, record their health, and delete old checkpoints."""

import functools
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from mfwrap import DeferredReads, LocalNormStepOutput, StepOutput, StepReport
from mfwrap.arguments import check_bool, check_int, check_positive_number
from mfwrap.callbacks.checkpoint_health import (
    HEALTH_FILE,
    CheckpointHealth,
    health_of,
    recorded_health,
)
from mfwrap.callbacks.culprit.good_checkpoints import to_return_to
from mfwrap.callbacks.shared.non_finite import BufferWatch, bad_optimizer_states, bad_weights
from mfwrap.callbacks.shared.norm_history import GlobalNormHistory
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.training_weights import monitors_training
from mfwrap.checkpoints.run_folders import remove_checkpoints
from mfwrap.checkpoints.written_files import list_own
from mfwrap.collectives import broadcast_from_main, gather_objects
from mfwrap.records.json_lines import JsonLines
from mfwrap.records.own_names import begin_folder, own_checkpoints
from mfwrap.records.run_files import open_records
from mfwrap.tensors.shards import meeting_device, on_device
from mfwrap.trainer import MonitorCallback

_PREFIX = "checkpoint-"
_SPIKE_FACTOR = 10.0


@final
@monitors_training
class CheckpointMonitor(MonitorCallback, ExportableState):
    """Make a Trainer save by steps or time, keep the newest checkpoints, and record their health.

    The Trainer writes ``checkpoint-<step>``. Set the Trainer's ``save_strategy`` to ``"no"``;
    otherwise the Trainer also saves by its own strategy. Leave its ``save_total_limit`` unset. A
    checkpoint is always saved after the last update of a training.

    ``checkpoint_health.jsonl`` in the run folder gets one line for each checkpoint (fields:
    `CheckpointHealth`). A checkpoint is healthy if all of these conditions hold on all ranks:

    - Weights, buffers and the optimizer's state are finite. A buffer that holds an infinity from
      the start, such as a mask, may keep it.
    - The loss of the last update is finite.
    - At most `most_skips` updates in a row were skipped before the checkpoint.
    - The global norm of the gradients is not a spike.
    - The gradient norm of embeddings is below `embedding_local_norm_threshold`, if that is set.

    `newest_healthy_checkpoint` returns the checkpoint to resume from. A checkpoint without a line,
    for example after a crash, does not count as healthy.

    Time is measured on the main process. When `save_checkpoint_seconds` have passed, all ranks
    request a checkpoint one step later, so that no step synchronizes with the device. With a
    Trainer, each checkpoint also contains the running mean of the global norm, which spikes are
    measured against.

    Source: MindFormers, ``CheckpointMonitor``, which checks only the embedding, and only in
    pipelines, and may resume from an unhealthy checkpoint.

    Args:
        save_checkpoint_steps: Steps from one checkpoint to the next; 0 turns saving by steps off.
        save_checkpoint_seconds: Seconds from one checkpoint to the next; 0 turns saving by time
            off.
        keep_checkpoint_max: Number of newest checkpoints to keep; 0 keeps all. The newest healthy
            checkpoint, that from before a divergence, and the Trainer's best checkpoint are kept in
            addition.
        use_checkpoint_health_monitor: Record the health of each checkpoint.
        embedding_local_norm_threshold: A checkpoint is unhealthy if the local norm of an
            embedding's gradient reaches this number; ``None`` turns the check off. This number is a
            norm. MindFormers' setting is the square of a norm.
        embedding_pattern: Regular expression. A group of gradients belongs to an embedding if the
            expression is found in the name of the group.
        most_skips: Largest number of skipped updates in a row that is still healthy.
        async_save: Whether `MFTrainer` writes checkpoints in the background, as with its argument
            of this name.
        clock: Returns seconds from an arbitrary start.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. At the start of training, if the Trainer has a
            ``save_total_limit``, or if it is no `MFTrainer` and `async_save` is set.
    """

    saves_checkpoints = True

    def __init__(
        self,
        save_checkpoint_steps: int = 0,
        save_checkpoint_seconds: float = 0,
        keep_checkpoint_max: int = 5,
        *,
        use_checkpoint_health_monitor: bool = True,
        embedding_local_norm_threshold: float | None = None,
        embedding_pattern: str = "embed|wte",
        most_skips: int = 2,
        async_save: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (
            ("save_checkpoint_steps", save_checkpoint_steps),
            ("keep_checkpoint_max", keep_checkpoint_max),
            ("most_skips", most_skips),
        ):
            check_int(name, value, minimum=0)
        check_bool("use_checkpoint_health_monitor", use_checkpoint_health_monitor)
        check_bool("async_save", async_save)
        if save_checkpoint_seconds != 0:
            check_positive_number("save_checkpoint_seconds", save_checkpoint_seconds, finite=True)
        if embedding_local_norm_threshold is not None:
            check_positive_number(
                "embedding_local_norm_threshold", embedding_local_norm_threshold, finite=True
            )
        if not save_checkpoint_steps and not save_checkpoint_seconds:
            msg = "`save_checkpoint_steps` or `save_checkpoint_seconds` must be > 0, got 0 for both"
            raise ValueError(msg)
        self._settings = {
            "save_checkpoint_steps": save_checkpoint_steps,
            "save_checkpoint_seconds": save_checkpoint_seconds,
            "keep_checkpoint_max": keep_checkpoint_max,
            "use_checkpoint_health_monitor": use_checkpoint_health_monitor,
            "embedding_local_norm_threshold": embedding_local_norm_threshold,
            "embedding_pattern": embedding_pattern,
            "most_skips": most_skips,
            "async_save": async_save,
        }
        self.saves_in_background = async_save
        self._may_save_in_background = False
        self._steps, self._seconds = save_checkpoint_steps, save_checkpoint_seconds
        self._keep = keep_checkpoint_max
        self._records_health = use_checkpoint_health_monitor
        self._embedding_limit = embedding_local_norm_threshold
        self._embedding = re.compile(embedding_pattern)
        self._most_skips = most_skips
        self._clock = clock
        self._buffers: BufferWatch | None = None
        self.saved_run: dict[str, Any] | None = None
        """State that an earlier run saved; ignored by a run that begins at another step."""
        self._lines: JsonLines | None = None
        self._folder = Path()
        self._begin(0)

    def _begin(self, global_step: int) -> None:
        self._history = GlobalNormHistory(_SPIKE_FACTOR)
        self._skips_before = 0
        if self.saved_run is not None and self.saved_run["global_step"] == global_step:
            self._history.load_state_dict(self.saved_run["global_norm"])
            self._skips_before = self.saved_run["skipped_updates"]
        self._step = global_step
        self._last: dict[str, float] = {}
        self._is_spike = False
        self._reads = DeferredReads()
        self._is_time = False
        self._recorded_step: int | None = None
        self._saved_at = self._clock()

    def state(self) -> dict[str, Any]:
        """Return the state for the Trainer's checkpoint; synchronizes with the device.

        Returns:
            Settings as ``args``, running norm and skip count as ``attributes``, ready for JSON.
        """
        self._reads.flush()
        saved = {
            "global_step": self._step,
            "global_norm": self._history.state_dict(),
            "skipped_updates": int(self._last.get("skipped_updates", self._skips_before)),
        }
        return {"args": dict(self._settings), "attributes": {"saved_run": saved}}

    def expect_background_saves(self) -> None:
        """Learn that `MFTrainer` takes the setting `async_save`."""
        self._may_save_in_background = True

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        model: nn.Module | None = None,
        **__: Any,
    ) -> None:
        """Start the clock, and note which buffers hold infinities from the start.

        Raises:
            OSError: If files cannot be written to the run folder.
            ValueError: If the Trainer has a ``save_total_limit``, or does not know `async_save`.
        """
        if self.saves_in_background and not self._may_save_in_background:
            msg = "`async_save` must be False in a Trainer other than MFTrainer, got True"
            raise ValueError(msg)
        if self._keep and args.save_total_limit is not None:
            msg = (
                f"the Trainer's save_total_limit={args.save_total_limit} and keep_checkpoint_max="
                f"{self._keep} would both delete checkpoints; leave `save_total_limit` unset, or "
                "set keep_checkpoint_max=0"
            )
            raise ValueError(msg)
        self._buffers = BufferWatch(model) if self._records_health and model is not None else None
        self._folder = Path(args.output_dir or ".")
        self._begin(state.global_step)
        self._lines = None
        if self._records_health and state.is_world_process_zero:
            self._lines = open_records(self._folder / HEALTH_FILE, state.global_step)
        if self._keep and state.is_world_process_zero:
            begin_folder(self._folder)
            if state.global_step:
                # The earlier process may have been killed after it saved a checkpoint and before
                # it deleted the old ones. Delete them now.
                rotate_checkpoints(self._folder, self._keep, state.best_model_checkpoint)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *_: Any,
        step_output: StepOutput | LocalNormStepOutput | None = None,
        step_report: StepReport | None = None,
        **__: Any,
    ) -> None:
        """Request a checkpoint if one is due; start copying the values that decide its health."""
        self._reads.flush()
        self._step = state.global_step
        by_steps = bool(self._steps) and state.global_step % self._steps == 0
        if by_steps or self._is_time or state.global_step >= state.max_steps:
            control.should_save = True
            self._is_time = False
            # Restart the interval already here. `on_save` restarts it too, but only after
            # `_keep_values` below has checked whether the interval is over.
            self._saved_at = self._clock()
        self._keep_values(step_output, step_report, args.device)

    def on_pre_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Record the health of the checkpoint that is about to be written."""
        del args, control
        self._reads.flush()
        if not self._records_health:
            return
        self._recorded_step = state.global_step
        name = f"{_PREFIX}{state.global_step}"
        health = self._health(name, state.global_step, model, optimizer)
        if self._lines is not None:
            self._lines.append(asdict(health))
            if not health.healthy:
                reasons = ", ".join(health.reasons)
                run_logger(__name__).warning("%s is unhealthy: %s", name, reasons)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Record the checkpoint's health if `on_pre_save` was not called; delete old ones."""
        if self._recorded_step != state.global_step:
            self.on_pre_save(args, state, control, model, optimizer)
        self._recorded_step = None
        self._is_time = False
        if self._keep and state.is_world_process_zero:
            # Only what this training saves is deleted later. A stock Trainer writes no manifest.
            list_own(self._folder / f"{_PREFIX}{state.global_step}")
            rotate_checkpoints(self._folder, self._keep, state.best_model_checkpoint)
        self._saved_at = self._clock()

    def _keep_values(self, output: Any, report: StepReport | None, device: torch.device) -> None:
        """Start copying a step's values and the main process's time flag to the host.

        Args:
            output: Output of the step; ``None`` if the loop passes none.
            report: Report of the step; ``None`` if the loop passes none.
            device: Training device, used if there is no output.
        """
        values: dict[str, Tensor] = {}
        if output is not None:
            values = {"loss": output.loss, "overflow": output.overflow}
            if output.global_norm is not None:
                values["global_norm"] = output.global_norm
        if report is not None:
            values["skipped"] = report.skipped
            values["consecutive_skips"] = report.consecutive_skips
            values["skipped_updates"] = report.skipped_updates
            embedding = self._embedding_norm(report)
            if embedding is not None:
                values["embedding_norm"] = embedding
        if self._seconds:
            values["is_time"] = self._time_flag(device if output is None else output.loss.device)
        if not values:
            return
        device = meeting_device(values.values())
        together = torch.stack(
            [on_device(value.detach().float().reshape(()), device) for value in values.values()]
        )
        self._reads.submit(together, functools.partial(self._receive, tuple(values)))

    def _embedding_norm(self, report: StepReport) -> Tensor | None:
        output = report.output
        if self._embedding_limit is None or not isinstance(output, LocalNormStepOutput):
            return None
        numbers = [
            number
            for number, name in enumerate(report.local_norm_names)
            if self._embedding.search(name)
        ]
        return torch.stack([output.local_norm[n] for n in numbers]).max() if numbers else None

    def _time_flag(self, device: torch.device) -> Tensor:
        is_time = self._clock() - self._saved_at >= self._seconds
        flag = torch.full((), float(is_time), device=device)
        broadcast_from_main(flag)
        return flag

    def _receive(self, names: Sequence[str], host_values: Sequence[float]) -> None:
        self._last = dict(zip(names, host_values, strict=True))
        self._is_time = bool(self._last.pop("is_time", False)) or self._is_time
        norm = self._last.get("global_norm")
        self._is_spike = norm is not None and self._history.is_spike(norm)
        # Leave out skipped updates: their norms would distort the usual norm.
        if norm is not None and not self._last.get("skipped"):
            self._history.add(norm)

    def _health(
        self, name: str, step: int, model: nn.Module | None, optimizer: Any
    ) -> CheckpointHealth:
        known = self._last
        skips = known.get("consecutive_skips")
        own = health_of(
            known,
            embedding_limit=self._embedding_limit,
            most_skips=self._most_skips,
            is_spike=self._is_spike,
            non_finite=self._non_finite(model, optimizer),
        )
        reasons = tuple(dict.fromkeys(itertools.chain.from_iterable(gather_objects(own))))
        return CheckpointHealth(
            checkpoint=name,
            step=step,
            healthy=not reasons,
            reasons=reasons,
            loss=known.get("loss"),
            global_norm=known.get("global_norm"),
            embedding_norm=known.get("embedding_norm"),
            consecutive_skips=None if skips is None else int(skips),
            skips_since_last=self._skips_since_last(),
        )

    def _non_finite(self, model: nn.Module | None, optimizer: Any) -> dict[str, tuple[str, ...]]:
        """Return the names of non-finite tensors of this rank by kind; synchronizes."""
        if model is None:
            return {}
        if self._buffers is None:
            self._buffers = BufferWatch(model)
        return {
            "weight": bad_weights(model),
            "buffer": self._buffers.bad(),
            "optimizer state": () if optimizer is None else bad_optimizer_states(model, optimizer),
        }

    def _skips_since_last(self) -> int | None:
        if "skipped_updates" not in self._last:
            return None
        before, self._skips_before = self._skips_before, int(self._last["skipped_updates"])
        return self._skips_before - before


def rotate_checkpoints(run_folder: Path, num_kept: int, best: str | None) -> None:
    """Delete the oldest checkpoints of a run; those that mfwrap has not written stay.

    Args:
        run_folder: Folder of the checkpoints.
        num_kept: Number of newest checkpoints to keep, >= 1. The newest checkpoint that was
            recorded as healthy is kept in addition, and if a `TrainingStateMonitor` has found that
            the loss has left its course, the newest healthy one from before.
        best: Folder of the Trainer's best checkpoint, which is kept in addition; ``None`` if there
            is no best checkpoint.
    """
    ordered = own_checkpoints(run_folder)
    kept = set(ordered[-num_kept:])
    healthy = recorded_health(run_folder)
    found = [path for path in ordered if healthy.get(path.name)]
    kept |= {*found[-1:], *to_return_to(run_folder, found or ordered)}
    if best is not None:
        kept |= {path for path in ordered if path.resolve() == Path(best).resolve()}
    remove_checkpoints([path for path in ordered if path not in kept], run_folder)
