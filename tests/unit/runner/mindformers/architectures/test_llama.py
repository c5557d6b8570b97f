"""Llama and its relatives become the class of transformers that has the same weights."""

import pytest

from mfwrap.runner import RecipeError
from support.model_config import converted, num_parameters

SIZES = "hidden_size: 64, num_layers: 2, num_heads: 4, vocab_size: 320"


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        # Llama 2 7B, Llama 2 70B, Llama 3 8B, and Code Llama 34B with the default multiple of 256.
        ("hidden_size: 4096, multiple_of: 256", 11008),
        ("hidden_size: 8192, multiple_of: 256, ffn_dim_multiplier: 1.3", 28672),
        ("hidden_size: 4096, multiple_of: 1024, ffn_dim_multiplier: 1.3", 14336),
        ("hidden_size: 8192", 22016),
        ("hidden_size: 8192, multiple_of: null, ffn_dim_multiplier: null", 22016),
        ("", 11008),
        # The multiplier is applied before the factor of 2/3, which gives 257. This is rounded up to
        # 288, the next multiple of 32. In the other order the width would be 256.
        ("hidden_size: 64, multiple_of: 32, ffn_dim_multiplier: 1.5", 288),
        ("hidden_size: 64, multiple_of: 8, intermediate_size: 100", 100),
    ],
)
def test_the_width_of_the_feed_forward_layers(settings, width):
    """The width is that of the published models."""
    model = converted(f"{{type: LlamaConfig, {settings}}}")

    assert model.config["intermediate_size"] == width


@pytest.mark.parametrize(
    ("name", "settings", "kind", "bias"),
    [
        ("LlamaConfig", "", "llama", {"attention_bias": False}),
        ("LlamaConfig", "qkv_has_bias: true", "qwen2", {}),
        (
            "LlamaConfig",
            "qkv_has_bias: true, attn_proj_has_bias: true",
            "llama",
            {"attention_bias": True},
        ),
        ("QwenConfig", "", "qwen2", {}),
        ("QwenConfig", "qkv_has_bias: false", "qwen2", {}),
        ("InternLMConfig", "", "llama", {"attention_bias": True}),
        ("InternLMConfig", "has_bias: false", "llama", {"attention_bias": False}),
        ("InternLM2Config", "", "llama", {"attention_bias": False}),
    ],
)
def test_biases_determine_the_class(name, settings, kind, bias):
    """The class of transformers has exactly the biases of MindFormers' network."""
    config = converted(f"{{type: {name}, {SIZES}, {settings}}}").config

    assert config["model_type"] == kind
    assert {key: config[key] for key in bias} == bias


def test_an_internlm_before_1_0_has_biases():
    """Its class of configurations was Llama's; the network adds the biases."""
    model = converted(f"{{type: LlamaConfig, {SIZES}}}", arch="InternLMForCausalLM")

    assert (model.config["model_type"], model.config["attention_bias"]) == ("llama", True)
    assert model.config["rms_norm_eps"] == 1e-5


def test_baichuan_2_is_a_llama_with_another_output_layer():
    """The loss names what differs; the sizes are those of the published 7B."""
    layer = 4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096
    model = converted(
        "{type: LlamaConfig, hidden_size: 4096, num_layers: 32, num_heads: 32, vocab_size: 125696,"
        " multiple_of: 256}",
        arch="Baichuan7BV2ForCausalLM",
    )

    assert [loss.name for loss in model.losses] == ["architecture"]
    assert "divides each row of the output weights by its norm" in model.losses[0].says
    number = num_parameters(model.config, "causal_lm")
    assert number == 2 * 125_696 * 4096 + 32 * layer + 4096


def test_a_bias_of_the_output_alone_is_refused():
    """No network of transformers has a bias of the attention's output only."""
    with pytest.raises(RecipeError, match="bias of the attention's output only") as raised:
        converted(f"{{type: LlamaConfig, {SIZES}, attn_proj_has_bias: true}}")

    assert ": model.model_config.attn_proj_has_bias: " in str(raised.value)


def test_defaults_are_those_of_mindformers():
    """Keys that a file leaves out have MindFormers' defaults, which differ from transformers'."""
    config = converted("{type: LlamaConfig}").config

    assert config == {
        "model_type": "llama",
        "attention_bias": False,
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.01,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (
            "expert_num: 8, num_experts_chosen: 2, use_gmm: true",
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        (
            (
                "expert_num: 8, shared_expert_num: 2, use_shared_expert_gating: true,"
                " norm_topk_prob: false, capacity_factor: 0"
            ),
            {
                "model_type": "qwen2_moe",
                "num_experts": 8,
                "moe_intermediate_size": 256,
                "shared_expert_intermediate_size": 512,
                "norm_topk_prob": False,
                "qkv_bias": False,
            },
        ),
        ("expert_num: 1, capacity_factor: 2.0", {"model_type": "llama"}),
    ],
)
def test_experts_determine_the_class(experts, expected):
    """Experts are those of Mixtral, or those of Qwen with gated shared experts."""
    model = converted(f"{{type: LlamaConfig, {SIZES}, moe_config: {{{experts}}}}}")

    assert {key: model.config[key] for key in expected} == expected
    assert model.losses == []


@pytest.mark.parametrize(
    "experts",
    [
        "norm_topk_prob: false",
        "shared_expert_num: 2",
        "topk_method: noaux_tc",
        "use_gating_sigmoid: true",
        "routed_scaling_factor: 2.5",
    ],
)
def test_other_experts_are_refused(experts):
    """A mixture of experts never becomes a dense model, or a router of another kind."""
    with pytest.raises(RecipeError) as raised:
        converted(f"{{type: LlamaConfig, {SIZES}, moe_config: {{expert_num: 4, {experts}}}}}")

    assert ": moe_config.expert_num: " in str(raised.value)


def test_an_unknown_key_of_experts_is_reported():
    """A key of `moe_config` that no class of MindFormers reads is unknown."""
    text = f"{{type: LlamaConfig, {SIZES}, moe_config: {{expert_num: 4, exprt: 1}}}}"

    with pytest.raises(RecipeError, match=r"m\.yaml: moe_config\.exprt: unknown key"):
        converted(text)


def test_a_size_under_a_name_that_is_ignored_is_refused():
    """MindFormers would train 32 layers; the same value as the one it trains with passes."""
    with pytest.raises(RecipeError, match="trains with 32, got 16") as raised:
        converted("{type: LlamaConfig, num_hidden_layers: 16}")
    assert ": model.model_config.num_hidden_layers: " in str(raised.value)

    model = converted("{type: LlamaConfig, num_hidden_layers: 32}")
    assert model.without_effect == ["model.model_config.num_hidden_layers"]


def test_qwen_accepts_two_names_of_its_sizes():
    """`QwenConfig` reads transformers' names of layers and heads, too."""
    text = "{type: QwenConfig, num_hidden_layers: 4, num_attention_heads: 16}"
    config = converted(text).config

    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (4, 16)


def test_dropout_of_embeddings_is_a_loss():
    """A dropout that transformers' network does not have is named."""
    model = converted("{type: QwenConfig, emb_dropout_prob: 0.1}")

    assert [loss.name for loss in model.losses] == ["dropout"]
    assert converted("{type: QwenConfig, emb_dropout_prob: 0.0}").losses == []


@pytest.mark.parametrize("key", ["use_eod_attn_mask_compression", "eod_reset"])
def test_masks_between_documents_are_a_loss(key):
    """Masks that keep documents apart are named."""
    model = converted(f"{{type: LlamaConfig, {key}: true}}")

    assert [loss.name for loss in model.losses] == ["attention"]


def test_tokens_outside_the_vocabulary_are_left_out():
    """The id of a special token that no token can have is left out, and a list is kept."""
    config = converted(
        "{type: LlamaConfig, vocab_size: 10, pad_token_id: 10, bos_token_id: 1,"
        " eos_token_id: [2, 3]}"
    ).config

    assert "pad_token_id" not in config
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 3])
