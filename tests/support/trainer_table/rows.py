"""The rows of the table: values of `optim` and `lr_scheduler_type`, and options of the loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from support.trainer_table.hub import pushed
from support.trainer_table.packages import package_of
from support.trainer_table.trainings import (
    Outcome,
    best_of_three,
    evaluated_on_two_ranks,
    failing_at_first,
    generated,
    reloaded,
    resumed,
    searched,
    trained,
    uneven,
    wide_llama,
)

__all__ = ["NOT_COMPARED", "ROWS", "Row"]

Run = Callable[[type[Trainer], Path, Mapping[str, Any]], Outcome]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    section: str
    """Heading of the row's table."""

    name: str
    """First column."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Training arguments."""

    run: Run = trained
    """Trains with a class of trainer in a folder, with `arguments`."""

    note: str = ""
    """What else the row needs or does."""

    package: str = ""
    """Distribution that the row needs; the project's own tests do not install it."""

    lacks: str = ""
    """What the stock Trainer lacks on a CPU, if it cannot train with `arguments` there."""

    but: str = ""
    """Documented difference, with a link; its tests are elsewhere."""

    @property
    def is_fast(self) -> bool:
        """Return whether `make test` compares the row."""
        return self.name in _FAST


_LACKS = {
    "adamw_torch_xla": "torch_xla",
    "adamw_torch_npu_fused": "torch_npu",
    "adamw_anyprecision": "torchdistx, which is not on PyPI",
    "galore_adamw_8bit": "CUDA",
}

_QUANTIZED = "the rounding of [clipped gradients](trainer.md#what-is-different)"

_LOW_RANK = {"optim_target_modules": "all-linear", "optim_args": "rank=2,update_proj_gap=2"}


def _optimizer(name: str) -> Row:
    package = package_of(name)
    arguments: dict[str, Any] = {"optim": name}
    if package in {"galore-torch", "apollo-torch"}:
        arguments |= _LOW_RANK
    if name.endswith("_layerwise"):
        arguments["gradient_accumulation_steps"] = 1
    if package == "schedulefree":
        arguments["max_steps"] = 8  # RAdam changes no weight in its first five updates
    if "rmsprop" in name or name == "grokadamw":
        arguments["learning_rate"] = 1e-3
    is_quantized = "8bit" in name or "4bit" in name
    if is_quantized:
        arguments["max_grad_norm"] = 0.0
    return Row(
        section="optim",
        name=name,
        arguments=arguments,
        run=_wide if package else trained,
        package=package,
        lacks=_LACKS.get(name, ""),
        but=_QUANTIZED if is_quantized else "",
    )


def _wide(kind: type[Trainer], folder: Path, arguments: Mapping[str, Any]) -> Outcome:
    return trained(kind, folder, arguments, wide_llama)


_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
_OF_SCHEDULE: dict[str, dict[str, Any]] = {
    "constant": {},
    "greedy": {**_EVALUATED, "lr_scheduler_kwargs": {"patience": 0, "warmup": 1}},
    "reduce_lr_on_plateau": {
        **_EVALUATED,
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
    },
    "cosine_with_restarts": {"warmup_steps": 2, "lr_scheduler_kwargs": {"num_cycles": 2}},
    "polynomial": {"warmup_steps": 2, "lr_scheduler_kwargs": {"lr_end": 1e-4}},
    "cosine_with_min_lr": {"warmup_steps": 2, "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    "cosine_warmup_with_min_lr": {"warmup_steps": 2, "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    "warmup_stable_decay": {"warmup_steps": 2, "lr_scheduler_kwargs": {"num_decay_steps": 2}},
}


def _schedule(name: str) -> Row:
    settings = _OF_SCHEDULE.get(name, {"warmup_steps": 2})
    arguments = {"lr_scheduler_type": name, "max_steps": 6, **settings}
    return Row(section="lr_scheduler_type", name=name, arguments=arguments)


def _option(name: str, run: Run = trained, note: str = "", **arguments: Any) -> Row:
    buts = {
        resumed: "`train_loss`, [the mean over all steps](trainer.md#what-is-different)",
        evaluated_on_two_ranks: (
            "`eval_loss`, [the mean over the rows](trainer.md#what-is-different)"
        ),
    }
    return Row(
        section="options",
        name=name,
        arguments=arguments,
        run=run,
        note=note,
        package=package_of(name),
        but=buts.get(run, ""),
    )


_BY_STEPS = {"save_strategy": "steps", "save_steps": 2}
_OPTIONS = [
    _option("max_steps", max_steps=3),
    _option("num_train_epochs=2", uneven, "20 rows", max_steps=-1, num_train_epochs=2),
    _option("num_train_epochs=1.5", uneven, "20 rows", max_steps=-1, num_train_epochs=1.5),
    _option("gradient_accumulation_steps=1", gradient_accumulation_steps=1),
    _option("max_grad_norm=0", max_grad_norm=0.0),
    _option("max_grad_norm=0.1", max_grad_norm=0.1),
    _option("weight_decay", weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6),
    _option("label_smoothing_factor", label_smoothing_factor=0.1),
    _option("neftune_noise_alpha", neftune_noise_alpha=5.0),
    _option("bf16", bf16=True, max_grad_norm=0.0),
    _option("fp16", fp16=True),
    _option(
        "activation_checkpointing_kwargs={'use_reentrant': True}",
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": True},
    ),
    _option(
        "activation_checkpointing_kwargs={'use_reentrant': False}",
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
    ),
    _option("torch_compile", torch_compile=True, torch_compile_mode="default", max_steps=2),
    _option(
        "torch_compile_backend=aot_eager",
        torch_compile=True,
        torch_compile_backend="aot_eager",
        max_steps=2,
    ),
    _option("use_cache", use_cache=True),
    _option("torch_empty_cache_steps", torch_empty_cache_steps=1),
    _option(
        "auto_find_batch_size",
        failing_at_first,
        "the model runs out of memory with more than three rows",
        auto_find_batch_size=True,
    ),
    _option("train_sampling_strategy=group_by_length", train_sampling_strategy="group_by_length"),
    _option("train_sampling_strategy=sequential", train_sampling_strategy="sequential"),
    _option("dataloader_drop_last", uneven, "20 rows", dataloader_drop_last=True, max_steps=6),
    _option("dataloader_num_workers", dataloader_num_workers=1),
    _option("accelerator_config", accelerator_config={"split_batches": True}),
    _option("average_tokens_across_devices=False", average_tokens_across_devices=False),
    _option("data_seed", data_seed=1, seed=2),
    _option("logging_first_step", logging_first_step=True, logging_steps=3),
    _option(
        *("logging_strategy=epoch", uneven, "20 rows"),
        logging_strategy="epoch",
        max_steps=-1,
        num_train_epochs=2,
    ),
    _option("logging_nan_inf_filter=False", logging_nan_inf_filter=False),
    _option("include_num_input_tokens_seen=all", include_num_input_tokens_seen="all"),
    _option(
        "include_num_input_tokens_seen=non_padding", include_num_input_tokens_seen="non_padding"
    ),
    _option("eval_strategy=steps", eval_strategy="steps", eval_steps=2, eval_delay=3),
    _option(
        *("eval_strategy=epoch", uneven, "20 rows"),
        eval_strategy="epoch",
        max_steps=-1,
        num_train_epochs=2,
    ),
    _option("eval_on_start", eval_on_start=True, eval_strategy="steps", eval_steps=2),
    _option("eval_accumulation_steps", eval_accumulation_steps=1),
    _option("eval_do_concat_batches=False", eval_do_concat_batches=False),
    _option("evaluate", evaluated_on_two_ranks, "11 rows in batches of 4 on two ranks"),
    _option("save_strategy=steps", reloaded, "the weights of the checkpoint", **_BY_STEPS),
    _option(
        "save_only_model",
        reloaded,
        "the weights of the checkpoint",
        save_only_model=True,
        **_BY_STEPS,
    ),
    _option("save_total_limit", reloaded, save_total_limit=1, **_BY_STEPS),
    _option("resume_from_checkpoint", resumed, "from update 2 of 4"),
    _option("ignore_data_skip", resumed, "from update 2 of 4", ignore_data_skip=True),
    _option(
        "load_best_model_at_end",
        best_of_three,
        "the first of three checkpoints is best",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
    ),
    _option(
        "predict_with_generate",
        generated,
        "`Seq2SeqTrainer` with `MFTrainerMixin`",
        predict_with_generate=True,
        generation_max_length=6,
        generation_num_beams=2,
    ),
    _option("hyperparameter_search", searched, "three trials", max_steps=3),
    _option("push_to_hub", pushed, "to a local server that records all requests", push_to_hub=True),
]

ROWS = [
    *(_optimizer(each.value) for each in OptimizerNames),
    *(_schedule(each.value) for each in SchedulerType),
    *_OPTIONS,
]

_FAST = ("adagrad", "cosine_with_min_lr", "label_smoothing_factor", "load_best_model_at_end")

NOT_COMPARED = {
    "need several processes or devices; see [several ranks](ranks.md)": (
        *("ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_static_graph"),
        *("ddp_find_unused_parameters", "ddp_timeout", "deepspeed", "fsdp", "fsdp_config"),
        *("local_rank", "log_level_replica", "log_on_each_node", "parallelism_config"),
        *("save_on_each_node",),
    ),
    "need a device other than a CPU": ("tf32", "use_liger_kernel", "liger_kernel_config"),
    "set the device and how tensors are copied to it": ("dataloader_pin_memory", "use_cpu"),
    "set how worker processes load data": (
        *("dataloader_in_order", "dataloader_multiprocessing_context"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor"),
    ),
    "name folders, trackers and repositories, or print": (
        *("debug", "disable_tqdm", "hub_private_repo", "hub_revision", "hub_strategy"),
        *("log_level", "output_dir", "project", "report_to", "run_name", "skip_memory_metrics"),
        *("trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
    ),
    "change evaluation alone, which is the stock Trainer's": (
        *("batch_eval_metrics", "bf16_full_eval", "eval_use_gather_object", "fp16_full_eval"),
        *("generation_config", "include_for_metrics", "prediction_loss_only"),
    ),
    "choose columns and labels before the loop": (
        *("label_names", "length_column_name", "remove_unused_columns", "sortish_sampler"),
    ),
    "are for scripts; the Trainer does not read them": ("do_eval", "do_predict", "do_train"),
    "are deprecated names of other options": (
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    ),
    "change the state of torch or the signal handlers of the whole process": (
        *("enable_jit_checkpoint", "full_determinism"),
    ),
    "restores callbacks; see [resuming](trainer.md#resuming)": (
        "restore_callback_states_from_checkpoint",
    ),
}
"""Training arguments without a row, by reason."""
