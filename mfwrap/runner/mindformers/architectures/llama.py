"""Convert the configurations of Llama, Qwen 1 and InternLM, with or without experts."""

from typing import Any, NamedTuple

from mfwrap.runner.mindformers.architectures.experts import Experts, take_experts
from mfwrap.runner.mindformers.architectures.keys import Keys
from mfwrap.runner.mindformers.architectures.rotary import rope_parameters


class _Defaults(NamedTuple):
    """Values of the keys that a file may leave out."""

    vocab_size: int = 32_000
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    rms_norm_eps: float = 1e-5
    theta: float = 10_000.0


class _Biases(NamedTuple):
    """Which projections of the attention have a bias."""

    of_inputs: bool
    of_output: bool


def convert_llama(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert a ``LlamaConfig``.

    Returns:
        The section ``model.config`` of a recipe. transformers' class follows from the biases and
        the experts: ``llama``, ``qwen2`` (bias of queries, keys and values), ``mixtral`` or
        ``qwen2_moe`` (shared experts with a gate).

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    of_inputs = keys.flag("qkv_has_bias", default=False)
    of_output = keys.flag("attn_proj_has_bias", default=False)
    return _converted(keys, moe, _Defaults(), _Biases(of_inputs, of_output))


def convert_qwen(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert a ``QwenConfig`` (Qwen 1, and 1.5 in early releases); see `convert_llama`.

    Queries, keys and values always have a bias. Scaling of the attention for texts longer than in
    training is used in generation only.
    """
    keys.merge("num_hidden_layers", "num_layers")
    keys.merge("num_attention_heads", "num_heads")
    keys.lose_dropout("emb_dropout_prob")
    # The network reads `theta` only. These keys are copies from the checkpoint of Qwen.
    keys.drop("qkv_has_bias", "rotary_emb_base", "rotary_pct", "use_logn_attn")
    return _converted(keys, moe, _Defaults(), _Biases(of_inputs=True, of_output=False))


def convert_internlm(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert an ``InternLMConfig``; see `convert_llama`."""
    has_bias = keys.flag("has_bias", default=True)
    defaults = _Defaults(vocab_size=103_168, rms_norm_eps=1e-6)
    return _converted(keys, moe, defaults, _Biases(has_bias, has_bias))


def convert_early_internlm(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert the ``LlamaConfig`` of an InternLM before MindFormers 1.0; see `convert_llama`.

    All projections of the attention have a bias, which no key describes.
    """
    return _converted(keys, moe, _Defaults(), _Biases(of_inputs=True, of_output=True))


def convert_baichuan2(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert the ``LlamaConfig`` of Baichuan 2 7B; see `convert_llama`.

    transformers has no network with its output layer, so that this is a loss. Source: MindFormers,
    ``NormHead``.
    """
    says = "Baichuan 2 divides each row of the output weights by its norm; the recipe's Llama"
    keys.lose("architecture", "type", f"{says} uses the rows as they are")
    return convert_llama(keys, moe)


def convert_internlm2(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert an ``InternLM2Config``; see `convert_llama`.

    The network is that of Llama. Its checkpoints store one matrix for queries, keys and values.
    """
    defaults = _Defaults(
        vocab_size=92_544,
        num_key_value_heads=8,
        intermediate_size=14_336,
        theta=1_000_000.0,
    )
    return _converted(keys, moe, defaults, _Biases(of_inputs=False, of_output=False))


def _converted(keys: Keys, moe: Keys, defaults: _Defaults, biases: _Biases) -> dict[str, Any]:
    hidden_size = keys.size("hidden_size", 4096)
    heads = keys.size("num_heads", 32)
    layers = keys.size("num_layers", 32)
    groups = keys.size("n_kv_heads", defaults.num_key_value_heads or heads)
    vocab_size = keys.size("vocab_size", defaults.vocab_size)
    width = feed_forward_width(keys, hidden_size, defaults.intermediate_size)
    config = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": positions(keys, "max_position_embedding"),
        "rms_norm_eps": keys.number("rms_norm_eps", defaults.rms_norm_eps),
        "initializer_range": keys.number("init_method_std", 0.01),
        "tie_word_embeddings": keys.flag("tie_word_embeddings", default=False),
        "rope_parameters": rope_parameters(keys, theta=defaults.theta),
        **keys.token_ids(vocab_size),
    }
    keys.unread(
        {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "ffn_hidden_size": width,
            "head_dim": hidden_size // heads,
            "rope_theta": config["rope_parameters"]["rope_theta"],
        }
    )
    lose_document_masks(keys)
    experts = take_experts(moe, adds_losses=False)
    if experts is not None:
        return _mixture(moe, config, experts, biases)
    return _dense(keys, config, biases)


def _dense(keys: Keys, config: dict[str, Any], biases: _Biases) -> dict[str, Any]:
    match biases:
        case (True, False):
            return {"model_type": "qwen2", **config}
        case (False, True):
            says = "transformers has no Llama with a bias of the attention's output only"
            keys.refuse("attn_proj_has_bias", f"{says}; expected qkv_has_bias: true beside it")
    return {"model_type": "llama", "attention_bias": biases.of_inputs, **config}


def _mixture(
    moe: Keys, config: dict[str, Any], experts: Experts, biases: _Biases
) -> dict[str, Any]:
    if experts.is_sigmoid or experts.method != "greedy" or experts.scaling != 1:
        says = "transformers has no Llama with such a router"
        moe.refuse("expert_num", f"{says}; expected a softmax, the greedy method and no scaling")
    if not experts.shared and experts.is_normalized and not any(biases):
        return {
            "model_type": "mixtral",
            "num_local_experts": experts.number,
            "num_experts_per_tok": experts.chosen,
            **config,
        }
    if not experts.shared or not experts.is_gated or biases.of_output:
        says = "expected experts as in Mixtral (none shared, normalized weights, no biases)"
        moe.refuse("expert_num", f"{says} or as in Qwen 2 (shared, with use_shared_expert_gating)")
    width = config["intermediate_size"]
    return {
        "model_type": "qwen2_moe",
        "num_experts": experts.number,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width * experts.shared,
        "norm_topk_prob": experts.is_normalized,
        "qkv_bias": biases.of_inputs,
        **config,
    }


def feed_forward_width(keys: Keys, hidden_size: int, default: int | None = None) -> int:
    """Take the width of the feed-forward layers, or compute it from other keys.

    Source: MindFormers, ``LlamaFeedForward``.

    Args:
        keys: Keys of the model.
        hidden_size: Width of the model.
        default: Width if no key sets it; None to compute it.
    """
    if "intermediate_size" in keys or default is not None:
        keys.drop("multiple_of", "ffn_dim_multiplier")  # MindFormers ignores them in this case
        return keys.size("intermediate_size", default)
    multiple = keys.size("multiple_of", 256)
    width = 4 * hidden_size
    if "ffn_dim_multiplier" in keys:
        width = int((keys.number("ffn_dim_multiplier", 1.0) + 0.01) * width)
    width = int(2 * width / 3)
    return -(-width // multiple) * multiple


def positions(keys: Keys, key: str, default: int = 2048) -> int:
    """Take the number of positions, at least the length of the sequences (``seq_length``)."""
    length = keys.peek_size("seq_length", default)
    return max(length, keys.size(key, length))


def lose_document_masks(keys: Keys) -> None:
    """Add a loss for masks that keep the documents of a sequence apart."""
    for key in ("use_eod_attn_mask_compression", "use_eod_reset", "eod_reset", "enable_fa_var_len"):
        if keys.flag(key, default=False):
            says = f"with {key}, a token attends to its own document only"
            keys.lose("attention", key, f"{says}; in the recipe, to all of its sequence before it")
