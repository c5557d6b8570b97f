"""Experts of MindFormers' core arrive under transformers' names."""

import pytest

from mfwrap.runner import RecipeError
from support.model_config import converted


def test_the_names_of_the_core():
    """Each name of MindFormers' core becomes that of the class."""
    text = "num_moe_experts: 8, moe_router_topk: 4, moe_ffn_hidden_size: 16, norm_topk_prob: true"

    qwen = converted(f"{{model_type: qwen3_moe, {text}}}")
    glm = converted(
        f"{{model_type: glm4_moe, {text}, shared_expert_num: 2, moe_router_num_groups: 4,"
        " moe_router_group_topk: 2, moe_router_topk_scaling_factor: 2.0,"
        " topk_bias_update_rate: 0.0, first_k_dense_replace: 3}"
    )

    assert qwen.config == {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    assert glm.config == {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 3,
    }
    assert (qwen.losses, glm.losses) == ([], [])


@pytest.mark.parametrize(
    "setting",
    ["first_k_dense_replace: 2", "moe_layer_freq: [0, 0, 1, 1]"],
)
def test_leading_dense_layers(setting):
    """A class without a key for leading dense layers lists them."""
    config = converted(f"{{model_type: qwen3_moe, {setting}}}").config

    assert config["mlp_only_layers"] == [0, 1]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("moe_aux_loss_coeff: 0.001", "moe"),
        ("z_loss_factor: 0.001", "moe"),
        ("capacity_factor: 1.5", "moe"),
        ("moe_router_force_expert_balance: true", "architecture"),
        ("use_gating_sigmoid: true", "moe"),
        ("moe_router_score_function: sigmoid", "moe"),
        ("moe_router_enable_expert_bias: true", "moe"),
        ("topk_method: noaux_tc", "moe"),
        ("routed_scaling_factor: 1.5", "moe"),
        ("n_shared_experts: 1", "architecture"),
        ("use_shared_expert_gating: true", "architecture"),
        ("moe_layer_freq: 2", "architecture"),
        ("moe_layer_freq: [0, 1, 0, 1]", "architecture"),
    ],
)
def test_losses(setting, name):
    """Each part that transformers' network does not have is a loss."""
    model = converted(f"{{model_type: qwen3_moe, {setting}}}")

    assert [loss.name for loss in model.losses] == [name]


@pytest.mark.parametrize(
    ("setting", "lost"),
    [
        ("num_experts_per_tok: 8, n_group: 8, topk_group: 4", []),
        ("num_experts_per_tok: 8, n_group: 8, topk_group: 2", ["topk_group"]),
        ("num_experts_per_tok: 6, n_group: 1, topk_group: 1", []),
        ("num_experts_per_tok: 4", ["topk_group"]),
        ("offset: 0", []),
    ],
)
def test_groups_that_are_ranked_by_other_scores(setting, lost):
    """MindFormers adds as many scores as a group has chosen experts; transformers adds two."""
    text = "num_nextn_predict_layers: 0, moe_router_bias_update_rate: 0.0, mscale: 0.0"
    losses = converted(f"{{model_type: deepseek_v3, {text}, {setting}}}").losses

    assert [loss.path[-1] for loss in losses] == lost


def test_the_choice_of_a_balancing_loss_without_its_factor_has_no_effect():
    """The kind of a loss matters only if its coefficient is set."""
    text = "moe_router_load_balancing_type: gbs_aux_loss, moe_token_drop_policy: probs"
    model = converted(f"{{model_type: qwen3_moe, {text}, moe_grouped_gemm: true}}")

    assert model.losses == []


def test_a_wrong_number_of_dense_layers():
    """The error names the key."""
    for number in (-1, 10**12):
        with pytest.raises(RecipeError, match=f"from 0 to 1000, got {number}"):
            converted(f"{{model_type: qwen3_moe, first_k_dense_replace: {number}}}")


@pytest.mark.parametrize(
    "kind", ["deepseek_v3, num_nextn_predict_layers: 0, mscale: 0.0", "glm4_moe"]
)
@pytest.mark.parametrize(
    ("setting", "rate"),
    [
        ("offset: 0", 1e-3),
        ("moe_router_enable_expert_bias: true, moe_router_bias_update_rate: 2e-4", 2e-4),
        ("topk_bias_update_rate: 0.01", 0.01),
        ("moe_router_enable_expert_bias: false", None),
        ("moe_router_bias_update_rate: 0.0", 0.0),
    ],
)
def test_biases(kind, setting, rate):
    """Routers with sigmoids move their biases by 0.001 unless the file says otherwise."""
    model = converted(f"{{model_type: {kind}, {setting}}}")

    assert model.bias_rate == rate
    assert model.losses == []
    assert "moe_router_bias_update_rate" not in model.config
