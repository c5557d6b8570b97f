"""Make the finder that the settings of the training state monitor request."""

from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from mfwrap.callbacks.culprit.finder import CulpritFinder
from mfwrap.callbacks.culprit.rank_evidence import LARGEST_FLOAT16
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder, inner_network
from mfwrap.callbacks.culprit.replay.reference import References
from mfwrap.callbacks.culprit.replay.samples import SampleSearch
from mfwrap.callbacks.shared.run_log import run_logger
from mfwrap.callbacks.training_state.settings import TrainingStateSettings
from mfwrap.compatibility.accelerate import computes_in_autocast
from mfwrap.compatibility.torch import COMPILED_MODULE
from mfwrap.records.skipped_rows import RowPlaces
from mfwrap.tensors.wrappers import unwrapped_network

_LARGEST_NORM: float = torch.finfo(torch.float32).max ** 0.5
"""Largest norm whose square float32 can hold. A step with a larger norm overflows."""


def new_finder(
    settings: TrainingStateSettings,
    args: TrainingArguments | None,
    model: nn.Module | None,
    global_step: int,
    *,
    tokenizer: Any = None,
    row_places: RowPlaces | None = None,
) -> CulpritFinder:
    """Return the finder of a run.

    Logs a warning if a replay is requested and not possible.

    Args:
        settings: Settings of the monitor.
        args: Arguments of the Trainer; ``None`` in a loop without a Trainer.
        model: Network, with its wrappers; ``None`` if unknown.
        global_step: Finished steps.
        tokenizer: Decodes the texts of samples; ``None`` if unknown.
        row_places: Tells where rows are in the training data; ``None`` if that is unknown.
    """
    recorder = _recorder(model, args) if settings.replay else None
    samples = None
    if recorder is not None:
        samples = SampleSearch(
            recorder,
            shows_texts=settings.show_samples,
            tokenizer=tokenizer,
            row_places=row_places,
        )
    return CulpritFinder(
        None if model is None else unwrapped_network(model),
        spike_factor=settings.spike_factor,
        limit=_largest_gradient(model, args),
        state_interval=settings.state_interval,
        step=global_step,
        recorder=recorder,
        samples=samples,
        references=None if recorder is None else References(recorder),
    )


def _recorder(model: nn.Module | None, args: TrainingArguments | None) -> StepRecorder | None:
    if model is None:
        return None
    # Hooks would force a recompilation.
    network = None if is_compiled(model, args) else inner_network(model)
    if network is None:
        run_logger(__package__).warning(
            "TrainingStateMonitor cannot replay steps of a network that is compiled or sharded, or "
            "that holds a SyncBatchNorm"
        )
        return None
    return StepRecorder(network)


def is_compiled(model: nn.Module | None, args: TrainingArguments | None) -> bool:
    """Return whether a network is compiled, or will be by the Trainer."""
    modules = () if model is None else model.modules()
    by_trainer = args is not None and bool(args.torch_compile)
    return by_trainer or any(hasattr(module, COMPILED_MODULE) for module in modules)


def _largest_gradient(model: nn.Module | None, args: TrainingArguments | None) -> float:
    """Return the largest number that a gradient can hold; assume float16 if it may be in use."""
    if model is None or (args is not None and args.fp16):
        return LARGEST_FLOAT16
    # If accelerate has wrapped the forward in autocast, the autocast's dtype is unknown here.
    may_be_float16 = computes_in_autocast(model) and not (args is not None and args.bf16)
    if may_be_float16 or any(p.dtype == torch.float16 for p in model.parameters()):
        return LARGEST_FLOAT16
    return _LARGEST_NORM
