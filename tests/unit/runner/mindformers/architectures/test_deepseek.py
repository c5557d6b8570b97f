"""DeepSeek V2 and V3 keep their latent attention and their experts."""

import pytest

from mfwrap.runner import RecipeError
from support.model_config import converted

EXPERTS = (
    "expert_num: 8, num_experts_chosen: 2, shared_expert_num: 1, moe_intermediate_size: 16,"
    " first_k_dense_replace: 1, capacity_factor: -1"
)
V3 = f"{EXPERTS}, use_gating_sigmoid: true, topk_method: noaux_tc, n_group: 4, topk_group: 2"
V2 = f"{EXPERTS}, norm_topk_prob: false"


def deepseek(version, experts, settings=""):
    """Convert a DeepSeek without YaRN, of version V2 or V3."""
    head = f"type: Deepseek{version}Config, extend_method: None"
    return converted(f"{{{head}, {settings or 'offset: 0'}, moe_config: {{{experts}}}}}")


def test_the_keys_of_v3():
    """Sizes, groups of experts and YaRN arrive."""
    scaling = (
        "{beta_fast: 32.0, beta_slow: 1.0, factor: 40.0, mscale: 1.0, mscale_all_dim: 1.0,"
        " original_max_position_embeddings: 4096}"
    )
    model = converted(
        "{type: DeepseekV3Config, num_layers: 3, hidden_size: 64, num_heads: 4,"
        f" intermediate_size: 96, scaling_factor: {scaling}, theta: 10000.0, multiple_of: 256,"
        f" moe_config: {{{V3}, routed_scaling_factor: 2.5}}}}"
    )

    expected = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "q_lora_rank": 1536,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "initializer_range": 0.006,
    }
    assert {key: model.config[key] for key in expected} == expected
    assert model.config["rope_parameters"]["rope_type"] == "yarn"
    assert model.config["rope_parameters"]["factor"] == 40.0
    assert model.losses == []


def test_v2_without_a_query_rank():
    """A rank of 0 is none: queries have one matrix."""
    config = deepseek("V2", V2, "q_lora_rank: 0").config

    assert config["q_lora_rank"] is None
    assert config["topk_method"] == "greedy"
    assert "n_group" not in config


def test_v2_with_groups():
    """Groups of experts arrive with the method that uses them."""
    experts = f"{V2}, topk_method: group_limited_greedy, n_group: 4, topk_group: 2"
    config = deepseek("V2", experts).config

    assert (config["n_group"], config["topk_group"]) == (4, 2)


@pytest.mark.parametrize(
    ("version", "experts", "settings", "name"),
    [
        ("V2", EXPERTS, "", "moe"),
        ("V2", f"{V2}, use_gating_sigmoid: true", "", "moe"),
        ("V3", EXPERTS, "", "moe"),
        ("V3", V3.replace("noaux_tc", "group_limited_greedy"), "", "moe"),
        ("V3", f"{V3}, aux_loss_types: [expert], aux_loss_factors: [0.0001]", "", "moe"),
        ("V3", f"{V3}, z_loss_factor: 0.1", "", "moe"),
        ("V3", V3.replace("capacity_factor: -1", "capacity_factor: 1.5"), "", "moe"),
        ("V3", V3, "mtp_depth: 1", "mtp"),
        ("V3", V3, "rms_norm_eps: 1.0e-5", "architecture"),
        ("V3", V3, "qkv_has_bias: true", "architecture"),
    ],
)
def test_losses(version, experts, settings, name):
    """Each part that transformers' DeepSeek does not have is a loss."""
    assert [loss.name for loss in deepseek(version, experts, settings).losses] == [name]


def test_losses_that_are_not_added():
    """Losses of the router that the network does not add are no loss of meaning."""
    model = deepseek("V3", f"{V3}, z_loss_factor: 0.1", "return_extra_loss: false")

    assert model.losses == []


@pytest.mark.parametrize(
    "experts",
    [
        "expert_num: 1",
        V3.replace("shared_expert_num: 1", "shared_expert_num: 0"),
        f"{V3}, use_shared_expert_gating: true",
    ],
)
def test_a_network_that_transformers_lacks_is_refused(experts):
    """Transformers' DeepSeek has routed and shared experts, without a gate."""
    with pytest.raises(RecipeError):
        deepseek("V3", experts)


def test_scores_that_are_scaled_without_yarn_are_refused():
    """MindFormers reads the scaling in the attention, whatever the method of the positions."""
    with pytest.raises(RecipeError, match="expected null with extend_method None"):
        deepseek("V3", V3, "scaling_factor: {factor: 40.0, mscale_all_dim: 1.0}")


def test_an_unknown_method_of_v2_is_refused():
    """A method that transformers' DeepSeek V2 does not have is an error."""
    with pytest.raises(RecipeError, match="expected greedy or group_limited_greedy"):
        deepseek("V2", f"{V2}, topk_method: noaux_tc")


@pytest.mark.parametrize(
    ("experts", "rate"),
    [(V3, None), (f"{V3}, balance_via_topk_bias: true, topk_bias_update_rate: 0.001", 0.0)],
)
def test_biases_of_v3(experts, rate):
    """A callback with a rate of its own moves the biases; without the flag there are none."""
    model = deepseek("V3", experts)

    assert (model.losses, model.bias_rate) == ([], rate)
