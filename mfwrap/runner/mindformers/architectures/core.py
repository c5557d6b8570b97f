"""Convert configurations in transformers' own names, and in those of MindFormers' core of 2025."""

import math
from collections.abc import Set as AbstractSet
from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.architectures.core_experts import convert_experts
from mfwrap.runner.mindformers.architectures.keys import Keys
from mfwrap.runner.mindformers.architectures.llama import lose_document_masks

_ALIASES = {
    "n_head": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
    "qkv_has_bias": "attention_bias",
    "add_qkv_bias": "attention_bias",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "qk_layernorm": "use_qk_norm",
    "init_method_std": "initializer_range",
    "extend_method": "position_embedding_type",
    "mtp_depth": "num_nextn_predict_layers",
    "mtp_num_layers": "num_nextn_predict_layers",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "theta": "rope_theta",
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "factor": "scaling_factor",
    "rotary_scaling_factor": "scaling_factor",
    "padded_vocab_size": "vocab_size",
    "max_position_embedding": "max_position_embeddings",
}
"""MindFormers' names, in addition to those of transformers.

Source: MindFormers, ``COMMON_CONFIG_MAPPING``.
"""

_CORE_KINDS = frozenset({"deepseek_v3", "glm4", "glm4_moe", "qwen2", "qwen3", "qwen3_moe"})
"""Model types that MindFormers' core trains with a network of its own."""

_IGNORED = (
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "decoder_sparse_step",
    "mlp_only_layers",
    "output_router_logits",
    "router_aux_loss_coef",
    "scoring_func",
    "ep_size",
    "pretraining_tp",
)
"""transformers' keys that MindFormers' core ignores."""

_HALF_ROTARY = frozenset({"glm", "glm4", "glm4_moe"})
"""Model types that rotate the first half of each head by default."""

_YARN_FACTOR = 40.0
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
"""Defaults of YaRN. Source: MindFormers, ``MLATransformerConfig``."""

_ACTIVATIONS = {"swiglu": "silu", "fusedswiglu": "silu", "gelu": "gelu_pytorch_tanh"}


def convert_core(keys: Keys, kind: str, known: AbstractSet[str]) -> dict[str, Any]:
    """Convert a ``model_config`` with a ``model_type`` of transformers.

    Args:
        keys: Keys of the section.
        kind: The model type.
        known: Keys of transformers' configuration of this type.

    Returns:
        The section ``model.config`` of a recipe.

    Raises:
        RecipeError: If two names of one key have different values, or a value has a wrong
            type.
    """
    for alias, name in _ALIASES.items():
        if alias not in known:
            keys.merge(alias, name)
    if kind in _CORE_KINDS:
        keys.drop(*_IGNORED)
    _lose_what_transformers_lacks(keys, kind)
    config: dict[str, Any] = {"model_type": kind}
    experts = convert_experts(keys, kind, known)
    rope = _rope_parameters(keys, kind) if "rope_parameters" in known else None
    if rope is not None:
        config["rope_parameters"] = rope
    if keys.is_null("q_lora_rank") and "q_lora_rank" in known:
        config["q_lora_rank"] = None
    config |= keys.carried(known - {"rope_parameters", "dtype", "use_cache"})
    # MindFormers' networks read tie_word_embeddings alone.
    is_tied = config.get("tie_word_embeddings", False)
    keys.unread({"untie_embeddings_and_output_weights": not is_tied})
    activation = config.get("hidden_act")
    if kind in _CORE_KINDS and isinstance(activation, str):
        config["hidden_act"] = _ACTIVATIONS.get(activation, activation)
    return config | experts


def _lose_what_transformers_lacks(keys: Keys, kind: str) -> None:
    lose_document_masks(keys)
    if "hidden_dropout" in keys:
        keys.lose_dropout("hidden_dropout")
    if "num_nextn_predict_layers" in keys or kind == "deepseek_v3":
        depth = keys.value("num_nextn_predict_layers", 1)
        if depth:
            says = f"the file also trains {shown(depth)} layers that predict later tokens"
            keys.lose("mtp", "num_nextn_predict_layers", f"{says}; the recipe does not")
    if kind not in _CORE_KINDS:
        return
    fixed: dict[str, object] = {
        "add_bias_linear": False,
        "add_mlp_fc1_bias_linear": False,
        "add_mlp_fc2_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "use_alibi_mask": False,
        "moe_router_force_expert_balance": False,
        "activation_func": "silu",
    }
    if kind == "qwen2":
        fixed["attention_bias"] = True
    elif kind in {"qwen3", "qwen3_moe", "deepseek_v3"}:
        fixed["attention_bias"] = False  # with True, transformers adds one to the output as well
    if kind != "glm4_moe":
        # Latent attention normalizes what queries and keys are projected from.
        fixed["use_qk_norm"] = kind in {"qwen3", "qwen3_moe", "deepseek_v3"}
    for key, value in fixed.items():
        keys.is_equal(key, value, f"transformers' {kind} has {value}")
    for key in ("window_size", "softmax_scale", "nope_layer_interval", "param_init_std_rules"):
        name = "architecture" if key == "param_init_std_rules" else "attention"
        keys.is_equal(key, None, f"transformers' {kind} has no such setting", name)


def _rope_parameters(keys: Keys, kind: str) -> dict[str, Any] | None:
    """Take the keys of the rotary embedding; None if there are none."""
    if "rope_parameters" in keys:
        return keys.mapping("rope_parameters")
    names = ("rope_theta", "rope_scaling", "position_embedding_type", "partial_rotary_factor")
    is_latent = kind == "deepseek_v3"
    if not is_latent and not any(name in keys for name in names):
        return None
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = keys.mapping("rope_scaling")
    method = keys.value("position_embedding_type", "rope")
    if scaling:
        rope |= {key: value for key, value in scaling.items() if key not in {"type", "rope_type"}}
        rope["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    elif method == "yarn":
        rope |= _yarn(keys)
    elif method not in ("rope", "partial_rope", "None", "none"):
        says = "expected rope, partial_rope or yarn, or a mapping rope_scaling"
        keys.refuse("position_embedding_type", f"{says}, got {shown(method)}")
    rope["rope_theta"] = keys.number("rope_theta", 10_000.0)
    if kind in _HALF_ROTARY or "partial_rotary_factor" in keys:
        default = 0.5 if kind in _HALF_ROTARY else 1.0
        rope["partial_rotary_factor"] = keys.number("partial_rotary_factor", default)
    return _of_latent_attention(keys, rope) if is_latent else rope


def _yarn(keys: Keys) -> dict[str, Any]:
    """Take the keys of YaRN outside ``rope_scaling``."""
    return {
        "rope_type": "yarn",
        "factor": keys.number("scaling_factor", _YARN_FACTOR),
        **{name: keys.number(name, default) for name, default in _YARN.items()},
        "original_max_position_embeddings": keys.peek_size("max_position_embeddings", 4096),
    }


def _of_latent_attention(keys: Keys, rope: dict[str, Any]) -> dict[str, Any]:
    """Complete the rotary embedding of latent attention with the scale of its scores.

    Source: MindFormers, ``MultiLatentAttention``, which scales the scores by the square of YaRN's
    ``mscale`` with and without YaRN, and ``ApplyRotaryPosEmb``, which multiplies the angles, not
    their cosines, by the ratio of ``mscale`` and ``mscale_all_dim``.
    """
    if rope["rope_type"] == "yarn":
        rope = {**_YARN, **rope}
        if rope["mscale"] != rope["mscale_all_dim"]:
            says = "MindFormers scales the scores of the attention by mscale, and the angles by its"
            says += " ratio to mscale_all_dim; the recipe, by mscale_all_dim, and the cosines"
            keys.lose("attention", "rope_scaling", says)
        return rope
    factor = keys.number("scaling_factor", _YARN_FACTOR)
    mscale = keys.number("mscale", _YARN["mscale"])
    keys.drop(*sorted(_YARN))
    if factor <= 1.0 or not mscale:
        return rope
    if rope["rope_type"] != "default":
        says = "MindFormers scales the scores of the attention by mscale and rotary_scaling_factor"
        keys.lose("attention", "mscale", f"{says}, also without YaRN; the recipe does not")
        return rope
    length = keys.peek_size("max_position_embeddings", 4096)
    return {
        **rope,
        "rope_type": "yarn",
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": length,
        # transformers scales the scores with YaRN only. These borders of the interpolated
        # frequencies are beyond the last frequency, so that YaRN changes none.
        **{
            name: length / (2 * math.pi * rope["rope_theta"] ** (2 * border))
            for name, border in (("beta_fast", 0.6), ("beta_slow", 0.9))
        },
    }
