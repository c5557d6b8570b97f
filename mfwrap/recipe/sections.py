"""MindFormers' names that a recipe may hold and that have no meaning here, or another name."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "CALLBACKS_WITHOUT_MEANING",
    "CALLBACK_KEYS_WITHOUT_MEANING",
    "MONITOR_KEYS_WITHOUT_MEANING",
    "OPTIMIZERS",
    "OPTIMIZER_KEYS_WITHOUT_MEANING",
    "SCHEDULE_ALIASES",
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
