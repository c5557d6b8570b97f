"""Read the section ``moe_config``: experts of MindFormers' models before its core of 2025."""

from collections.abc import Mapping
from typing import NamedTuple

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.architectures.keys import Keys


class Experts(NamedTuple):
    """A mixture of experts."""

    number: int
    """Number of routed experts."""

    chosen: int
    """Number of experts that a token is sent to."""

    shared: int
    """Number of experts that each token is sent to; 0 for none."""

    is_gated: bool
    """Whether the shared experts have a gate."""

    is_normalized: bool
    """Whether the weights of the chosen experts are scaled to a sum of 1."""

    width: int
    """Width of an expert, if the model has a key for it."""

    first_dense: int
    """Number of leading layers without experts."""

    scaling: float
    """Factor of the routed experts' output."""

    method: str
    """``greedy``, ``group_limited_greedy`` or ``noaux_tc``."""

    groups: int | None
    """Number of groups of experts; None for one."""

    chosen_groups: int | None
    """Number of groups that a token is sent to."""

    is_sigmoid: bool
    """Whether scores are sigmoids, not a softmax."""


def take_experts(keys: Keys, *, adds_losses: bool, has_biases: bool = False) -> Experts | None:
    """Take the keys of ``moe_config``; None for a dense model.

    Source: MindFormers, ``MoEConfig``, ``MoEV2``, ``MoEV3`` and ``TopkRouterV2``.

    Args:
        keys: Keys of the section.
        adds_losses: Whether the network adds the router's losses to the language model's.
        has_biases: Whether the recipe's router has biases, which a callback of the file may move.

    Raises:
        RecipeError: If a value has a wrong type.
    """
    number = keys.size("expert_num", 1)
    if number == 1:
        return None
    _lose_dropped_tokens(keys)
    _lose_auxiliary(keys, adds_losses=adds_losses, has_biases=has_biases)
    first_dense = keys.value("first_k_dense_replace", 1)
    if not isinstance(first_dense, int):
        says = f"expected an integer, got {shown(first_dense)}"
        keys.refuse("first_k_dense_replace", says)
    return Experts(
        number=number,
        chosen=keys.size("num_experts_chosen", 1),
        shared=int(keys.number("shared_expert_num", 0)),
        is_gated=keys.flag("use_shared_expert_gating", default=False),
        is_normalized=keys.flag("norm_topk_prob", default=True),
        width=keys.size("moe_intermediate_size", 1407),
        first_dense=int(first_dense),
        scaling=keys.number("routed_scaling_factor", 1.0),
        method=str(keys.value("topk_method", "greedy")),
        groups=keys.value("n_group"),
        chosen_groups=keys.value("topk_group"),
        is_sigmoid=keys.flag("use_gating_sigmoid", default=False),
    )


def _lose_dropped_tokens(keys: Keys) -> None:
    capacity = keys.number("capacity_factor", 1.1)
    if keys.flag("use_gmm", default=False) or capacity <= 0:
        return
    says = f"an expert drops the tokens above capacity_factor {capacity:g}"
    keys.lose("moe", "capacity_factor", f"{says}; the recipe drops no token")


def _lose_auxiliary(keys: Keys, *, adds_losses: bool, has_biases: bool) -> None:
    """Add a loss for what balances the load of experts during the training."""
    used: dict[str, object] = {}
    z_loss, rate = keys.number("z_loss_factor", 0.0), keys.number("topk_bias_update_rate", 0.0)
    factors = keys.value("aux_loss_factors", [])
    types = keys.value("aux_loss_types", [])
    if adds_losses:
        used["z_loss_factor"] = z_loss
    if keys.flag("balance_via_topk_bias", default=False):
        if has_biases:
            keys.move_biases(0.0)
        else:
            used["topk_bias_update_rate"] = rate
    if adds_losses and isinstance(factors, list) and any(factors) and types:
        used["aux_loss_factors"] = factors
    lose_balance(keys, used)


def lose_balance(keys: Keys, used: Mapping[str, object]) -> None:
    """Add a loss for the values in `used` that are not zero, which balance the load of experts."""
    set_to = {key: value for key, value in used.items() if value}
    if set_to:
        listed = ", ".join(f"{key}: {shown(value)}" for key, value in set_to.items())
        says = f"the load of the experts is balanced by {listed}; the recipe does not balance it"
        keys.lose("moe", next(iter(set_to)), says)
