"""What the training state monitor puts together when a run begins."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from mfwrap.callbacks.culprit.anomaly_log import AnomalyLog, rank_file
from mfwrap.callbacks.culprit.evidence import this_rank
from mfwrap.callbacks.culprit.finder import CulpritFinder
from mfwrap.callbacks.culprit.recorder import StepRecorder, inner_network
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.shared.run_size import RunLength, global_batch_size, num_processes, run_length
from mfwrap.callbacks.shared.step_clock import StepClock
from mfwrap.callbacks.training_state.checks import SpikeCount, SpikeGuard
from mfwrap.callbacks.training_state.forward_watches import forward_watches
from mfwrap.callbacks.training_state.run import RunParts
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.callbacks.training_state.writers import MetricWriters
from mfwrap.tensors.wrappers import plain_network, trainable

__all__ = ["log_structure", "missing_values", "run_parts", "samples_per_process"]

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
            None if model is None else plain_network(model),
            is_compiled=_is_compiled(model, args),
        ),
    )
    return parts, StepClock(clock)


def samples_per_process(
    settings: TrainingStateSettings, args: TrainingArguments | None, state: TrainerState
) -> float:
    """Return the samples of one update on one process; 0 if they are not known."""
    return (settings.global_batch_size or global_batch_size(args, state)) / num_processes()


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
        None if model is None else plain_network(model),
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
