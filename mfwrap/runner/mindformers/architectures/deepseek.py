"""Convert the configurations of DeepSeek V2, V3 and R1."""

from typing import Any

from mfwrap.runner.mindformers.architectures.experts import Experts, take_experts
from mfwrap.runner.mindformers.architectures.keys import Keys
from mfwrap.runner.mindformers.architectures.llama import (
    feed_forward_width,
    lose_document_masks,
    positions,
)
from mfwrap.runner.mindformers.architectures.rotary import rope_parameters

_EPS = 1e-6
"""The eps of the norms inside latent attention, which is fixed in transformers."""


def convert_deepseek_v2(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert a ``DeepseekV2Config``.

    Returns:
        The section ``model.config`` of a recipe, for transformers' ``deepseek_v2``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    layers = keys.size("num_layers", 30)
    config = _attention(keys, default_width=12_288, default_vocab=102_400, default_std=0.01)
    experts = _experts(keys, moe)
    if experts.is_sigmoid:
        moe.lose("moe", "use_gating_sigmoid", "the recipe's router computes a softmax, no sigmoids")
    if experts.is_normalized and experts.chosen > 1:
        says = "the file scales the weights of the chosen experts to a sum of 1"
        moe.lose("moe", "norm_topk_prob", f"{says}; the recipe does not")
    if experts.method not in {"greedy", "group_limited_greedy"}:
        says = "expected greedy or group_limited_greedy"
        moe.refuse("topk_method", f"{says}, got {experts.method!r:.80}")
    is_greedy = experts.method == "greedy"
    groups = {} if is_greedy else {"n_group": experts.groups, "topk_group": experts.chosen_groups}
    return {
        "model_type": "deepseek_v2",
        "num_hidden_layers": layers,
        "topk_method": experts.method,
        **groups,
        **config,
        **_routed(experts),
    }


def convert_deepseek_v3(keys: Keys, moe: Keys) -> dict[str, Any]:
    """Convert a ``DeepseekV3Config`` of MindFormers' research folder.

    Returns:
        The section ``model.config`` of a recipe, for transformers' ``deepseek_v3``.

    Raises:
        RecipeError: If a value has a wrong type, or transformers has no such network.
    """
    layers = keys.size("num_layers", 32)
    config = _attention(keys, default_width=18_432, default_vocab=129_280, default_std=0.006)
    if depth := keys.value("mtp_depth", 0):
        says = f"the file also trains {depth} layers that predict later tokens (mtp_depth)"
        keys.lose("mtp", "mtp_depth", f"{says}; the recipe does not")
    keys.drop("mtp_loss_factor")
    experts = _experts(keys, moe, has_biases=True)
    if not experts.is_sigmoid:
        moe.lose("moe", "use_gating_sigmoid", "the recipe's router computes sigmoids, no softmax")
    is_grouped = experts.method != "greedy" and experts.groups is not None
    if is_grouped and experts.method != "noaux_tc":
        says = "the recipe ranks a group of experts by its two best, not by the best"
        moe.lose("moe", "topk_method", says)
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        # One group is the same as none.
        "n_group": experts.groups if is_grouped else 1,
        "topk_group": experts.chosen_groups if is_grouped else 1,
        "norm_topk_prob": experts.is_normalized,
        **config,
        **_routed(experts),
    }


def _attention(
    keys: Keys, *, default_width: int, default_vocab: int, default_std: float
) -> dict[str, Any]:
    hidden_size = keys.size("hidden_size", 4096)
    heads = keys.size("num_heads", 32)
    vocab_size = keys.size("vocab_size", default_vocab)
    eps = keys.number("rms_norm_eps", _EPS)
    if eps != _EPS:
        says = f"the recipe's norms inside the attention have an eps of {_EPS:g}, not {eps:g}"
        keys.lose("architecture", "rms_norm_eps", says)
    keys.is_equal("qkv_has_bias", expected=False, says="transformers' model has no such bias")
    scales = "scaling_factor" in keys
    rope = rope_parameters(keys, method="YARN")
    if scales and rope["rope_type"] == "default":
        says = "expected null with extend_method None: MindFormers would scale the attention's"
        keys.refuse("scaling_factor", f"{says} scores by it, and not the positions")
    keys.drop("n_kv_heads")  # latent attention has as many as heads
    lose_document_masks(keys)
    # Without a rank (null or 0), one matrix computes the queries.
    rank = 0 if keys.is_null("q_lora_rank") else keys.number("q_lora_rank", 1536)
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": feed_forward_width(keys, hidden_size, default_width),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": int(rank) or None,
        "kv_lora_rank": keys.size("kv_lora_rank", 512),
        "qk_rope_head_dim": keys.size("qk_rope_head_dim", 64),
        "qk_nope_head_dim": keys.size("qk_nope_head_dim", 128),
        "v_head_dim": keys.size("v_head_dim", 128),
        "max_position_embeddings": positions(keys, "max_position_embeddings"),
        "rms_norm_eps": eps,
        "initializer_range": keys.number("init_method_std", default_std),
        "rope_parameters": rope,
        **keys.token_ids(vocab_size),
    }


def _experts(keys: Keys, moe: Keys, *, has_biases: bool = False) -> Experts:
    adds_losses = keys.flag("return_extra_loss", default=True)
    experts = take_experts(moe, adds_losses=adds_losses, has_biases=has_biases)
    if experts is None:
        moe.refuse("expert_num", "expected >= 2, the number of experts of this DeepSeek")
    if experts.shared < 1:
        moe.refuse("shared_expert_num", "expected >= 1, as transformers' DeepSeek has")
    if experts.is_gated:
        says = "expected false: transformers' DeepSeek has no gate of the shared experts"
        moe.refuse("use_shared_expert_gating", says)
    return experts


def _routed(experts: Experts) -> dict[str, Any]:
    return {
        "n_routed_experts": experts.number,
        "num_experts_per_tok": experts.chosen,
        "n_shared_experts": experts.shared,
        "moe_intermediate_size": experts.width,
        "first_k_dense_replace": experts.first_dense,
        "routed_scaling_factor": experts.scaling,
    }
