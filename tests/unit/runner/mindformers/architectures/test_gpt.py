"""GPT-2, WizardCoder, Bloom and T5 keep their functions and their dropout."""

import pytest

from mfwrap.runner import RecipeError
from support.model_config import converted


def test_the_keys_of_gpt2():
    """The tanh approximation of GELU, three rates of dropout and the positions arrive."""
    model = converted(
        "{type: GPT2Config, hidden_size: 64, num_layers: 2, num_heads: 4, expand_ratio: 3,"
        " seq_length: 256, hidden_dropout_rate: 0.2, attention_dropout_rate: 0.3,"
        " embedding_dropout_prob: 0.0, hidden_act: gelu, eos_token_id: 50256}"
    )

    assert model.config == {
        "model_type": "gpt2",
        "vocab_size": 50_257,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 192,
        "n_positions": 256,
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0.2,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.3,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.01,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    }
    assert model.losses == []


def test_fast_gelu_is_a_sigmoid_approximation():
    """MindSpore's `fast_gelu` is transformers' `quick_gelu`."""
    text = "{type: GPT2Config, hidden_act: fast_gelu}"

    assert converted(text).config["activation_function"] == "quick_gelu"
    with pytest.raises(RecipeError, match="expected one of"):
        converted("{type: GPT2Config, hidden_act: prelu}")


@pytest.mark.parametrize("name", ["GPT2Config", "BloomConfig", "T5Config", "ViTConfig"])
def test_residuals_behind_norms_are_refused(name):
    """These networks normalize the input of each layer."""
    with pytest.raises(RecipeError, match="expected false"):
        converted(f"{{type: {name}, post_layernorm_residual: true}}")


def test_wizard_coder_shares_keys_and_values():
    """WizardCoder has one head of keys and values."""
    model = converted(
        "{type: WizardCoderConfig, n_position: 4096, dropout_prob: 0.0, vocab_size: 49153,"
        " eos_token_id: 0}"
    )

    assert model.config["model_type"] == "gpt_bigcode"
    assert model.config["multi_query"]
    assert (model.config["n_positions"], model.config["embd_pdrop"]) == (4096, 0.0)
    assert (model.config["bos_token_id"], model.config["eos_token_id"]) == (None, 0)


def test_wizard_coder_has_8192_positions_by_default():
    """The table of positions does not follow the length of the sequences."""
    model = converted("{type: WizardCoderConfig, seq_length: 2048}")

    assert model.config["n_positions"] == 8192


@pytest.mark.parametrize("name", ["BloomConfig", "WizardCoderConfig"])
def test_matrices_start_with_the_deviation_of_mindspore(name):
    """These networks ignore `initializer_range` and draw from MindSpore's `normal`."""
    model = converted(f"{{type: {name}, initializer_range: 0.02}}")

    assert model.config["initializer_range"] == 0.01
    assert model.without_effect == ["model.model_config.initializer_range"]


def test_bloom():
    """Bloom's dropout arrives; another width is refused; another activation is a loss."""
    model = converted("{type: BloomConfig, hidden_dropout_rate: 0.0, hidden_act: gelu}")

    assert (model.config["hidden_dropout"], model.config["attention_dropout"]) == (0.0, 0.1)
    assert model.losses == []
    with pytest.raises(RecipeError, match="the only value"):
        converted("{type: BloomConfig, expand_ratio: 2}")
    (loss,) = converted("{type: BloomConfig, hidden_act: fast_gelu}").losses
    assert (loss.name, loss.path[-1]) == ("architecture", "hidden_act")


def test_t5():
    """T5 has one rate of dropout in transformers; another one is a loss."""
    model = converted("{type: T5Config, d_ff: 512, hidden_dropout_rate: 0.2}")

    assert model.config["d_ff"] == 512
    assert [loss.path[-1] for loss in model.losses] == ["attention_dropout_rate"]
    with pytest.raises(RecipeError, match="trains with 6, got 12"):
        converted("{type: T5Config, num_hidden_layers: 12}")
    scaled = converted("{type: T5Config, scale_output: false}")
    assert [loss.name for loss in scaled.losses] == ["architecture"]
