"""MindFormers' names that a recipe may hold and that have no meaning here, or another name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, final

from mfwrap.config import StepConfig
from mfwrap.recipes.data.source import Section

__all__ = [
    "CALLBACKS_WITHOUT_MEANING",
    "CALLBACK_KEYS_WITHOUT_MEANING",
    "MONITOR_KEYS_WITHOUT_MEANING",
    "OPTIMIZERS",
    "OPTIMIZER_KEYS_WITHOUT_MEANING",
    "SCHEDULE_ALIASES",
    "RunnerWrapperSection",
    "Sections",
]


CALLBACK_KEYS_WITHOUT_MEANING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "MFLossMonitor": frozenset(
            {
                "calculate_per_token_loss",
                "check_for_nan_in_loss_and_grad",
                "gradient_accumulation_steps",
                "learning_rate",
                "micro_batch_interleave_num",
                "micro_batch_num",
                "print_separate_loss",
            }
        ),
        "CheckpointMonitor": frozenset(
            {
                "append_info",
                "async_save",
                "checkpoint_format",
                "config",
                "directory",
                "embedding_local_norm_threshold",
                "embedding_size",
                "enc_key",
                "enc_mode",
                "exception_save",
                "global_batch_size",
                "health_ckpts_record_dir",
                "integrated_save",
                "keep_checkpoint_max",
                "keep_checkpoint_per_n_minutes",
                "prefix",
                "remove_redundancy",
                "save_checkpoint_seconds",
                "save_network_params",
                "save_optimizer",
                "save_trainable_params",
                "saved_network",
                "use_checkpoint_health_monitor",
                "use_legacy_format",
            }
        ),
        "ProfileMonitor": frozenset({"data_simplification", "mstx", "profile_pipeline"}),
    }
)
"""Keys by callback. One that a callback here has as argument is its argument."""

CALLBACKS_WITHOUT_MEANING = frozenset(
    {
        "ColdHotExpertMonitor",
        "ExpertMigrateCallback",
        "MaxLogitsMonitor",
        "MoEDropRateCallback",
        "ObsMonitor",
        "SDCMonitor",
        "StressDetectCallBack",
        "StressTestModelMonitor",
        "SummaryMonitor",
        "TopkBiasBalanceCallback",
    }
)
"""Callbacks that watch Ascend devices, MindInsight or experts."""

MONITOR_KEYS_WITHOUT_MEANING = frozenset({"dump_path"})
"""Keys of ``monitor_config``."""

OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "AdamW": "adamw_torch_fused",
        "FP32StateAdamWeightDecay": "adamw_torch_fused",
        "FusedAdamW": "adamw_torch_fused",
        "FusedAdamWeightDecay": "adamw_torch_fused",
        "FusedFP32StateAdamWeightDecay": "adamw_torch_fused",
        "Adafactor": "adafactor",
    }
)
"""MindFormers' optimizers, and what the Trainer calls them."""

OPTIMIZER_KEYS_WITHOUT_MEANING = frozenset(
    {"layer_decay", "optimizer_type", "param_group", "swap", "weight_decay_params"}
)
"""Keys of ``optimizer``."""

SCHEDULE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "constant_with_warmup": "ConstantWarmUpLR",
        "cosine": "CosineWithWarmUpLR",
        "cosine_annealing": "CosineAnnealingLR",
        "cosine_annealing_warm_restarts": "CosineAnnealingWarmRestarts",
        "cosine_with_restarts": "CosineWithRestartsAndWarmUpLR",
        "linear": "LinearWithWarmUpLR",
        "polynomial": "PolynomialWithWarmUpLR",
    }
)
"""Names under which MindFormers registers its schedules, too, and their classes."""


@final
@dataclass(frozen=True, kw_only=True)
class RunnerWrapperSection(Section):
    """MindFormers' section of the same name, and the settings of the step that are ours.

    Source: MindFormers, ``runner_wrapper``, ``use_skip_data_by_global_norm``,
    ``calculate_per_token_loss`` and ``monitor_config.global_norm_spike_threshold``.

    Raises:
        ValueError: If two values exclude each other.
    """

    type: Literal["MFTrainOneStepCell", "mf_wrapper"] = "MFTrainOneStepCell"
    """MindFormers' name of the step."""

    scale_sense: float | dict[str, Any] | None = None
    """Loss scale: a number, or an update cell with ``type``; by default as `MFTrainer`'s."""

    use_clip_grad: bool | None = None
    """Clip gradients by their global norm; by default if ``training.max_grad_norm`` is given."""

    max_grad_norm: float | None = None
    """Largest global norm; by default ``training.max_grad_norm``, and 1 without it."""

    local_norm: bool = False
    """As in `StepConfig`."""

    local_norm_groups: Literal["layer"] | list[str] | None = None
    """As in `StepConfig`."""

    calculate_per_token_loss: bool | None = None
    """``True``: divide by the number of targets of the whole update, which the model must allow;
    ``False``: the mean over micro-batches. By default as the Trainer does."""

    use_skip_data_by_global_norm: bool = False
    """As in `StepConfig`."""

    global_norm_spike_threshold: float | None = None
    """As in `StepConfig`; by default that of ``monitor_config``, and 1 without it."""

    max_consecutive_skips: int | None = StepConfig().max_consecutive_skips
    """As in `StepConfig`."""

    def __post_init__(self) -> None:
        """Refuse a limit that is none, and skipping without clipping."""
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            msg = f"`max_grad_norm` must be > 0, got {self.max_grad_norm}"
            raise ValueError(msg)
        if self.use_clip_grad is False and self.use_skip_data_by_global_norm:
            msg = (
                "`use_skip_data_by_global_norm` must go with `use_clip_grad`, which computes the "
                "norm, got use_clip_grad=False"
            )
            raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class Sections(Section):
    """A recipe as it is written: what each section must hold is checked when it is built."""

    task: str
    """What is trained: a name of `mfwrap.recipes.tasks.table.TASKS`."""

    model: dict[str, Any]
    """See `mfwrap.recipes.models.settings.ModelSettings`."""

    data: dict[str, Any]
    """``type``, a name of `mfwrap.recipes.tasks.table.SOURCES`, and the keys of that source."""

    training: dict[str, Any] = field(default_factory=dict)
    """Fields of ``transformers.TrainingArguments``, or of the task's own arguments."""

    runner_wrapper: dict[str, Any] | None = None
    """See `RunnerWrapperSection`."""

    optimizer: dict[str, Any] | None = None
    """MindFormers' section."""

    lr_schedule: dict[str, Any] | None = None
    """MindFormers' section."""

    ema: dict[str, Any] | None = None
    """Arguments of `ExponentialMovingAverage`."""

    peft: dict[str, Any] | None = None
    """``type``, ``lora`` for one, and arguments of PEFT's configuration of that type."""

    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """``type``, a name of `mfwrap.callbacks`, and the arguments of that callback."""

    monitor_config: dict[str, Any] | None = None
    """MindFormers' section: arguments of `TrainingStateMonitor`, and ``monitor_on``."""
