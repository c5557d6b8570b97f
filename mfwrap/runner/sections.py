"""The sections of a recipe, and MindFormers' names that they may contain."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, final

from mfwrap.arguments import check_int, check_positive_number
from mfwrap.config import SpikePolicyName, StepConfig
from mfwrap.recipes.data.source import RecipeSection
from mfwrap.schedules.batch_growth import check_ramp_up


@final
@dataclass(frozen=True, kw_only=True)
class Sections(RecipeSection):
    """All sections of a recipe, as written. The content of a section is checked when it is used."""

    task: str
    """What to train: a name in `mfwrap.recipes.tasks.table.TASKS`."""

    model: dict[str, Any]
    """Fields of `mfwrap.recipes.models.settings.ModelSettings`."""

    data: dict[str, Any]
    """``type``, a name in `mfwrap.recipes.tasks.table.SOURCES`, and the fields of that source."""

    training: dict[str, Any] = field(default_factory=dict)
    """Fields of ``transformers.TrainingArguments``, or of the task's subclass of it."""

    runner_wrapper: dict[str, Any] | None = None
    """Fields of `RunnerWrapperSection`."""

    optimizer: dict[str, Any] | None = None
    """MindFormers' section ``optimizer``."""

    lr_schedule: dict[str, Any] | None = None
    """MindFormers' section ``lr_schedule``."""

    grouped_lr_schedule: dict[str, Any] | None = None
    """MindFormers' section: ``default``, like ``lr_schedule``, and ``grouped``, a list of such
    schedules, each with ``params``, patterns of the names of its parameters."""

    layer_decay: dict[str, Any] | None = None
    """Fields of `mfwrap.runner.layer_decay.LayerDecaySection`."""

    ema: dict[str, Any] | None = None
    """Arguments of `ExponentialMovingAverage`."""

    peft: dict[str, Any] | None = None
    """``type``, for example ``lora``, arguments of PEFT's configuration of that type, and fields of
    `mfwrap.runner.adapters.AdapterSection`."""

    metric: dict[str, Any] | None = None
    """``type``, a function of ``transformers.EvalPrediction`` or a class of such functions, of the
    user's own, and its arguments."""

    reward: dict[str, Any] | list[dict[str, Any]] | None = None
    """For ``reward_tuning``: ``type``, a function of ``trl.rewards`` or a function or class of the
    user's own, and its arguments; or a list of such rewards."""

    loss: dict[str, Any] | None = None
    """For ``embedding``: ``type``, a loss of sentence-transformers or of the user's own, and its
    arguments."""

    teacher: dict[str, Any] | None = None
    """For ``distillation``: fields of `mfwrap.recipes.models.settings.ModelSettings`."""

    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """``type``, a name in `mfwrap.callbacks`, and the arguments of that callback."""

    monitor_config: dict[str, Any] | None = None
    """MindFormers' section: ``monitor_on``, and arguments of `TrainingStateMonitor`."""

    data_skip_steps: int | None = None
    """Number of updates whose data are skipped at the start; see `mfwrap.trainer.MFTrainer`."""

    rampup_batch_size: list[int] | dict[int, int] | None = None
    """How the batch grows to the global batch; see `mfwrap.trainer.MFTrainer`."""
    moe_router_bias_update_rate: float | None = None
    """Rate of `mfwrap.optimizers.ExpertBias`, > 0; ``None`` if nothing balances experts by biases.
    """

    eval_per_token_loss: bool = False
    """Whether ``eval_loss`` is the mean over all targets; see `mfwrap.trainer.MFTrainer`."""

    use_stateful_dataloader: bool = False
    """Whether streamed rows keep their place by their state; see `mfwrap.trainer.MFTrainer`."""
    async_save: bool = False
    """Whether checkpoints are written in the background; see `mfwrap.trainer.MFTrainer`."""

    rollback: dict[str, Any] | None = None
    """Fields of `mfwrap.trainer.Rollback`."""

    def __post_init__(self) -> None:
        """Check values that no other class checks."""
        if self.data_skip_steps is not None:
            check_int("data_skip_steps", self.data_skip_steps, minimum=0)
        if self.rampup_batch_size is not None:
            check_ramp_up(self.rampup_batch_size)
        if (rate := self.moe_router_bias_update_rate) is not None:
            check_positive_number("moe_router_bias_update_rate", rate, finite=True)


@final
@dataclass(frozen=True, kw_only=True)
class RunnerWrapperSection(RecipeSection):
    """MindFormers' section ``runner_wrapper``, with the settings of mfwrap's step.

    Source: MindFormers, ``runner_wrapper``, ``use_skip_data_by_global_norm``,
    ``calculate_per_token_loss`` and ``monitor_config.global_norm_spike_threshold``.

    Raises:
        ValueError: If a value is out of range, or two values contradict each other.
    """

    type: Literal["MFTrainOneStepCell", "mf_wrapper"] = "MFTrainOneStepCell"
    """MindFormers' name of the step."""

    scale_sense: float | dict[str, Any] | None = None
    """Loss scale: a number, or the ``type`` and arguments of an update cell. The default is the
    loss scale that `MFTrainer` chooses."""

    use_clip_grad: bool | None = None
    """Clip gradients by their global norm. The default is True if ``training.max_grad_norm`` is
    set."""

    max_grad_norm: float | None = None
    """Largest global norm. The default is ``training.max_grad_norm``, or 1 if that is not set."""

    local_norm: bool = False
    """See `StepConfig`."""

    local_norm_groups: Literal["layer"] | list[str] | None = None
    """See `StepConfig`."""

    calculate_per_token_loss: bool | None = None
    """If True, the loss is divided by the number of targets in the whole update; the model must
    support that. If False, it is the mean over micro-batches. By default the Trainer decides."""

    use_skip_data_by_global_norm: bool = False
    """See `StepConfig`."""

    global_norm_spike_threshold: float | None = None
    """See `StepConfig`. The default is ``monitor_config.global_norm_spike_threshold``, or 1 if
    that is not set."""

    spike_policy: SpikePolicyName = "record"
    """See `StepConfig`."""

    spike_z: float | None = None
    """See `StepConfig`."""

    max_consecutive_skips: int | None = StepConfig().max_consecutive_skips
    """See `StepConfig`."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """See `StepConfig`."""

    def __post_init__(self) -> None:
        """Check values that `StepConfig` does not check."""
        if self.max_grad_norm is not None:
            check_positive_number("max_grad_norm", self.max_grad_norm)
        if self.use_clip_grad is False and self.use_skip_data_by_global_norm:
            msg = (
                "`use_skip_data_by_global_norm` needs the global norm, which is computed only with "
                "`use_clip_grad`, got use_clip_grad=False"
            )
            raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class GroupedSection(RecipeSection):
    """MindFormers' section ``grouped_lr_schedule``."""

    default: dict[str, Any]
    """Schedule of all parameters that no pattern matches; like the section ``lr_schedule``."""

    grouped: list[dict[str, Any]]
    """Schedules like ``lr_schedule``, each with ``params``: a list of parts or shell patterns of
    the names of its parameters. The first match counts."""


@final
@dataclass(frozen=True, kw_only=True)
class MuonSection(RecipeSection):
    """Keys that only MindFormers' optimizer ``Muon`` has.

    Raises:
        ValueError: If a value is out of range.
    """

    momentum: float = 0.95
    """Decay rate of the momentum, in [0, 1)."""

    nesterov: bool = True
    """Whether to use Nesterov's momentum."""

    ns_steps: int = 5
    """Number of Newton-Schulz iterations, in [1, 99]."""

    matched_adamw_rms: float = 0.2
    """Root mean square of the steps, relative to the learning rate. torch has only 0.2."""

    qk_clip_threshold: float | None = None
    """Limit of the attention logits, > 0; see `mfwrap.optimizers.QKClip`. MindFormers' default is
    100."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.momentum < 1:
            msg = f"`momentum` must be in [0, 1), got {self.momentum}"
            raise ValueError(msg)
        if not 1 <= self.ns_steps <= 99:
            msg = f"`ns_steps` must be in [1, 99], got {self.ns_steps}"
            raise ValueError(msg)
        if self.qk_clip_threshold is not None:
            check_positive_number("qk_clip_threshold", self.qk_clip_threshold, finite=True)
        if self.matched_adamw_rms != 0.2:
            msg = f"`matched_adamw_rms` must be 0.2, as in torch, got {self.matched_adamw_rms}"
            raise ValueError(msg)


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
"""Class name of each schedule that MindFormers registers under a second name, by that name."""

# The tables below list MindFormers' settings that mfwrap ignores with a warning.

OPTIMIZER_KEYS_WITHOUT_MEANING = frozenset(
    {"layer_decay", "optimizer_type", "param_group", "swap", "weight_decay_params"}
)
"""Keys of the section ``optimizer`` that have no effect."""

CALLBACKS_WITHOUT_MEANING = frozenset({
    "ColdHotExpertMonitor", "ExpertMigrateCallback", "MaxLogitsMonitor", "MoEDropRateCallback",
    "ObsMonitor", "SDCMonitor", "StressDetectCallBack", "StressTestModelMonitor", "SummaryMonitor",
})  # fmt: skip
"""Callbacks that have no effect: they are for Ascend devices, MindInsight or experts."""

BIAS_CALLBACK = "TopkBiasBalanceCallback"
"""MindFormers' callback that moves the biases of experts. In a recipe, a key at the top does."""

CALLBACK_KEYS_WITHOUT_MEANING: Mapping[str, frozenset[str]] = MappingProxyType({
    "MFLossMonitor": frozenset({
        "calculate_per_token_loss", "check_for_nan_in_loss_and_grad", "gradient_accumulation_steps",
        "learning_rate", "micro_batch_interleave_num", "micro_batch_num", "print_separate_loss",
    }),
    "CheckpointMonitor": frozenset({
        "append_info", "checkpoint_format", "config", "directory", "embedding_size",
        "enc_key", "enc_mode", "exception_save", "global_batch_size", "health_ckpts_record_dir",
        "integrated_save", "keep_checkpoint_per_n_minutes", "prefix", "remove_redundancy",
        "save_network_params", "save_optimizer", "save_trainable_params", "saved_network",
        "use_legacy_format",
    }),
    "ProfileMonitor": frozenset({"data_simplification", "mstx", "profile_pipeline"}),
    "TrainingStateMonitor": frozenset({"dump_path"}),
})  # fmt: skip
"""Keys that have no effect, by callback; ``monitor_config`` has those of its monitor."""
