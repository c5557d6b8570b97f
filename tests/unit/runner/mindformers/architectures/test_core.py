"""Files in transformers' own names, and in those of MindFormers' core, keep each key."""

import math

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3Model

from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.runner import RecipeError
from support.model_config import converted


def test_the_keys_of_a_qwen3():
    """Names of transformers are carried over; those of MindFormers alone are sorted."""
    model = converted(
        "{model_type: qwen3, architectures: [Qwen3ForCausalLM], vocab_size: 1000, hidden_size: 64,"
        " intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 32,"
        " num_key_value_heads: 2, hidden_act: silu, rms_norm_eps: 1.0e-6, rope_theta: 1000000,"
        " max_position_embeddings: 4096, attention_dropout: 0.1, hidden_dropout: 0.0,"
        " tie_word_embeddings: true, add_bias_linear: false, gated_linear_unit: true,"
        " qk_layernorm: true, normalization: RMSNorm, position_embedding_type: rope,"
        " use_contiguous_weight_layout_attention: false, params_dtype: float32, offset: 0,"
        " sliding_window: 4096, use_sliding_window: true, torch_dtype: bfloat16}"
    )

    assert model.config == {
        "model_type": "qwen3",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
        "max_position_embeddings": 4096,
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
    }
    assert model.losses == []


def test_the_names_of_the_core():
    """Each name of MindFormers' core becomes that of transformers."""
    config = converted(
        "{model_type: qwen2, num_layers: 3, n_head: 4, num_query_groups: 2, ffn_hidden_size: 96,"
        " layernorm_epsilon: 1.0e-5, rotary_base: 500.0, init_method_std: 0.006,"
        " untie_embeddings_and_output_weights: true, add_qkv_bias: true, hidden_act: swiglu}"
    ).config

    assert config == {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "initializer_range": 0.006,
        "hidden_act": "silu",
    }


@pytest.mark.parametrize("tied", ["true", "false"])
def test_embeddings_are_tied_by_one_key(tied):
    """MindFormers ignores the key of Megatron; one that contradicts the other is an error."""
    key = "untie_embeddings_and_output_weights"
    text = f"model_type: qwen3, tie_word_embeddings: {tied}, {key}"

    with pytest.raises(RecipeError, match="MindFormers ignores this key") as raised:
        converted(f"{{{text}: {tied}}}")
    assert f"model_config.{key}: " in str(raised.value)


@pytest.mark.parametrize("name", ["type: Qwen3Config", "architectures: Qwen3ForCausalLM"])
def test_the_class_names_the_model_type(name):
    """A file may name the class of the configuration or of the network."""
    assert converted(f"{{{name}}}").config == {"model_type": "qwen3"}


def test_scaled_rotary_embeddings():
    """`rope_scaling` and the core's own keys of YaRN become `rope_parameters`."""
    scaled = converted(
        "{model_type: qwen3, rope_theta: 100.0, rope_scaling: {type: yarn, factor: 4.0,"
        " original_max_position_embeddings: 1024}}"
    ).config
    own = converted(
        "{model_type: deepseek_v3, num_nextn_predict_layers: 0, moe_router_bias_update_rate: 0.0,"
        " position_embedding_type: yarn, rotary_scaling_factor: 8.0, mscale: 1.0,"
        " max_position_embeddings: 512}"
    ).config

    assert scaled["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    assert own["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 512,
    }
    with pytest.raises(RecipeError, match="expected rope, partial_rope or yarn"):
        converted("{model_type: qwen3, position_embedding_type: learned_absolute}")


@pytest.mark.parametrize(
    ("setting", "lost"),
    [
        ("rope_theta: 100.0", []),
        ("mscale: 0.0", []),
        ("rope_scaling: {type: linear, factor: 4.0}", ["mscale"]),
        ("rotary_scaling_factor: 1.0", []),
        ("rope_scaling: {type: yarn, factor: 40.0}", []),
        ("rope_scaling: {type: yarn, factor: 40.0, mscale: 1.0, mscale_all_dim: 1.0}", []),
        ("rope_scaling: {type: yarn, factor: 40.0, mscale: 1.0}", ["rope_scaling"]),
    ],
)
def test_the_scores_of_latent_attention(setting, lost):
    """MindFormers scales them by YaRN's `mscale`, also without YaRN."""
    text = "num_nextn_predict_layers: 0, moe_router_bias_update_rate: 0.0"
    model = converted(f"{{model_type: deepseek_v3, {text}, {setting}}}")

    assert [loss.path[-1] for loss in model.losses] == lost
    assert {loss.name for loss in model.losses} <= {"attention"}
    if "yarn" in setting:
        assert model.config["rope_parameters"]["mscale_all_dim"] in (0.707, 1.0)
        assert model.config["rope_parameters"]["beta_fast"] == 32.0


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 5e6])
@pytest.mark.parametrize("size", [8, 64, 128])
def test_the_scale_of_scores_without_yarn(theta, size):
    """The network scales the scores as MindFormers does, and rotates as it does without YaRN."""
    text = "num_nextn_predict_layers: 0, moe_router_bias_update_rate: 0.0, mscale: 0.5"
    text += f", rope_theta: {theta}, qk_rope_head_dim: {size}, rotary_scaling_factor: 8.0"
    read = converted(f"{{model_type: deepseek_v3, {text}, max_position_embeddings: 512}}").config
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 8, "n_routed_experts": 8}
    sizes |= {"intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    network = DeepseekV3Model(DeepseekV3Config(**{**read, **sizes, "qk_nope_head_dim": 16}))
    scaling = (16 + size) ** -0.5 * (0.1 * 0.5 * math.log(8) + 1) ** 2

    assert network.layers[0].self_attn.scaling == pytest.approx(scaling)
    assert network.rotary_emb.attention_scaling == 1.0
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    torch.testing.assert_close(network.rotary_emb.inv_freq.double(), theta**-exponents)


def test_glm4_rotates_half_of_each_head():
    """The share of rotated dimensions arrives, and is a half by default."""
    for text in ("rope_theta: 100.0", "rope_theta: 100.0, rotary_percent: 0.5"):
        config = converted(f"{{model_type: glm4, {text}}}").config

        assert config["rope_parameters"]["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("kind", "setting", "name"),
    [
        ("qwen3", "hidden_dropout: 0.1", "dropout"),
        ("qwen3", "use_eod_reset: true", "attention"),
        ("qwen3", "window_size: [10, 10]", "attention"),
        ("qwen3", "attention_bias: true", "architecture"),
        ("qwen3", "qk_layernorm: false", "architecture"),
        ("qwen3", "add_bias_linear: true", "architecture"),
        ("qwen2", "qkv_has_bias: false", "architecture"),
        ("qwen2", "normalization: LayerNorm", "architecture"),
        ("qwen3", "mtp_num_layers: 1", "mtp"),
        ("qwen3", "quantization_config: {quant_method: rtn}", "quantization"),
    ],
)
def test_losses(kind, setting, name):
    """Each setting that transformers' network does not have is a loss."""
    model = converted(f"{{model_type: {kind}, {setting}}}")

    assert [loss.name for loss in model.losses] == [name]


def test_deepseek_v3_predicts_a_second_token_by_default():
    """MindFormers' default is one layer for it; without a query rank, the rank is none."""
    model = converted("{model_type: deepseek_v3, q_lora_rank: null}")

    assert [loss.name for loss in model.losses] == ["mtp"]
    assert model.config["q_lora_rank"] is None


@pytest.mark.parametrize(
    ("setting", "is_lost"),
    [
        ("qk_layernorm: true", False),
        ("qk_layernorm: false", True),
        ("moe_shared_expert_intermediate_size: 32", False),
        ("moe_shared_expert_intermediate_size: 16", True),
    ],
)
def test_parts_of_deepseek_v3(setting, is_lost):
    """Its attention normalizes the latent queries and keys; two shared experts have two sizes."""
    sizes = "n_shared_experts: 2, moe_intermediate_size: 16"
    model = converted(f"{{model_type: deepseek_v3, {sizes}, {setting}}}")

    assert ("architecture" in [loss.name for loss in model.losses]) is is_lost


def test_other_model_types_have_the_names_of_transformers():
    """A model type without a network in MindFormers' core is carried over as it is."""
    text = "model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 2"

    expected = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2}
    assert converted(f"{{{text}}}").config == expected
    with pytest.raises(RecipeError, match=r"model_config\.n_lyer: unknown key"):
        converted(f"{{{text}, n_lyer: 3}}")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe"])
def test_a_recipe_accepts_the_result(kind):
    """The width of a head arrives, also where transformers' class does not declare it."""
    config = converted(f"{{model_type: {kind}, head_dim: 16}}").config

    assert ModelSettings(config=config).config["head_dim"] == 16
