"""Convert the configurations of BERT, ViT and Swin."""

from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.architectures.gpt import activation, norms_first
from mfwrap.runner.mindformers.architectures.keys import Keys


def convert_bert(keys: Keys, *, tags_tokens: bool = False) -> dict[str, Any]:
    """Convert a ``BertConfig`` for transformers' ``bert``.

    Source: MindFormers, ``BertModel``, whose layers compute the tanh approximation of GELU and
    whose norms have an eps of 1e-5, whatever the file says.

    Args:
        keys: Keys of the model.
        tags_tokens: Whether the network is ``BertForTokenClassification``, whose head has the
            dropout of the layers, not ``dropout_prob``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    hidden_size = keys.size("hidden_size", 768)
    layers, heads = keys.size("num_hidden_layers", 12), keys.size("num_attention_heads", 12)
    width = keys.size("intermediate_size", 3072)
    vocab_size = keys.size("vocab_size", 30_522)
    keys.unread(
        {
            "embedding_size": hidden_size,
            "num_layers": layers,
            "num_heads": heads,
            "expand_ratio": width // hidden_size,
        }
    )
    keys.drop("hidden_act", "layer_norm_eps")
    if not keys.flag("post_layernorm_residual", default=True):
        says = "expected true: transformers' BERT normalizes the output of each layer"
        keys.refuse("post_layernorm_residual", says)
    if keys.flag("use_relative_positions", default=False):
        says = "expected false: transformers' BERT has absolute positions"
        keys.refuse("use_relative_positions", says)
    dropout = keys.number("hidden_dropout_prob", 0.1)
    return {
        "model_type": "bert",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": width,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": keys.number("attention_probs_dropout_prob", 0.1),
        "classifier_dropout": dropout if tags_tokens else keys.number("dropout_prob", 0.1),
        "max_position_embeddings": keys.size("max_position_embeddings", 128),
        "type_vocab_size": keys.size("type_vocab_size", 2),
        "initializer_range": keys.number("initializer_range", 0.02),
        "layer_norm_eps": 1e-5,
        **keys.token_ids(vocab_size),
        **_labels(keys),
    }


_POOLED_EPS = 1e-6
"""Epsilon of the norm after MindFormers' mean pooling, whatever the file says."""


def convert_vit(keys: Keys) -> dict[str, Any]:
    """Convert a ``ViTConfig`` for transformers' ``beit`` or ``vit``.

    MindFormers classifies the mean of the patches and drops paths. In transformers, BEiT does both,
    without its relative positions. BEiT has no bias of keys, which does not change the attention:
    it adds the same number to all scores of a query. No network of transformers classifies the
    class token as MindFormers does for ``use_mean_pooling: false``: without a norm after the last
    layer.

    Source: MindFormers 1.2, ``ViTModel``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    norms_first(keys)
    keys.merge("num_classes", "num_labels")  # before and since 1.1
    sizes = _of_images(keys, patch_size=16, eps=1e-12) | {
        "hidden_size": keys.size("hidden_size", 768),
        "num_hidden_layers": keys.size("num_hidden_layers", 12),
        "num_attention_heads": keys.size("num_attention_heads", 12),
        "intermediate_size": keys.size("intermediate_size", 3072),
        "initializer_range": keys.number("initializer_range", 0.02),
        **_labels(keys, default=1000),
    }
    pools = keys.flag("use_mean_pooling", default=True)
    if pools and sizes["layer_norm_eps"] == _POOLED_EPS and sizes["qkv_bias"]:
        del sizes["qkv_bias"]
        return {
            "model_type": "beit",
            **sizes,
            "use_absolute_position_embeddings": True,
            "layer_scale_init_value": keys.number("init_values", 0.0),
            "drop_path_rate": keys.number("drop_path_rate", 0.1),
        }
    keys.lose_dropout("drop_path_rate", 0.1)
    if pools:
        says = "the file classifies the mean of the patches; the recipe, the class token"
    else:
        says = "the file classifies the class token without a norm; the recipe normalizes it first"
    keys.lose("architecture", "use_mean_pooling", says)
    if keys.value("init_values") is not None:
        says = "the file scales each layer's output by learned factors; the recipe does not"
        keys.lose("architecture", "init_values", says)
    return {"model_type": "vit", **sizes}


def convert_swin(keys: Keys) -> dict[str, Any]:
    """Convert a ``SwinConfig`` for transformers' ``swin``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    if not keys.flag("patch_norm", default=True):
        keys.refuse("patch_norm", "expected true: transformers' Swin normalizes the patches")
    keys.is_equal("shift_size", 0, "the recipe shifts every second window by half of its size")
    return {
        "model_type": "swin",
        **_of_images(keys, patch_size=4, eps=1e-5),
        "embed_dim": keys.size("embed_dim", 128),
        "depths": _sizes(keys, "depths", [2, 2, 18, 2]),
        "num_heads": _sizes(keys, "num_heads", [4, 8, 16, 32]),
        "window_size": keys.size("window_size", 7),
        "mlp_ratio": keys.number("mlp_ratio", 4.0),
        "drop_path_rate": keys.number("drop_path_rate", 0.1),
        "use_absolute_embeddings": keys.flag("use_absolute_embeddings", default=False),
        **_labels(keys, default=1000),
    }


def _of_images(keys: Keys, *, patch_size: int, eps: float) -> dict[str, Any]:
    """Take the keys of both networks for images, with the defaults that differ."""
    return {
        "image_size": keys.size("image_size", 224),
        "patch_size": keys.size("patch_size", patch_size),
        "num_channels": keys.size("num_channels", 3),
        "hidden_act": activation(keys),
        "qkv_bias": keys.flag("qkv_bias", default=True),
        "layer_norm_eps": keys.number("layer_norm_eps", eps),
        "hidden_dropout_prob": keys.number("hidden_dropout_prob", 0.0),
        "attention_probs_dropout_prob": keys.number("attention_probs_dropout_prob", 0.0),
    }


def _labels(keys: Keys, default: int = 1) -> dict[str, int]:
    """Take the number of classes; none if it follows from the data (1 or left out)."""
    number = keys.size("num_labels", default)
    return {} if number == 1 else {"num_labels": number}


def _sizes(keys: Keys, key: str, default: list[int]) -> list[int]:
    value = keys.value(key, default)
    are_sizes = isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value
    )
    if not are_sizes or not value:
        keys.refuse(key, f"expected a list of integers >= 1, got {shown(value)}")
    return list(value)
