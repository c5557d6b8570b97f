"""One run of training as the training state monitor sees it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerState, TrainingArguments

from mfwrap import DeferredReads, StepReport
from mfwrap.callbacks.culprit.anomaly_log import AnomalyLog, rank_file
from mfwrap.callbacks.culprit.finder import (
    CulpritFinder,
    StepEvidence,
)
from mfwrap.callbacks.culprit.replay import StepRecorder, inner_network
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.run_size import (
    RunLength,
    RunPosition,
    global_batch_size,
    run_length,
)
from mfwrap.callbacks.shared.step_clock import StepClock
from mfwrap.callbacks.shared.step_values import (
    PackedValues,
    ReadStep,
    StepNumbers,
    StepValues,
    numbers_of,
    pack_step,
    skip_flag,
    unpack_step,
)
from mfwrap.callbacks.training_state.checks import SpikeCount, SpikeGuard, check_finite
from mfwrap.callbacks.training_state.forward_watches import (
    ForwardNumbers,
    ForwardWatches,
    forward_watches,
)
from mfwrap.callbacks.training_state.metrics import Metric, StateMetrics
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.callbacks.training_state.writers import MetricWriters
from mfwrap.collectives import num_ranks, this_rank
from mfwrap.tensors.wrappers import trainable, unwrapped_network

__all__ = [
    "RunParts",
    "TrainingStateRun",
    "log_structure",
    "missing_values",
    "run_parts",
    "samples_per_process",
]


_LINEARITY = "throughput_linearity"


class RunParts(NamedTuple):
    """What a run is monitored with."""

    length: RunLength
    writers: MetricWriters
    finder: CulpritFinder | None
    anomalies: AnomalyLog
    spike_guard: SpikeGuard | None
    spike_count: SpikeCount | None
    watches: ForwardWatches | None


class _Step(NamedTuple):
    """What is known on the host when a step ends."""

    number: int
    position: RunPosition
    packed: PackedValues | None
    metrics: tuple[Metric, ...]
    linearity: float | None
    evidence: StepEvidence


@final
class TrainingStateRun:
    """Follow the steps of a run; their values arrive a step late.

    Args:
        settings: Of the monitor.
        parts: What it is monitored with.
        clock: Of the steps.
        global_step: Steps done before the first one.
        samples_per_process: Of one update on one process; 0 is unknown.
        is_main: Whether this is the main process.
    """

    def __init__(
        self,
        settings: TrainingStateSettings,
        parts: RunParts,
        *,
        clock: StepClock,
        global_step: int,
        samples_per_process: float,
        is_main: bool,
    ) -> None:
        self.parts = parts
        self.clock = clock
        self._settings = settings
        self._metrics = StateMetrics(settings)
        self._samples = samples_per_process
        self._is_main = is_main
        self._reads: DeferredReads | None = None
        self._weights_have_moved = False
        self._is_watched = False
        self._last_scale: float | None = None
        self.last_step = global_step
        self.has_outputs = False
        """A step of this run has had an output."""

    def begin_step(self, global_step: int) -> None:
        """Watch the forwards of a step, if it is one that is shown.

        Args:
            global_step: Steps done, this one included.
        """
        self._is_watched = self.parts.watches is not None and self._metrics.is_due(global_step)
        if self.parts.watches is not None and self._is_watched:
            self.parts.watches.begin()

    def end_step(
        self,
        global_step: int,
        output: Any,
        report: StepReport | None,
        *,
        scale_before: Tensor | None,
        model: nn.Module | None,
        optimizer: Optimizer | None,
    ) -> None:
        """Act on the step before; keep what is needed of this one. Does not wait for it.

        Args:
            global_step: Steps done, this one included.
            output: Of the step; ``None`` if there is none.
            report: Of the step; ``None`` if there is none.
            scale_before: Shape ``()``: the loss scale that the step used; ``None`` if unknown.
            model: Whose weights are shown.
            optimizer: Whose state is shown.
        """
        # What is still pending was decided before this step's update, which is done by now.
        self.flush(weights_have_moved=True)
        if self.parts.finder is not None and self.parts.finder.recorder is not None:
            self.parts.finder.recorder.end_step()
        self.clock.end_step()
        self.last_step = global_step
        names = () if report is None else report.local_norm_names
        shown = self._metrics.of_step(
            global_step, output, names, model, optimizer, self._forward_numbers()
        )
        skipped = skip_flag(output, report)
        evidence = StepEvidence((), None, None)
        if self.parts.finder is not None:
            applied = None if skipped is None else ~skipped
            evidence = self.parts.finder.end_step(output, names, applied)
        packed = None
        if output is not None:
            self.has_outputs = True
            packed = pack_step(output, report, skipped=skipped, scale_before=scale_before)
        step = _Step(
            number=global_step,
            position=self.parts.length.position(global_step),
            packed=packed,
            metrics=shown.metrics,
            linearity=self._linearity() if self._metrics.is_due(global_step) else None,
            evidence=evidence,
        )
        self._submit(step, shown.values)

    def _forward_numbers(self) -> ForwardNumbers | None:
        watched, self._is_watched = self._is_watched, False
        return self.parts.watches.end() if watched and self.parts.watches is not None else None

    def _submit(self, step: _Step, shown: Tensor | None) -> None:
        values = [] if step.packed is None else [step.packed.tensor]
        if shown is not None:
            values.append(shown)
        if not values:
            self._write(step, [], None)
            return
        device = values[0].device
        if self._reads is None:
            self._reads = DeferredReads(device)
        together = torch.cat([value.to(device, non_blocking=True) for value in values])
        self._reads.submit(together, functools.partial(self._receive, step))

    def flush(self, *, weights_have_moved: bool = False) -> None:
        """Wait for what is pending of the last step, and act on it.

        Args:
            weights_have_moved: A later update has been done already.

        Raises:
            RuntimeError: As `SpikeGuard.check`.
            ValueError: As `check_finite` and `SpikeCount.check`.
        """
        if self._reads is not None:
            self._weights_have_moved = weights_have_moved
            self._reads.flush()

    def log(self, global_step: int, logs: Mapping[str, Any]) -> None:
        """Judge what a loop without outputs logs.

        Raises:
            RuntimeError: As `flush`.
            ValueError: As `flush`.
        """
        numbers = {
            name: float(value)
            for name in ("loss", "grad_norm")
            if isinstance(value := logs.get(name), (int, float))
        }
        if "loss" not in numbers:
            return
        norm = numbers.get("grad_norm")
        overflow = norm is not None and not math.isfinite(norm)
        values = StepValues(loss=numbers["loss"], overflow=overflow, global_norm=norm)
        self._judge(numbers_of(global_step, values), StepEvidence((), None, None))

    def _receive(self, step: _Step, host_values: Sequence[float]) -> None:
        num_values = 0 if step.packed is None else len(step.packed.names)
        read = None if step.packed is None else unpack_step(step.packed, host_values[:num_values])
        self._write(step, host_values[num_values:], read)
        if read is None:
            return
        numbers = numbers_of(step.number, *read, last_scale=self._last_scale)
        self._last_scale = read.values.loss_scale
        self._judge(numbers, step.evidence)

    def _write(self, step: _Step, values: Sequence[float], read: ReadStep | None) -> None:
        metrics, shown = list(step.metrics), list(values)
        if step.linearity is not None:
            formats = {"log"} | self._settings.formats
            if self._settings.tensorboard_dir is not None:
                formats |= {"tensorboard"}
            metrics.append(Metric(_LINEARITY, tuple(sorted(formats))))
            shown.append(step.linearity)
        if metrics:
            numbers = {} if read is None else read.shown()
            self.parts.writers.write(step.position, metrics, shown, numbers)

    def _judge(self, numbers: StepNumbers, evidence: StepEvidence) -> None:
        parts, settings = self.parts, self._settings
        anomaly = None
        if parts.finder is not None:
            moved = self._weights_have_moved
            anomaly = parts.finder.judge(numbers, evidence, weights_have_moved=moved)
            is_shared = numbers.overflow or (anomaly is not None and anomaly.kind == "spike")
            if anomaly is not None and (self._is_main or not is_shared):
                parts.anomalies.write(anomaly)
        is_ordinary = numbers.overflow and parts.finder is not None and anomaly is None
        if settings.check_for_nan_in_loss_and_grad and not is_ordinary:
            check_finite(numbers)
        if numbers.global_norm is not None and not numbers.overflow:
            for check in (parts.spike_guard, parts.spike_count):
                if check is not None:
                    check.check(numbers.step, numbers.global_norm)

    def _linearity(self) -> float | None:
        baseline = self._settings.throughput_baseline
        if baseline is None:
            return None
        seconds = self.clock.end_lap()
        return self._samples / seconds / baseline if seconds and self._samples else None

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on after a resume, as JSON can hold it; call `flush` first."""
        parts = self.parts
        return {
            "global_step": self.last_step,
            "last_scale": self._last_scale,
            "finder": None if parts.finder is None else parts.finder.state_dict(),
            "spike_count": None if parts.spike_count is None else parts.spike_count.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, if it is of the step that the run begins at."""
        if state["global_step"] != self.last_step:
            return
        self._last_scale = state["last_scale"]
        for part, saved in (
            (self.parts.finder, state["finder"]),
            (self.parts.spike_count, state["spike_count"]),
        ):
            if part is not None and saved is not None:
                part.load_state_dict(saved)

    def close(self) -> None:
        """Close files, and let go of what was recorded."""
        self.parts.writers.close()
        if self.parts.watches is not None:
            self.parts.watches.close()
        if self.parts.finder is not None and self.parts.finder.recorder is not None:
            self.parts.finder.recorder.close()


_LARGEST_FLOAT16 = 65504.0
_LARGEST_NORM: float = torch.finfo(torch.float32).max ** 0.5
"""The largest norm whose square float32 can hold: beyond it the step sees an overflow."""


def run_parts(
    settings: TrainingStateSettings,
    args: TrainingArguments | None,
    state: TrainerState,
    known: Mapping[str, Any],
    clock: Callable[[], float],
    log_to: Callable[[dict[str, float], int], None] | None,
) -> tuple[RunParts, StepClock]:
    """Make the parts of a run, and its clock.

    Args:
        settings: Of the monitor.
        args: Of the Trainer; ``None`` in another loop.
        state: Of the loop.
        known: What else the event tells: ``model``, ``train_dataloader``.
        clock: Returns seconds from an arbitrary start.
        log_to: Takes what is for trackers; ``None`` for none.

    Raises:
        ValueError: If the length of the run, or a folder that is needed, is not known.
    """
    folder = _folder(settings, args)
    rank, is_main = this_rank(), state.is_world_process_zero
    events = None if settings.tensorboard_dir is None else Path(settings.tensorboard_dir)
    if events is not None and rank:
        events /= f"rank_{rank}"
    lines = "jsonl" in settings.formats and folder is not None
    threshold = settings.global_norm_spike_threshold
    model = known.get("model")
    parts = RunParts(
        length=_length(settings, args, state, known.get("train_dataloader")),
        writers=MetricWriters(
            logs=is_main,
            tensorboard=events,
            json_lines=rank_file(folder, "training_state", rank) if lines and folder else None,
            log_to=log_to if is_main else None,
            max_grad_norm=None if args is None else args.max_grad_norm or None,
        ),
        finder=_finder(settings, args, model) if settings.find_culprit else None,
        anomalies=AnomalyLog(folder, rank),
        spike_guard=SpikeGuard(threshold, folder, writes=is_main)
        if settings.check_for_global_norm
        else None,
        spike_count=SpikeCount(threshold, settings.global_norm_spike_count_threshold)
        if settings.use_skip_data_by_global_norm
        else None,
        watches=forward_watches(
            settings,
            None if model is None else unwrapped_network(model),
            is_compiled=_is_compiled(model, args),
        ),
    )
    return parts, StepClock(clock)


def samples_per_process(
    settings: TrainingStateSettings, args: TrainingArguments | None, state: TrainerState
) -> float:
    """Return the samples of one update on one process; 0 if they are not known."""
    return (settings.global_batch_size or global_batch_size(args, state)) / num_ranks()


def _folder(settings: TrainingStateSettings, args: TrainingArguments | None) -> Path | None:
    if settings.folder is not None:
        return Path(settings.folder)
    if args is not None and args.output_dir is not None:
        return Path(args.output_dir)
    if "jsonl" in settings.formats:
        msg = "`folder` must be given for the format 'jsonl' in a loop of your own, got None"
        raise ValueError(msg)
    return None


def _length(
    settings: TrainingStateSettings,
    args: TrainingArguments | None,
    state: TrainerState,
    train_dataloader: Any,
) -> RunLength:
    return run_length(
        state,
        args,
        train_dataloader,
        origin_epochs=settings.origin_epochs,
        dataset_size=settings.dataset_size,
        initial_epoch=settings.initial_epoch,
        initial_step=settings.initial_step,
    )


def _finder(
    settings: TrainingStateSettings, args: TrainingArguments | None, model: nn.Module | None
) -> CulpritFinder:
    return CulpritFinder(
        None if model is None else unwrapped_network(model),
        spike_factor=settings.spike_factor,
        limit=_largest_gradient(model, args),
        recorder=_recorder(model, args) if settings.replay else None,
    )


def _recorder(model: nn.Module | None, args: TrainingArguments | None) -> StepRecorder | None:
    network = None if model is None or _is_compiled(model, args) else inner_network(model)
    if network is not None:
        return StepRecorder(network)
    if model is not None:
        run_logger(__package__).warning(
            "TrainingStateMonitor cannot replay steps of a network that is compiled or sharded"
        )
    return None


def _is_compiled(model: nn.Module | None, args: TrainingArguments | None) -> bool:
    modules = () if model is None else model.modules()
    by_trainer = args is not None and bool(args.torch_compile)
    return by_trainer or any(hasattr(module, "_orig_mod") for module in modules)


def _largest_gradient(model: nn.Module | None, args: TrainingArguments | None) -> float:
    """Return the largest gradient that is finite, in float16 wherever that may be in use."""
    if model is None or (args is not None and args.fp16):
        return _LARGEST_FLOAT16
    # accelerate has put its autocast around the forward, in a type that only it knows.
    may_be_float16 = hasattr(model, "_original_forward") and not (args is not None and args.bf16)
    if may_be_float16 or any(p.dtype == torch.float16 for p in model.parameters()):
        return _LARGEST_FLOAT16
    return _LARGEST_NORM


def missing_values(
    settings: TrainingStateSettings, output: Any, known: Mapping[str, Any]
) -> list[str]:
    """Say what cannot be shown in a loop.

    Args:
        settings: Of the monitor.
        output: Of a step; ``None`` if the loop passes none.
        known: What else the end of a step tells: ``model``, ``optimizer``.
    """
    missing = []
    if output is None:
        missing.append("without `step_output`: local norms, losses, the layer of an anomaly")
    elif not hasattr(output, "local_norm"):
        missing.append("without StepConfig(local_norm=True): local norms, the layer of an anomaly")
    if known.get("model") is None:
        if settings.weight_state_format or settings.optimizer_state_format or settings.replay:
            missing.append("without `model`: weights, optimizer state, a replay")
    elif known.get("optimizer") is None and settings.optimizer_state_format:
        missing.append("without `optimizer`: optimizer state")
    return missing


def log_structure(model: nn.Module | None) -> None:
    """Log names and shapes of all trainable parameters."""
    for name, parameter in {} if model is None else trainable(model).items():
        run_logger(__package__).info("%s %s", name, tuple(parameter.shape))
