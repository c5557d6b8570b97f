"""Convert the configurations of GPT-2, WizardCoder, Bloom and T5."""

from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.architectures.keys import Keys
from mfwrap.runner.mindformers.architectures.llama import positions

_ACTIVATIONS = {
    "gelu": "gelu_pytorch_tanh",
    "fast_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
}
_LAYER_NORM_EPS = 1e-5
"""The eps of MindFormers' ``LayerNorm``, unless a key sets it."""

_INITIAL_STD = 0.01
"""Standard deviation of MindSpore's ``normal``, which initializes each matrix of GPT-2, Bloom and
WizardCoder."""

_TOKEN = 50_256
"""First and last token of a text by default, in transformers, too."""


def activation(keys: Keys, key: str = "hidden_act", default: str = "gelu") -> str:
    """Take the name of an activation, and return transformers' name of the same function.

    MindSpore's ``gelu`` is the approximation by tanh, its ``fast_gelu`` the one by a sigmoid.

    Raises:
        RecipeError: If the activation is unknown.
    """
    name = keys.value(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        keys.refuse(key, f"expected one of {sorted(_ACTIVATIONS)}, got {shown(name)}")
    return _ACTIVATIONS[name]


def convert_gpt2(keys: Keys) -> dict[str, Any]:
    """Convert a ``GPT2Config`` for transformers' ``gpt2``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    hidden_size = keys.size("hidden_size", 768)
    layers, heads = keys.size("num_layers", 12), keys.size("num_heads", 12)
    vocab_size = keys.size("vocab_size", 50_257)
    config = {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_embd": hidden_size,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": hidden_size * keys.size("expand_ratio", 4),
        "n_positions": positions(keys, "max_position_embeddings", 1024),
        "activation_function": activation(keys),
        "resid_pdrop": keys.number("hidden_dropout_rate", 0.1),
        "embd_pdrop": keys.number("embedding_dropout_prob", 0.1),
        "attn_pdrop": keys.number("attention_dropout_rate", 0.1),
        "layer_norm_epsilon": _LAYER_NORM_EPS,
        "initializer_range": _INITIAL_STD,
        **keys.token_ids(vocab_size, bos_token_id=_TOKEN, eos_token_id=_TOKEN),
    }
    norms_first(keys)
    keys.unread({"num_hidden_layers": layers, "num_attention_heads": heads})
    keys.unread({"intermediate_size": config["n_inner"]})
    return config


def convert_wizard_coder(keys: Keys) -> dict[str, Any]:
    """Convert a ``WizardCoderConfig`` for transformers' ``gpt_bigcode``.

    Raises:
        RecipeError: If a value has a wrong type.
    """
    hidden_size = keys.size("hidden_size", 768)
    vocab_size = keys.size("vocab_size", 50_257)
    keys.drop("eos_token", "initializer_range", "pad_token")
    return {
        "model_type": "gpt_bigcode",
        "vocab_size": vocab_size,
        "n_embd": hidden_size,
        "n_layer": keys.size("num_layers", 12),
        "n_head": keys.size("num_heads", 12),
        "n_inner": hidden_size * keys.size("expand_ratio", 4),
        "n_positions": keys.size("n_position", 8192),
        "activation_function": activation(keys),
        "resid_pdrop": keys.number("hidden_dropout_prob", 0.1),
        "embd_pdrop": keys.number("dropout_prob", 0.1),
        "attn_pdrop": keys.number("attention_probs_dropout_prob", 0.1),
        "layer_norm_epsilon": _LAYER_NORM_EPS,
        "initializer_range": _INITIAL_STD,
        "multi_query": True,
        **keys.token_ids(vocab_size, bos_token_id=_TOKEN, eos_token_id=_TOKEN),
    }


def convert_bloom(keys: Keys) -> dict[str, Any]:
    """Convert a ``BloomConfig`` for transformers' ``bloom``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    vocab_size = keys.size("vocab_size", 250_880)
    if (ratio := keys.size("expand_ratio", 4)) != 4:
        says = f"expected 4, the only value that transformers' Bloom has, got {ratio}"
        keys.refuse("expand_ratio", says)
    if (function := activation(keys)) != _ACTIVATIONS["gelu"]:
        says = f"the file computes {function}; the recipe, the only activation that Bloom has, gelu"
        keys.lose("architecture", "hidden_act", says)
    keys.lose_dropout("embedding_dropout_prob")
    norms_first(keys)
    keys.drop("initializer_range")
    return {
        "model_type": "bloom",
        "vocab_size": vocab_size,
        "hidden_size": keys.size("hidden_size", 64),
        "n_layer": keys.size("num_layers", 2),
        "n_head": keys.size("num_heads", 8),
        "hidden_dropout": keys.number("hidden_dropout_rate", 0.1),
        "attention_dropout": keys.number("attention_dropout_rate", 0.1),
        "layer_norm_epsilon": _LAYER_NORM_EPS,
        "initializer_range": _INITIAL_STD,
        **keys.token_ids(vocab_size),
    }


def convert_t5(keys: Keys) -> dict[str, Any]:
    """Convert a ``T5Config`` for transformers' ``t5``.

    Raises:
        RecipeError: If a value has a wrong type.
    """
    vocab_size, layers = keys.size("vocab_size", 32_128), keys.size("num_layers", 6)
    dropout = keys.number("hidden_dropout_rate", 0.1)
    if (rate := keys.number("attention_dropout_rate", 0.1)) != dropout:
        says = f"the file trains with attention_dropout_rate: {rate:g}, the recipe with {dropout:g}"
        keys.lose("dropout", "attention_dropout_rate", f"{says}, as in hidden_dropout_rate")
    keys.is_equal("scale_output", expected=True, says="the recipe scales the decoder's output")
    norms_first(keys)
    keys.unread({"num_hidden_layers": layers})
    keys.drop("embedding_dropout_prob")  # built and not called
    return {
        "model_type": "t5",
        "vocab_size": vocab_size,
        "d_model": keys.size("hidden_size", 512),
        "d_kv": keys.size("d_kv", 64),
        "d_ff": keys.size("d_ff", 2048),
        "num_layers": layers,
        "num_decoder_layers": keys.size("num_decoder_layers", layers),
        "num_heads": keys.size("num_heads", 8),
        "relative_attention_num_buckets": keys.size("relative_attention_num_buckets", 32),
        "dropout_rate": dropout,
        "layer_norm_epsilon": keys.number("layer_norm_epsilon", 1e-6),
        "initializer_factor": keys.number("initializer_factor", 1.0),
        "feed_forward_proj": activation(keys, default="relu"),
        **keys.token_ids(vocab_size),
    }


def norms_first(keys: Keys) -> None:
    """Take ``post_layernorm_residual``, which must be false for a network with norms first."""
    if keys.flag("post_layernorm_residual", default=False):
        says = "expected false: transformers' network normalizes the input of each layer"
        keys.refuse("post_layernorm_residual", says)
