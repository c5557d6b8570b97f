"""Convert a MindFormers file to a recipe that trains the same, or refuse it."""

import textwrap
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from mfwrap.recipes.tasks.table import TASKS
from mfwrap.runner.document import Path, RecipeDocument, RecipeError, shown, yaml_text
from mfwrap.runner.expert_bias import BIAS_RATE
from mfwrap.runner.mindformers.adapter import convert_adapter, take_arch
from mfwrap.runner.mindformers.architectures.convert import (
    convert_model,
    lose_overriding_keys,
    num_parameters,
)
from mfwrap.runner.mindformers.data import take_data
from mfwrap.runner.mindformers.layer_decay import decay_rules, take_layer_decay
from mfwrap.runner.mindformers.losses import LOSSES, Loss
from mfwrap.runner.mindformers.monitors import saves_by_callback, take_monitors
from mfwrap.runner.mindformers.precision import take_precision
from mfwrap.runner.mindformers.pynative import convert_pynative, is_pynative
from mfwrap.runner.mindformers.schedules import take_schedules
from mfwrap.runner.mindformers.source import SourceFile
from mfwrap.runner.mindformers.step import take_optimizer, take_wrapper
from mfwrap.runner.mindformers.training import launch_note, take_layout, take_training
from mfwrap.runner.mindformers.weights import take_weights
from mfwrap.runner.recipe import read_document
from mfwrap.runner.step import shows_local_norms


class ImportedRecipe(NamedTuple):
    """A recipe made from a MindFormers file."""

    text: str
    """YAML, with the notes and losses as comments at the top."""

    notes: list[str]
    """What the recipe does differently without changing the numbers of the training, and what the
    user has to fill in; one sentence each."""

    losses: list[Loss]
    """What changes the numbers of the training. Each was accepted by its name."""


def import_mindformers(text: str, name: str, accept: Collection[str] = ()) -> ImportedRecipe:
    """Convert a MindFormers file to a recipe that trains in the same way.

    Everything that a recipe can express is carried over. A key that changes the numbers of the
    training and cannot be carried over is an error, unless `accept` names the kind of the loss.
    Data that only MindFormers reads, such as MindRecord files, are not converted: the recipe names
    them, and training refuses it until the section ``data`` has been replaced.

    The recipe has been checked in the same way as by `mfwrap.runner.parse_recipe`.

    Args:
        text: Content of the MindFormers file.
        name: Name of the file, for error messages.
        accept: Names of losses to accept, such as ``weights`` to start from random weights.

    Raises:
        RecipeError: If `text` is not a YAML mapping; if the file does not train, or not a model
            that transformers has; if a key or a value is unknown; if the recipe would lose
            something that `accept` does not name; or if `accept` has an unknown name.
    """
    document = RecipeDocument.parse(text, name)
    for one in accept:
        if one not in LOSSES:
            msg = f"--accept: expected one of {sorted(LOSSES)}, got {shown(one)}"
            raise RecipeError(msg)
    source = SourceFile(document)
    sections = _convert(source)
    _check_losses(source, accept)
    read_document(RecipeDocument(name, sections, _places(document, sections)))
    notes = list(source.notes)
    if source.without_effect:
        notes.append("no effect on the numbers: " + ", ".join(sorted(source.without_effect)))
    losses = [f"lost ({loss.name}): {loss.says}" for loss in source.losses]
    lines = [f"Imported from MindFormers' {name}.", *losses, *notes]
    comments = "".join(f"{_comment(line)}\n" for line in lines)
    return ImportedRecipe(comments + yaml_text(sections), notes, source.losses)


_TRAINING_MODES = ("train", "finetune")
_TASK_OF: Mapping[str, str] = {
    trainer: name for name, task in TASKS.items() for trainer in task.mindformers_trainers
}
_TRAINING_SECTIONS = (
    "runner_config",
    "runner_wrapper",
    "optimizer",
    "lr_schedule",
    "train_dataset",
)
_SECTIONS = (
    *_TRAINING_SECTIONS, "context", "eval_dataset", "moe_config", "model", "monitor_config",
    "parallel", "parallel_config", "processor", "recompute_config", "tensorboard",
    "trainer",
)  # fmt: skip
"""Sections that must be mappings."""

_WITHOUT_EFFECT = frozenset({
    "adapter_id", "auto_tune", "autotune_per_step", "context", "device_num", "eval_callbacks",
    "eval_dataset", "eval_dataset_task", "exclude_cann_cpu", "filepath_prefix",
    "generation_config", "infer", "infer_precision_sync", "init_start_profile", "input_data",
    "load_ckpt_async", "load_ckpt_format", "local_rank", "metric", "mp_comm_recompute", "mstx",
    "parallel_optimizer_comm_recompute", "postprocess_use_numpy",
    "predict_batch_size", "print_separate_loss", "processor", "profile", "profile_communication",
    "profile_level", "profile_memory", "profile_pipeline", "profile_rank_ids",
    "profile_start_step", "profile_stop_step", "profiler_level", "recompute",
    "recompute_slice_activation",
    "remote_save_url", "save_file", "src_strategy_path_or_dir", "swap_config", "top_k",
    "top_p", "train_precision_sync", "transform_process_num", "use_legacy",
    "use_past",
})  # fmt: skip
"""Sections and top-level keys that do not change the numbers of a training step."""


_READ = ("run_mode", "only_save_strategy", "train_dataset", "train_dataset_task")
"""Keys that have been read, and data that the user has to replace."""


def _convert(source: SourceFile) -> dict[str, Any]:
    """Return the sections of the recipe, without empty ones."""
    if is_pynative(source):
        try:
            return convert_pynative(source)
        except RecipeError as error:
            says = "the file was read as one of MindFormers' PyNative trainer, by its sections"
            msg = f"{error}; {says}"
            raise RecipeError(msg) from error
    source.check_mappings(_SECTIONS)
    finetunes = _check_is_training(source)
    task = _take_task(source)
    layout = take_layout(source)
    at, settings = _take_settings(source)
    arch, qkv_concat = take_arch(source, settings), settings.get("qkv_concat")
    path = take_weights(source, settings, finetunes=finetunes)
    dtypes, mixed_precision = take_precision(source, settings)
    adapter, recomputes = settings.pop("pet_config", None), bool(settings.pop("recompute", None))
    config = _converted(source, at, settings, arch, task, is_loaded=path is not None)
    if path is not None and config.get("model_type") == "beit":
        says = "the checkpoint's ViT classifies the class token and drops no path, as the file does"
        source.lose("architecture", at, f"{says} not")
    columns = source.take("train_dataset", "input_columns")
    data = take_data(
        source,
        ("train_dataset", "data_loader"),
        config,
        task,
        columns=columns if isinstance(columns, list) else [],
        is_former=source.document.data.get("use_legacy") is not False,
        evaluates=source.document.data.get("do_eval") is True,
    )
    length = settings.get("seq_length")
    if isinstance(length, int) and "sequence_length" in TASKS[task].options:
        data.setdefault("sequence_length", length)
    peft = convert_adapter(
        source,
        adapter,
        arch or "",
        str(config.get("model_type")),
        qkv_concat=qkv_concat,
    )
    training = take_training(source, layout, recomputes=recomputes) | mixed_precision
    wrapper = take_wrapper(source, layout, is_language_model=task == "causal_lm")
    monitors = take_monitors(source)
    if peft is not None:
        source.lose_biases_beside_adapter(monitors.pop(BIAS_RATE))
    if saves_by_callback(monitors["callbacks"]):
        training["save_strategy"] = "no"
    has_local_norms = wrapper.get("local_norm") or shows_local_norms(monitors["monitor_config"])
    _shard_accumulation(source, training, has_local_norms=bool(has_local_norms))
    layer_decay = take_layer_decay(source, config)
    schedules = take_schedules(source, training, layout, config, task, is_adapted=peft is not None)
    sections = {
        "task": task,
        "model": {**({"config": config} if path is None else {"path": path}), **dtypes},
        "data": data,
        "training": training,
        "runner_wrapper": wrapper,
        "optimizer": take_optimizer(source) | decay_rules(config),
        **schedules,
        "layer_decay": layer_decay,
        "data_skip_steps": source.integer("data_skip_steps", default=0, minimum=0),
        "peft": peft,
        **monitors,
    }
    source.notes.append(launch_note(training, layout))
    for name in _READ:
        source.take(name)
    source.ignore_keys((), _WITHOUT_EFFECT)
    source.refuse_left((), (*_WITHOUT_EFFECT, *_SECTIONS, "callbacks"))
    return {name: section for name, section in sections.items() if section}


def _check_is_training(source: SourceFile) -> bool:
    """Return whether the file finetunes; raise `RecipeError` if it does not train."""
    mode = source.document.data.get("run_mode")
    if mode is None and not any((name,) in source for name in _TRAINING_SECTIONS):
        says = f"expected a file that trains, got none of the sections {list(_TRAINING_SECTIONS)}"
        raise source.document.error((), says)
    if mode is not None and mode not in _TRAINING_MODES:
        says = f"expected a file that trains ('train' or 'finetune'), got {shown(mode)}"
        raise source.document.error(("run_mode",), says)
    if source.document.data.get("only_save_strategy") is True:
        says = "expected a file that trains, got one that only saves a parallel strategy"
        raise source.document.error(("only_save_strategy",), says)
    return mode == "finetune"


def _take_task(source: SourceFile) -> str:
    trainer = source.mapping("trainer")
    said = trainer.get("type") or trainer.get("task_name") or "CausalLanguageModelingTrainer"
    if not isinstance(said, str) or said not in _TASK_OF:
        says = f"expected one of the trainers {sorted(_TASK_OF)}, got {said!r}"
        raise source.document.error(("trainer",), says)
    return _TASK_OF[said]


def _take_settings(source: SourceFile) -> tuple[Path, dict[str, Any]]:
    """Return the place and the content of ``model_config``, which may be at the top level."""
    for path in (("model", "model_config"), ("model_config",)):
        if settings := source.mapping(*path):
            return path, settings
    return ("model", "model_config"), {}


def _converted(
    source: SourceFile,
    path: Path,
    settings: dict[str, Any],
    arch: str | None,
    task: str,
    *,
    is_loaded: bool,
) -> dict[str, Any]:
    """Return the section ``model.config``; empty if a checkpoint's configuration is used.

    Args:
        source: The file.
        path: Place of `settings`.
        settings: ``model_config``.
        arch: MindFormers' class of the network.
        task: Task of the recipe.
        is_loaded: Whether the recipe has a checkpoint, whose configuration describes the network.
    """
    experts = source.mapping("moe_config")
    config: dict[str, Any] = {}
    if is_loaded and not settings.keys() & {"type", "model_type"}:
        lose_overriding_keys(source, settings, path)
    else:
        config = convert_model(source, settings, path, arch, task, experts)
        number = num_parameters(source, config, path, task)
        source.notes.append(f"model: {number:,} parameters")
    source.refuse_left(("model",), {"arch", "model_config"})
    return config


def _shard_accumulation(
    source: SourceFile, training: dict[str, Any], *, has_local_norms: bool
) -> None:
    """Take the section ``parallel``. Shard accumulated gradients if the file does."""
    section = ("parallel", "parallel_optimizer_config")
    shards = source.take(*section, "gradient_accumulation_shard") is True
    source.ignore_keys(("parallel",), source.left(("parallel",)))
    if shards and has_local_norms and training.get("gradient_accumulation_steps", 1) != 1:
        source.without_effect.append(".".join((*section, "gradient_accumulation_shard")))
    elif shards:
        accumulation = {"sync_each_batch": True}
        training["accelerator_config"] = {"gradient_accumulation_kwargs": accumulation}


def _check_losses(source: SourceFile, accept: Collection[str]) -> None:
    """Raise `RecipeError` about the first loss that is not accepted."""
    refused = [loss for loss in source.losses if loss.name not in accept]
    if refused:
        options = " ".join(
            f"--accept {name}" for name in dict.fromkeys(one.name for one in refused)
        )
        says = f"{refused[0].says}; to import the file nevertheless, pass {options}"
        raise source.document.error(refused[0].path, says)


def _places(document: RecipeDocument, sections: Mapping[str, Any]) -> dict[Path, str]:
    """Return the places in the file of those values that keep their path in the recipe."""
    return {
        path: place for path, place in document.places.items() if path[0:1] and path[0] in sections
    }


def _comment(line: str) -> str:
    return textwrap.fill(
        line, 98, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
    )
