"""Convert the experts of MindFormers' core to the names of transformers' configurations."""

from collections.abc import Collection
from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.architectures.experts import lose_balance
from mfwrap.runner.mindformers.architectures.keys import Keys

_NUMBERS = ("n_routed_experts", "num_experts", "num_local_experts")
_ALIASES = {
    "expert_num": _NUMBERS,
    "num_moe_experts": _NUMBERS,
    "n_routed_experts": _NUMBERS,
    "num_experts": _NUMBERS,
    "num_local_experts": _NUMBERS,
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "num_experts_chosen": ("num_experts_per_tok",),
    "moe_router_topk": ("num_experts_per_tok",),
    "shared_expert_num": ("n_shared_experts",),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "topk_bias_update_rate": ("moe_router_bias_update_rate",),
    "balance_via_topk_bias": ("moe_router_enable_expert_bias",),
    "z_loss_factor": ("moe_z_loss_coeff",),
    "capacity_factor": ("moe_expert_capacity_factor",),
}
_MAX_LAYERS = 1_000
_WITH_SIGMOID = frozenset({"deepseek_v3", "glm4_moe"})
"""Model types whose router computes sigmoids and has a correction bias."""

_GROUPS = {"deepseek_v3": (8, 4)}
"""Defaults of ``n_group`` and ``topk_group`` that differ from 1."""

_CHOSEN = 8
"""Default of ``num_experts_per_tok`` of all model types."""

_ADDED_SCORES = 2
"""Number of scores that transformers adds to rank a group of experts."""


def convert_experts(keys: Keys, kind: str, known: Collection[str]) -> dict[str, Any]:
    """Take the keys of experts that transformers names differently or does not have.

    Args:
        keys: Keys of the model.
        kind: The model type.
        known: Keys of transformers' configuration of this type.

    Returns:
        Keys of the section ``model.config``.

    Raises:
        RecipeError: If a value has a wrong type.
    """
    for alias, names in _ALIASES.items():
        name = next((name for name in names if name in known), names[0])
        if alias != name:
            keys.merge(alias, name)
    if kind not in _WITH_SIGMOID and not kind.endswith("_moe"):
        return {}
    _lose_balance(keys, kind)
    has_sigmoid = kind in _WITH_SIGMOID
    expected = "sigmoid" if has_sigmoid else "softmax"
    is_sigmoid = keys.value("use_gating_sigmoid")
    if is_sigmoid is not None and is_sigmoid != has_sigmoid:
        says = f"the recipe's router computes a {expected}"
        keys.lose("moe", "use_gating_sigmoid", says)
    score = "moe_router_score_function"
    keys.is_equal(score, expected, f"the recipe's router computes a {expected}", "moe")
    method = "noaux_tc" if has_sigmoid else "greedy"
    keys.is_equal("topk_method", method, f"the recipe chooses experts by {method}", "moe")
    _lose_group_score(keys, kind)
    keys.is_equal("use_shared_expert_gating", expected=False, says="the recipe has no such gate")
    if "n_shared_experts" not in known:
        says = f"transformers' {kind} has no shared experts"
        keys.is_equal("n_shared_experts", 0, says, "architecture")
        keys.is_equal("moe_shared_expert_intermediate_size", None, says, "architecture")
    else:
        _check_shared_size(keys)
    if "routed_scaling_factor" not in known:
        says = f"transformers' {kind} does not scale the routed experts' output"
        keys.is_equal("routed_scaling_factor", 1.0, says, "moe")
    return _dense_layers(keys, known)


def _check_shared_size(keys: Keys) -> None:
    """Add a loss if the shared experts together have another size than so many of the others."""
    size = keys.value("moe_shared_expert_intermediate_size")
    number = keys.peek_size("n_shared_experts", 1)
    each = keys.peek_size("moe_intermediate_size", size or 1)
    if size is not None and size != number * each:
        says = f"the shared experts have size {shown(size)}; the recipe's {number} x {each}"
        keys.lose("architecture", "moe_shared_expert_intermediate_size", says)


def _lose_group_score(keys: Keys, kind: str) -> None:
    """Add a loss if groups of experts are not ranked by the sum of their two best scores.

    Source: MindFormers, ``TopKRouter``, which adds as many scores as a group has chosen experts.
    """
    groups, chosen_groups = _GROUPS.get(kind, (1, 1))
    if keys.peek_size("n_group", groups) == 1:
        return
    chosen = keys.peek_size("num_experts_per_tok", _CHOSEN)
    number = chosen // keys.peek_size("topk_group", chosen_groups)
    if number != _ADDED_SCORES:
        says = f"the file ranks groups of experts by their {number} best; the recipe by the 2 best"
        keys.lose("moe", "topk_group", says)


def take_bias_rate(keys: Keys, *, is_enabled: bool) -> float | None:
    """Take the rate at which the biases of experts move; ``None`` if the router has no biases.

    Args:
        keys: Keys of the model.
        is_enabled: Whether the router has biases by default.
    """
    has_bias = keys.flag("moe_router_enable_expert_bias", default=is_enabled)
    rate = keys.number("moe_router_bias_update_rate", 1e-3)
    return rate if has_bias else None


def _lose_balance(keys: Keys, kind: str) -> None:
    """Add a loss for what balances the load of experts during the training, but for biases."""
    used = {key: keys.number(key, 0.0) for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff")}
    rate = take_bias_rate(keys, is_enabled=kind in _WITH_SIGMOID)
    if kind in _WITH_SIGMOID and rate is not None:
        keys.move_biases(rate)
    else:
        used["moe_router_bias_update_rate"] = rate or 0.0
    lose_balance(keys, used)
    if (capacity := keys.value("moe_expert_capacity_factor")) is not None:
        says = f"an expert drops the tokens above capacity_factor {shown(capacity)}"
        keys.lose("moe", "moe_expert_capacity_factor", f"{says}; the recipe drops no token")


def _dense_layers(keys: Keys, known: Collection[str]) -> dict[str, Any]:
    """Take ``moe_layer_freq`` and ``first_k_dense_replace``: which layers have no experts."""
    frequency = keys.value("moe_layer_freq", 1)
    first = keys.value("first_k_dense_replace")
    if isinstance(frequency, list):
        first = frequency.index(1) if 1 in frequency else len(frequency)
        if 0 in frequency[first:]:
            keys.lose("architecture", "moe_layer_freq", "the recipe has dense layers first only")
    elif frequency != 1:
        says = "the recipe has experts in each layer after the dense ones"
        keys.lose("architecture", "moe_layer_freq", says)
    if first is None:
        return {}
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= _MAX_LAYERS:
        says = f"expected an integer from 0 to {_MAX_LAYERS}, got {shown(first)}"
        keys.refuse("first_k_dense_replace", says)
    if "first_k_dense_replace" in known:
        return {"first_k_dense_replace": first}
    return {"mlp_only_layers": list(range(first))} if first else {}
