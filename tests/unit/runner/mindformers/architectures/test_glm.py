"""ChatGLM 2 and 3 and GLM 4 become transformers' `glm` and `glm4`."""

import pytest

from mfwrap.runner import RecipeError
from support.model_config import converted


def test_the_keys_of_a_glm():
    """Each size, the half rotary embedding and its base arrive."""
    model = converted(
        "{type: ChatGLM2Config, num_layers: 40, padded_vocab_size: 151552, hidden_size: 4096,"
        " ffn_hidden_size: 13696, kv_channels: 128, num_attention_heads: 32,"
        " layernorm_epsilon: 1e-5, rope_ratio: 500, multi_query_group_num: 2, rmsnorm: true,"
        " apply_query_key_layer_scaling: true, pre_seq_len: null, eos_token_id: [1, 2],"
        " pad_token_id: 151329, seq_length: 8192, quantization_bit: 0, prefix_projection: false}"
    )

    assert model.config == {
        "model_type": "glm",
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.01,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": 0.5,
        },
        "pad_token_id": 151_329,
        "eos_token_id": [1, 2],
    }
    assert model.losses == []


def test_more_norms_make_a_glm_4():
    """Norms behind attention and feed-forward layers are those of transformers' `glm4`."""
    both = "post_self_attn_layernorm: true, post_mlp_layernorm: true"

    assert converted(f"{{type: ChatGLM2Config, {both}}}").config["model_type"] == "glm4"
    with pytest.raises(RecipeError, match="same value as post_mlp_layernorm"):
        converted("{type: ChatGLM2Config, post_self_attn_layernorm: true}")


def test_glm_32k_has_a_class_of_its_own():
    """Release 1.1 configures GLM 3 32k by a class that adds the base of the rotary embedding."""
    text = "{type: ChatGLM32kConfig, rope_ratio: 50}"
    model = converted(text, arch="ChatGLM32kForConditionalGeneration")

    assert model.config["rope_parameters"]["rope_theta"] == 500_000.0


def test_heads_without_groups():
    """Without multi-query attention, each head has keys and values of its own."""
    config = converted("{type: ChatGLM2Config, multi_query_attention: false}").config

    assert config["num_key_value_heads"] == 32


@pytest.mark.parametrize(
    "setting",
    [
        "rmsnorm: false",
        "post_layer_norm: false",
        "add_bias_linear: true",
        "apply_residual_connection_post_layernorm: true",
    ],
)
def test_a_network_that_transformers_lacks_is_refused(setting):
    """A value that transformers' GLM does not have is an error."""
    with pytest.raises(RecipeError, match="the only value that transformers' GLM has"):
        converted(f"{{type: ChatGLM2Config, {setting}}}")


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("hidden_dropout: 0.1", "dropout"),
        ("quantization_bit: 8", "quantization"),
        ("mask_generate: inmap", "attention"),
        ("apply_query_key_layer_scaling: false", "attention"),
    ],
)
def test_losses(setting, name):
    """Each setting that transformers' GLM does not have is a loss."""
    model = converted(f"{{type: ChatGLM2Config, {setting}}}")

    assert [loss.name for loss in model.losses] == [name]


def test_flash_attention_always_scales_the_scores():
    """MindFormers' key for the scaling concerns its other kernel only."""
    scaling = "apply_query_key_layer_scaling: false, use_flash_attention: true"

    assert converted(f"{{type: ChatGLM2Config, {scaling}}}").losses == []


def test_dropout_of_the_attention_is_kept():
    """Transformers' GLM has a dropout of the attention."""
    config = converted("{type: ChatGLM2Config, attention_dropout: 0.1}").config

    assert config["attention_dropout"] == 0.1
