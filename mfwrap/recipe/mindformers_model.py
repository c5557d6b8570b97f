"""Convert the ``model_config`` of a MindFormers file to a configuration of transformers."""

from collections.abc import Collection, Mapping
from typing import Any

_MODEL_TYPES: Mapping[str, str] = {
    "BertConfig": "bert",
    "Blip2Config": "blip-2",
    "BloomConfig": "bloom",
    "GPT2Config": "gpt2",
    "LlamaConfig": "llama",
    "Qwen2Config": "qwen2",
    "Qwen3Config": "qwen3",
    "T5Config": "t5",
    "ViTConfig": "vit",
}
_MODEL_KEYS: Mapping[str, str] = {
    "ffn_hidden_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "hidden_size": "hidden_size",
    "image_size": "image_size",
    "intermediate_size": "intermediate_size",
    "max_position_embedding": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "n_kv_heads": "num_key_value_heads",
    "num_attention_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "num_hidden_layers": "num_hidden_layers",
    "num_key_value_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "patch_size": "patch_size",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "vocab_size": "vocab_size",
}
"""Transformers' name of each key of ``model_config``."""

_WIDTH_KEYS = ("multiple_of", "ffn_dim_multiplier")
"""Keys that determine the width of the feed-forward layers if ``intermediate_size`` is missing."""

_ROPE_KEYS = ("theta", "rope_theta")
_PLAIN_ROPE = frozenset({"glm4", "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Model types that use one unscaled rotary embedding for all layers by default."""

_DEFAULT_WIDTH = 4096
"""Default ``hidden_size`` of ``LlamaConfig``, in MindFormers and in transformers."""


def model_type_of(settings: Mapping[str, Any]) -> str | None:
    """Return transformers' ``model_type`` for a ``model_config``; ``None`` if it is unknown."""
    return _MODEL_TYPES.get(str(settings.get("type")), settings.get("model_type"))


def model_config_of(
    settings: Mapping[str, Any], kind: str, known: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Convert a ``model_config`` to the section ``model.config`` of a recipe.

    Args:
        settings: MindFormers' ``model_config``.
        kind: ``model_type`` of the result.
        known: Keys that the configuration of this model type has.

    Returns:
        The section ``model.config``, and the keys of `settings` that were left out.
    """
    left = {key: value for key, value in settings.items() if key not in {"type", "model_type"}}
    config: dict[str, Any] = {"model_type": kind}
    for key, value in settings.items():
        if _MODEL_KEYS.get(key) in known and value is not None:
            config[_MODEL_KEYS[key]] = left.pop(key)
        elif key in _ROPE_KEYS and kind in _PLAIN_ROPE and _is_number(value):
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": left.pop(key)}
    if "intermediate_size" in config:
        for key in _WIDTH_KEYS:  # MindFormers, too, ignores these keys beside `intermediate_size`
            left.pop(key, None)
    elif "intermediate_size" in known and _makes_width(settings):
        width = _width(config.get("hidden_size", _DEFAULT_WIDTH), *map(settings.get, _WIDTH_KEYS))
        if width is not None:
            config["intermediate_size"] = width
            for key in _WIDTH_KEYS:
                left.pop(key, None)
    return config, list(left)


def _makes_width(settings: Mapping[str, Any]) -> bool:
    is_llama = settings.get("type") == "LlamaConfig"
    return is_llama or any(settings.get(key) is not None for key in _WIDTH_KEYS)


def _width(hidden_size: Any, multiple_of: Any, multiplier: Any) -> int | None:
    """Return the width of the feed-forward layers; ``None`` if a value is not a number.

    Source: MindFormers, ``LlamaFeedForward``.
    """
    multiple = 256 if multiple_of is None else multiple_of
    if not _is_number(hidden_size) or not _is_number(multiple) or multiple < 1:
        return None
    if multiplier is not None and not _is_number(multiplier):
        return None
    width = 4 * hidden_size
    if multiplier is not None:
        width = int((multiplier + 0.01) * width)
    width = int(2 * width / 3)
    return int(-(-width // multiple) * multiple)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
