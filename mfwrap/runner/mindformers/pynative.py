"""Convert a file of MindFormers' PyNative trainer, which has sections of its own.

Source: MindFormers r1.9 to r2.0, and its master of July 2026, ``mindformers.pynative``. Files of
all three are read. Where the trainer does otherwise than mfwrap's step, a note says so.
"""

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Any

from mfwrap.runner.document import Path, shown
from mfwrap.runner.expert_bias import BIAS_RATE
from mfwrap.runner.mindformers.adapter import take_lora_config
from mfwrap.runner.mindformers.architectures.convert import convert_model, num_parameters
from mfwrap.runner.mindformers.data import take_data
from mfwrap.runner.mindformers.precision import take_precision
from mfwrap.runner.mindformers.rate_groups import (
    MODEL_TYPES,
    converted_patterns,
    parameter_names,
)
from mfwrap.runner.mindformers.schedules import ignore_keys_of_others
from mfwrap.runner.mindformers.source import SourceFile
from mfwrap.runner.mindformers.step import complete_muon
from mfwrap.runner.mindformers.training import RECOMPUTATION, Layout, launch_note
from mfwrap.runner.sections import SCHEDULE_ALIASES
from mfwrap.schedules.batch_growth import BatchGrowth

_TASK = "causal_lm"

_SECTIONS = (
    "checkpoint", "context", "lora_config", "lr_scheduler", "model", "monitor", "optimizer",
    "parallelism", "profiler", "recompute", "recompute_comm", "swap", "train_dataset", "training",
)  # fmt: skip
"""Sections that must be mappings."""

_PARALLELISM = frozenset({
    "context_parallel", "context_parallel_async", "context_parallel_mask_type",
    "context_parallel_method", "cpu_offload", "data_parallel_shard",
    "data_parallel_shard_strategy", "dense_fsdp_shard_size", "enable_loss_parallel", "enable_mc2",
    "expert_parallel", "expert_parallel_async_d2h", "expert_parallel_use_safe_tokens",
    "hsdp_optimizer_level", "hsdp_shard_size", "hsdp_threshold", "moe_token_dispatcher_type",
    "npu_nums_per_device", "pipeline_parallel", "pipeline_parallel_enable_dxdw_split",
    "pipeline_parallel_interleave_num", "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_microbatch_size", "pipeline_parallel_overlap_b_f",
    "pipeline_parallel_overlap_p2p", "pipeline_parallel_p2p_transport",
    "pipeline_parallel_schedule", "reshard_after_forward_policy", "sequence_parallel",
    "tensor_parallel", "ulysses_degree_in_cp",
})  # fmt: skip
"""Keys that say how a network is divided over devices, which does not change the numbers."""

_CHECKPOINT = frozenset({
    "load_balanced", "load_worker_number", "prefix", "remove_redundancy",
    "reshard_worker_num", "save_global_layout_cache",
})  # fmt: skip
_DATA = frozenset({
    "num_parallel_workers", "numa_enable", "prefetch_size", "use_distribute_dataset",
})  # fmt: skip
_MONITORED = {
    "local_loss": "local_loss_format",
    "local_norm": "local_norm_format",
    "device_loss": "device_local_loss_format",
    "device_norm": "device_local_norm_format",
}
"""Arguments of `TrainingStateMonitor` by the keys of ``monitor.train_state``."""

_OPTIMIZERS = ("AdamW", "Muon")
_DECAY_RULES = ("weight_decay_include", "weight_decay_exclude")
_OF_ADAMW = frozenset({"type", "betas", "eps", "weight_decay", *_DECAY_RULES})
_MUON_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"adamw_include": [], "eps": 1e-7, "ns_coefficients": [3.4445, -4.775, 2.0315]}
)
"""Keys of Muon that the recipe has no key for, and what the recipe does."""

_LOGITS = frozenset({"MaxLogitsMonitor", "MaxLogitsReset"})
_ALWAYS_LOGGED = {"type": "MFLossMonitor"}
_LOADERS = (
    "BlendedMegatronDatasetDataLoader", "HFDataLoader", "MindDataset", "OrderedIndexDataLoader",
)  # fmt: skip


def is_pynative(source: SourceFile) -> bool:
    """Tell whether a file is one of the PyNative trainer, by its sections."""
    return bool(source.document.data.keys() & {"training", "checkpoint"})


def convert_pynative(source: SourceFile) -> dict[str, Any]:
    """Return the sections of the recipe, without empty ones.

    Args:
        source: A file for which `is_pynative` is true.

    Raises:
        RecipeError: If a value is wrong, or a key is unknown.
    """
    source.check_mappings(_SECTIONS)
    settings = source.mapping("model")
    settings.setdefault("embedding_init_type", settings.pop("embedding_params_dtype", "float32"))
    length = settings.get("seq_length")
    dtypes, mixed_precision = take_precision(source, settings, ("model",))
    config = _converted(source, settings)
    data = _take_data(source, config)
    if isinstance(length, int):
        data.setdefault("sequence_length", length)
    async_save = source.flag("checkpoint", "async_save")
    training = _take_training(source) | mixed_precision
    growth = _take_growth(source, training["per_device_train_batch_size"])
    monitors = _take_monitors(source)
    adapter = take_lora_config(source, config, _TASK)
    rate = source.bias_rate
    if adapter is not None:
        source.lose_biases_beside_adapter(rate)
        rate = None
    sections = {
        "task": _TASK,
        "model": {"config": config, **dtypes},
        "data": data,
        "training": training,
        "rampup_batch_size": growth,
        "async_save": async_save,
        "runner_wrapper": _take_wrapper(source),
        "optimizer": _take_optimizer(source, config, is_adapted=adapter is not None),
        "lr_schedule": _take_schedule(source),
        BIAS_RATE: rate,
        "peft": adapter,
        **monitors,
    }
    source.notes.append(
        "step: an update with a gradient that is not finite is skipped, which MindFormers applies, "
        "and a weight without a gradient is left out, which shifts MindFormers' optimizer"
    )
    source.refuse_left(("training",), ())
    _take_unread(source)
    return {name: section for name, section in sections.items() if section}


def _take_unread(source: SourceFile) -> None:
    """Take the top-level keys that the trainer does not read; refuse a misspelled section."""
    source.ignore_keys((), _SECTIONS)
    unread = source.left(())
    missing = {*_SECTIONS, "callbacks", "lora_config"} - source.document.data.keys()
    for name in unread:
        if meant := difflib.get_close_matches(name, missing, n=1, cutoff=0.85):
            raise source.document.error((name,), f"unknown section; did you mean {meant[0]!r}?")
        source.take(name)
    if unread:
        says = "MindFormers' PyNative trainer does not read these keys, so neither does the recipe"
        source.notes.append(f"{', '.join(unread)}: {says}")


def _converted(source: SourceFile, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the section ``model.config``."""
    path: Path = ("model",)
    if settings.get("model_type") == "qwen3":
        settings.setdefault("hidden_dropout", 0.1)  # the default of MindFormers' core
    if settings.pop("calculate_per_token_loss", False):
        says = "the file adds the losses of all tokens, and does not divide them"
        source.lose("gradients", (*path, "calculate_per_token_loss"), f"{says}; the recipe does")
    config = convert_model(source, settings, path, None, _TASK, {})
    number = num_parameters(source, config, path, _TASK)
    source.notes.append(f"model: {number:,} parameters")
    return config


def _take_data(source: SourceFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the section ``data``."""
    place = ("train_dataset", "dataloader")
    loader = (source.document.data.get("train_dataset") or {}).get("dataloader") or {}
    kind = loader.get("type") if isinstance(loader, dict) else None
    if kind not in _LOADERS:
        says = f"expected one of {list(_LOADERS)}, got {shown(kind)}"
        raise source.document.error((*place, "type"), says)
    data = take_data(source, place, config, _TASK, columns=None, is_former=False)
    if "template" not in data:
        says = "MindFormers takes labels as they are; the recipe's network shifts them itself"
        source.notes.append(f"data: {says}")
    return data


def _take_growth(source: SourceFile, batch_size: int) -> list[int] | None:
    """Return how the batch grows to ``global_batch_size``; ``None`` if it does not."""
    place = ("training", "rampup_batch_size")
    growth: Any = source.take(*place)
    if growth is None:
        return None
    total = source.document.data["training"].get("global_batch_size", 1)
    try:
        BatchGrowth(growth, total).check_divisible(batch_size)
    except (TypeError, ValueError) as error:
        raise source.document.error(place, f"MindFormers refuses it: {error}") from error
    return list(growth)


def _take_training(source: SourceFile) -> dict[str, Any]:
    """Return the section ``training``.

    MindFormers divides the rows of an update, ``global_batch_size``, by the number of data-parallel
    processes and by ``local_batch_size``, and rounds down. The recipe is for one process.
    """
    place = "training"
    size = source.integer(place, "local_batch_size", default=1)
    total = source.integer(place, "global_batch_size", default=1)
    if total < size:
        says = f"expected at least local_batch_size, {size}, got {total}"
        raise source.document.error((place, "global_batch_size"), says)
    training: dict[str, Any] = {
        "max_steps": source.integer(place, "steps", default=1000),
        "per_device_train_batch_size": size,
        "seed": source.integer(place, "seed", default=42, minimum=0),
    }
    if total // size > 1:
        training["gradient_accumulation_steps"] = total // size
    source.ignore_keys((place,), {"deterministic"})
    training |= _take_checkpoints(source) | _take_order(source)
    if _recomputes(source):
        training[RECOMPUTATION] = True
    if source.take("parallelism", "disable_gradient_division") is False:
        says = "the file divides gradients by the number of their shards once more"
        source.lose("gradients", ("parallelism", "disable_gradient_division"), says)
    source.ignore_keys(("parallelism",), _PARALLELISM)
    source.refuse_left(("parallelism",), _PARALLELISM)
    source.notes += [
        launch_note(training, Layout(1, total // size, is_automatic=False)),
        "launch: on n data-parallel processes, divide training.gradient_accumulation_steps by n",
    ]
    return training


def _take_checkpoints(source: SourceFile) -> dict[str, Any]:
    """Return the keys of ``training`` about checkpoints, and take those that are loaded."""
    place = "checkpoint"
    training: dict[str, Any] = {"save_strategy": "no"}
    interval = source.integer(place, "save_interleaved_steps", default=1000)
    limit = source.integer(place, "save_max", default=5)
    if source.flag(place, "enable_save", default=True):
        training = {"save_strategy": "steps", "save_steps": interval, "save_total_limit": limit}
    if (folder := source.text(place, "save_path")) is not None:
        training["output_dir"] = folder
    if source.flag(place, "no_save_optim"):
        training["save_only_model"] = True
    leaves_state = source.flag(place, "no_load_optim")
    if (loaded := source.text(place, "load_path")) is not None:
        says = f"mfwrap does not read MindFormers' checkpoint {loaded!r}"
        source.lose("weights", (place, "load_path"), f"{says}; the recipe starts without it")
        if not leaves_state:
            says = "the file continues a run"
            source.lose("resume", (place, "no_load_optim"), f"{says}; the recipe begins at step 0")
    source.ignore_keys((place,), _CHECKPOINT)
    source.refuse_left((place,), _CHECKPOINT)
    return training


def _take_order(source: SourceFile) -> dict[str, Any]:
    """Return the keys of ``training`` that set which rows an update gets, and in what order."""
    place = "train_dataset"
    order: dict[str, Any] = {}
    if not source.flag(place, "dataloader", "shuffle"):
        order["train_sampling_strategy"] = "sequential"
    if source.flag(place, "drop_remainder", default=True):
        order["dataloader_drop_last"] = True
    # Other keys belong to the loader, whose data the user has to replace.
    source.take(place, "dataloader")
    source.ignore_keys((place,), _DATA)
    source.refuse_left((place,), _DATA)
    return order


def _recomputes(source: SourceFile) -> bool:
    """Return whether activations are recomputed. Which ones does not change the numbers."""
    section = source.mapping("recompute")
    of_old = [section.get(key) for key in ("full_recompute", "select_recompute")]
    mode = section.get("mode")
    for name in ("recompute", "recompute_comm", "swap"):
        source.ignore(name)
    return mode in ("full", "select") or any(of_old)


def _take_wrapper(source: SourceFile) -> dict[str, Any]:
    """Return the section ``runner_wrapper``: no loss scale, and clipping by the global norm."""
    limit = source.number("training", "max_norm", default=1.0)
    wrapper: dict[str, Any] = {
        "type": "MFTrainOneStepCell",
        "scale_sense": 1.0,
        "use_clip_grad": limit > 0,
        "calculate_per_token_loss": False,
    }
    if limit > 0:
        wrapper["max_grad_norm"] = limit
        source.notes.append("training.max_norm: MindFormers adds 1e-6 to the norm when it clips")
    else:
        says = "MindFormers multiplies each gradient by 0; the recipe does not clip"
        source.notes.append(f"training.max_norm: {says}")
    return wrapper


def _decay_rules(
    source: SourceFile, section: dict[str, Any], config: dict[str, Any], *, is_adapted: bool
) -> dict[str, list[str]]:
    """Take the patterns of names that choose the weights with weight decay, and convert them."""
    rules = {rule: section.pop(rule, None) or [] for rule in _DECAY_RULES}
    for rule, names in rules.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            says = f"expected a list of parts of names, got {shown(names)}"
            raise source.document.error(("optimizer", rule), says)
    rules = {rule: names for rule, names in rules.items() if names}
    if not rules:
        return {}
    if config.get("model_type") not in MODEL_TYPES or is_adapted:
        of = "an adapter" if is_adapted else "MindFormers' parameters"
        says = f"mfwrap cannot convert the names of {of}"
        place: Path = ("optimizer", next(iter(rules)))
        source.lose("weight_decay", place, f"{says}; biases and norms have no weight decay")
        return {}
    found: dict[str, list[str]] = {}
    known = list(parameter_names(config, _TASK))
    for rule, names in rules.items():
        # In the recipe, too, the first list counts for a weight of both.
        patterns = converted_patterns(known, [names])
        if patterns is None:
            source.notes.append(f"optimizer.{rule}: no weight has a name with one of these parts")
        else:
            found[rule] = patterns[0]
    return found


def _take_optimizer(
    source: SourceFile, config: dict[str, Any], *, is_adapted: bool
) -> dict[str, Any]:
    """Return the section ``optimizer``, with MindFormers' defaults."""
    section = source.mapping("optimizer")
    kind = section.setdefault("type", "AdamW")
    if kind not in _OPTIMIZERS:
        says = f"expected one of {list(_OPTIMIZERS)}, got {shown(kind)}"
        raise source.document.error(("optimizer", "type"), says)
    section |= _decay_rules(source, section, config, is_adapted=is_adapted)
    section.setdefault("weight_decay", 0.01)
    if kind == "Muon":
        _complete_muon(source, section)
        return section
    section = {"betas": [0.9, 0.95], "eps": 1e-8, **section}
    if section.get("use_fused") or section.get("enable_fused_opt"):
        says = "MindFormers' fused optimizer lags by one rate, and begins with that of step -1"
        source.notes.append(f"optimizer.use_fused: {says}; the recipe does not")
        for key in ("amsgrad", "maximize"):
            if section.get(key):
                says = "MindFormers' fused optimizer has it, and the recipe's does not"
                source.lose("optimizer", ("optimizer", key), says)
    source.without_effect += [f"optimizer.{key}" for key in section.keys() - _OF_ADAMW]
    return {key: value for key, value in section.items() if key in _OF_ADAMW}


def _complete_muon(source: SourceFile, section: dict[str, Any]) -> None:
    """Drop the keys that only this trainer's Muon has, with a loss for those that the recipe lacks.

    Its Newton-Schulz iteration and its epsilon are torch's own by default.
    """
    for key in ("betas", "comm_strategy", "use_fused_adamw"):
        if section.pop(key, None) is not None:
            source.without_effect.append(f"optimizer.{key}")
    for key, default in _MUON_DEFAULTS.items():
        value = section.pop(key, None)
        if value is not None and value != default:
            says = f"the recipe's Muon has {shown(default)}"
            source.lose("optimizer", ("optimizer", key), f"{says}, and the file {shown(value)}")
    clips = section.pop("qk_clip_enabled", True)
    complete_muon(source, section)
    if clips is False:
        del section["qk_clip_threshold"]


def _take_schedule(source: SourceFile) -> dict[str, Any]:
    """Return the section ``lr_schedule``; its length is that of the training."""
    schedule = source.mapping("lr_scheduler")
    kind = schedule.get("type")
    if kind is None:
        says = "required, because the schedule determines the numbers; add the section to the file"
        raise source.document.error(("lr_scheduler",), says)
    kind = SCHEDULE_ALIASES.get(str(kind), kind)
    schedule.pop("total_steps", None)
    if str(kind).startswith("CosineAnnealing"):
        if schedule.pop("learning_rate", None) is not None:
            source.without_effect.append("lr_scheduler.learning_rate")
    else:
        schedule.setdefault("learning_rate", 1e-5)
        if kind == "CosineWithWarmUpLR" and "warmup_ratio" not in schedule:
            schedule.setdefault("warmup_steps", 0)
    ignore_keys_of_others(source, ("lr_scheduler",), str(kind), schedule)
    return schedule


def _take_monitors(source: SourceFile) -> dict[str, Any]:
    """Return the sections ``callbacks`` and ``monitor_config``."""
    state = source.mapping("monitor", "train_state")
    monitor: dict[str, Any] = {
        argument: "log" for key, argument in _MONITORED.items() if state.get(key)
    }
    chosen = state.get("local_norm")
    if isinstance(chosen, (str, list)) and chosen:
        names = [chosen] if isinstance(chosen, str) else chosen
        monitor["target"] = [re.escape(str(name)) for name in names]
        source.notes.append("monitor.train_state.local_norm: names of weights are transformers'")
    loss: dict[str, Any] = dict(_ALWAYS_LOGGED)
    if (folder := source.text("monitor", "tensorboard", "output_dir")) is not None:
        loss["tensorboard_dir"] = folder
    source.ignore("monitor")
    callbacks = source.take("callbacks")
    if not isinstance(callbacks, (list, NoneType)):
        raise source.document.error(("callbacks",), f"expected a list, got {shown(callbacks)}")
    for index, callback in enumerate(callbacks or []):
        name = callback.get("type") if isinstance(callback, dict) else callback
        if name in _LOGITS:
            monitor["max_attention_logit_format"] = "log"
            continue
        says = f"{shown(name)} is a class of the file's author; the recipe leaves it out"
        source.lose("callbacks", ("callbacks", index), says)
    if monitor:
        monitor = {"monitor_on": True, **monitor}
    return {"callbacks": [loss], "monitor_config": monitor}
