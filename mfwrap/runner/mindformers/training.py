"""Convert the sizes, the length and the parallel layout of a MindFormers training."""

from dataclasses import fields
from typing import Any, NamedTuple

from transformers import TrainingArguments

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.evaluation import take_evaluation
from mfwrap.runner.mindformers.source import SourceFile

_DATA_PARALLEL = (0, "data_parallel", "0", "stand_alone")
_POSITION = (
    "has_trained_epoches",
    "has_trained_steps",
    "initial_epoch",
    "initial_step",
)
"""Keys of ``runner_config`` that are the position of an earlier run, 0 for none."""

_RUNNER_WITHOUT_EFFECT = frozenset({
    "image_size", "num_classes", "per_epoch_size", "sink_mode", "sink_size",
})  # fmt: skip


RECOMPUTATION = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in {field.name for field in fields(TrainingArguments)}
)
"""transformers 5.23 and newer deprecate the name ``gradient_checkpointing``."""


class Layout(NamedTuple):
    """How MindFormers divides the batch of an update."""

    processes: int
    """Number of data-parallel processes."""

    micro_batches: int
    """Number of micro-batches of each process."""

    is_automatic: bool
    """Whether MindSpore divides one network over the devices. Each process then computes the loss
    of the whole micro-batch, not of its own part."""


def take_layout(source: SourceFile) -> Layout:
    """Return how the file divides the batch of an update.

    Source: MindFormers, ``BaseTrainer._check_global_batch_size_for_auto_parallel``.

    Args:
        source: File, whose keys about parallel training are taken.

    Raises:
        RecipeError: If a number is not an integer >= 1.
    """
    section = "parallel_config"
    accumulation = source.integer("runner_config", "gradient_accumulation_steps", default=1)
    interleaved = source.integer("micro_batch_interleave_num", default=1)
    micro_batches = source.integer(section, "micro_batch_num", default=1)
    stages = source.integer(section, "pipeline_stage", default=1)
    processes = source.integer(section, "data_parallel", default=1)
    mode = source.take("parallel", "parallel_mode")
    source.ignore_keys(("parallel_config",), source.left((section,)))
    sums = source.take("parallel", "gradients_mean") is False
    if source.take("use_parallel") is False:
        processes, sums = 1, False
        mode = "stand_alone"
    if mode in _DATA_PARALLEL:
        if accumulation > 1:
            says = "1, because MindFormers accumulates only in (semi-)automatic parallel training"
            source.notes.append(f"runner_config.gradient_accumulation_steps: {says}")
        if sums:
            says = "the file adds the gradients of data-parallel processes"
            place = ("parallel", "gradients_mean")
            source.lose("gradients", place, f"{says}; the recipe takes their mean")
        return Layout(processes, 1, is_automatic=False)
    parts = micro_batches if stages > 1 else accumulation
    return Layout(processes, parts * interleaved, is_automatic=True)


def take_training(source: SourceFile, layout: Layout, *, recomputes: bool) -> dict[str, Any]:
    """Return the section ``training``.

    Args:
        source: File, whose keys about the length and the size of the training are taken.
        layout: How the batch of an update is divided.
        recomputes: Whether the model's own section asks for recomputation.

    Raises:
        RecipeError: If a value has a wrong type.
    """
    training: dict[str, Any] = {}
    runner = "runner_config"
    _refuse_earlier_run(source)
    repeated = source.integer("train_dataset", "repeat", default=1)
    training["num_train_epochs"] = source.integer(runner, "epochs", default=1) * repeated
    if (steps := source.integer(runner, "stop_step", default=0, minimum=0)) > 0:
        training["max_steps"] = steps
    size = source.integer("train_dataset", "batch_size", default=1)
    size = source.integer(runner, "batch_size", default=size)
    training["per_device_train_batch_size"] = size
    if layout.micro_batches > 1:
        training["gradient_accumulation_steps"] = layout.micro_batches
    for key in ("output_dir", "seed"):
        if (value := source.take(key)) is not None:
            training[key] = value
    training |= _take_order(source)
    if _recomputes(source) or recomputes:
        training[RECOMPUTATION] = True
    source.ignore_keys((runner,), _RUNNER_WITHOUT_EFFECT)
    source.refuse_left((runner,), {"batch_size", "epochs", "gradient_accumulation_steps"})
    return training | take_evaluation(source, training)


def _take_order(source: SourceFile) -> dict[str, Any]:
    """Return the keys of ``training`` that set which rows an update gets."""
    order: dict[str, Any] = {}
    if (seed := source.take("train_dataset", "seed")) is not None:
        order["data_seed"] = seed
    if source.take("train_dataset", "data_loader", "shuffle") is False:
        order["train_sampling_strategy"] = "sequential"
    if source.take("train_dataset", "drop_remainder"):
        order["dataloader_drop_last"] = True
    if source.flag("ignore_data_skip"):
        order["ignore_data_skip"] = True
    return order


def launch_note(training: dict[str, Any], layout: Layout) -> str:
    """Return a note with the size of the whole batch and the command that trains on it."""
    size = training["per_device_train_batch_size"]
    command = "mfwrap train RECIPE --resume=auto"
    if layout.processes > 1:
        launcher = f"torchrun --standalone --nproc-per-node {layout.processes} -m"
        command = f"{launcher} {command}"
    total = size * layout.micro_batches * layout.processes
    numbers = f"rows per micro-batch {size}, micro-batches {layout.micro_batches}"
    return (
        f"launch: {command} (an update has {total} rows: {numbers}, processes {layout.processes})"
    )


def _refuse_earlier_run(source: SourceFile) -> None:
    for key in _POSITION:
        if source.integer("runner_config", key, default=0, minimum=0) > 0:
            says = "the file continues an earlier run at this position"
            source.lose("resume", ("runner_config", key), f"{says}; the recipe begins at step 0")


def _recomputes(source: SourceFile) -> bool:
    """Return whether activations are recomputed. Which ones does not change the numbers."""
    section = ("recompute_config",)
    whole, parts = (source.take(*section, key) for key in ("recompute", "select_recompute"))
    source.ignore_keys(section, source.left(section))
    chosen = [any(value) if isinstance(value, list) else bool(value) for value in (whole, parts)]
    if any(chosen) and whole is not True:
        asked = f"recompute: {shown(whole)}, select_recompute: {shown(parts)}"
        source.notes.append(f"recompute_config: {asked} becomes recomputation of every layer")
    return any(chosen)
