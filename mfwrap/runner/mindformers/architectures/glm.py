"""Convert the configurations of ChatGLM 2 and 3, CodeGeeX 2, GLM 3 and GLM 4."""

from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.architectures.keys import Keys
from mfwrap.runner.mindformers.architectures.llama import lose_document_masks, positions

_ONLY = {
    "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "add_bias_linear": False,
}
"""The values that transformers' network has."""


def convert_glm(keys: Keys) -> dict[str, Any]:
    """Convert a ``ChatGLM2Config``.

    Returns:
        The section ``model.config`` of a recipe, for transformers' ``glm``; with norms behind the
        attention and the feed-forward layers (``post_self_attn_layernorm``), ``glm4``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    for key, value in _ONLY.items():
        if keys.flag(key, default=value) != value:
            says = f"expected {str(value).lower()}, the only value that transformers' GLM has"
            keys.refuse(key, f"{says}, got {str(not value).lower()}")
    hidden_size = keys.size("hidden_size", 4096)
    heads = keys.size("num_attention_heads", 32)
    layers = keys.size("num_layers", 28)
    shares_heads = keys.flag("multi_query_attention", default=True)
    groups = keys.size("multi_query_group_num", 2)
    vocab_size = keys.size("padded_vocab_size", 65_024)
    width = keys.size("ffn_hidden_size", 13_696)
    keys.unread(
        {
            "num_hidden_layers": layers,
            "num_heads": heads,
            "intermediate_size": width,
            "vocab_size": vocab_size,
            "n_kv_heads": groups if shares_heads else heads,
        }
    )
    _lose_unscaled_scores(keys)
    keys.lose_dropout("hidden_dropout")
    lose_document_masks(keys)
    mask = keys.value("mask_generate")
    if mask is not None:
        says = f"mask_generate: {shown(mask)} keeps the documents of a sequence apart"
        keys.lose("attention", "mask_generate", f"{says}; the recipe does not")
    return {
        "model_type": _model_type(keys),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups if shares_heads else heads,
        "head_dim": keys.size("kv_channels", 128),
        "attention_bias": keys.flag("add_qkv_bias", default=True),
        "attention_dropout": keys.number("attention_dropout", 0.0),
        "max_position_embeddings": positions(keys, "max_position_embeddings"),
        "rms_norm_eps": keys.number("layernorm_epsilon", 1e-5),
        "initializer_range": 0.01,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0 * keys.number("rope_ratio", 1.0),
            "partial_rotary_factor": 0.5,
        },
        **keys.token_ids(vocab_size, pad_token_id=0),
    }


def _lose_unscaled_scores(keys: Keys) -> None:
    """Add a loss for attention scores that are not divided by the root of the heads' width.

    Source: MindFormers, ``CoreAttention``. With flash attention, scores are always divided.
    """
    key = "apply_query_key_layer_scaling"
    if not keys.flag(key, default=True) and not keys.flag("use_flash_attention", default=False):
        says = f"with {key}: false, the file does not scale the scores of the attention"
        keys.lose("attention", key, f"{says} by 1 / sqrt(kv_channels); the recipe does")


def _model_type(keys: Keys) -> str:
    names = ("post_self_attn_layernorm", "post_mlp_layernorm")
    after_attention, after_mlp = (keys.flag(name, default=False) for name in names)
    if after_attention != after_mlp:
        says = f"expected the same value as {names[1]}: transformers' GLM 4 has both norms"
        keys.refuse(names[0], says)
    return "glm4" if after_attention else "glm"
