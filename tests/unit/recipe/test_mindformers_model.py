"""The model of a MindFormers file keeps its sizes, also sizes that follow from other keys."""

import pytest
import yaml
from transformers import AutoConfig

from mfwrap.recipe import parse_recipe
from mfwrap.recipe.mindformers import import_mindformers
from mfwrap.recipe.mindformers_model import model_config_of
from mfwrap.recipes.models.settings import config_keys

SMALL = "hidden_size: 32, num_layers: 1, num_heads: 2, vocab_size: 160000"


def imported(settings):
    """Return the configuration as transformers builds it, and the notes."""
    text = f"model: {{model_config: {{{settings}}}}}\n"
    result = import_mindformers(text, "m.yaml")
    parse_recipe(result.text, "m.yaml", ["training.use_cpu=true"])
    config = yaml.safe_load(result.text)["model"]["config"]
    return AutoConfig.for_model(**config), result.notes


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        # Llama 2 7B, Llama 2 70B, Llama 3 8B, and Code Llama 34B with the default multiple of 256.
        ({"hidden_size": 4096, "multiple_of": 256}, 11008),
        ({"hidden_size": 8192, "multiple_of": 256, "ffn_dim_multiplier": 1.3}, 28672),
        ({"hidden_size": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),
        ({"hidden_size": 8192}, 22016),
        ({"hidden_size": 8192, "multiple_of": None, "ffn_dim_multiplier": None}, 22016),
        ({}, 11008),
        # The multiplier is applied before the factor of 2/3, which gives 257. This is rounded up to
        # 288, the next multiple of 32. In the other order the width would be 256.
        ({"hidden_size": 64, "multiple_of": 32, "ffn_dim_multiplier": 1.5}, 288),
        ({"hidden_size": 64, "multiple_of": 8, "intermediate_size": 100}, 100),
    ],
)
def test_the_width_of_a_llama(settings, width):
    """The width of the feed-forward layers is that of the published models."""
    config, left_out = model_config_of(
        {"type": "LlamaConfig", **settings}, "llama", config_keys("llama")
    )

    assert config["intermediate_size"] == width
    assert left_out == []


@pytest.mark.parametrize("value", ["often", 0, True])
def test_a_width_from_a_wrong_value_is_left_out(value):
    """A key with a wrong value is left out, and no width is computed from it."""
    settings = {"type": "LlamaConfig", "hidden_size": 64, "multiple_of": value}
    config, left_out = model_config_of(settings, "llama", config_keys("llama"))

    assert "intermediate_size" not in config
    assert left_out == ["multiple_of"]


def test_a_model_without_gates_has_no_such_width():
    """Keys that a model's configuration does not have are left out."""
    settings = {"type": "GPT2Config", "multiple_of": 64, "theta": 1.0}
    config, left_out = model_config_of(settings, "gpt2", config_keys("gpt2"))

    assert config == {"model_type": "gpt2"}
    assert left_out == ["multiple_of", "theta"]


def test_only_a_llama_has_a_width_that_nobody_gave():
    """Without `multiple_of`, only Llama gets a computed width; other models keep their default."""
    settings = {"type": "Qwen2Config", "hidden_size": 64}

    assert "intermediate_size" not in model_config_of(settings, "qwen2", config_keys("qwen2"))[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4"])
@pytest.mark.parametrize("key", ["theta", "rope_theta"])
def test_the_base_of_rotary_embeddings_arrives(kind, key):
    """The base of rotary embeddings is converted from `theta` and from `rope_theta`."""
    config, notes = imported(f"model_type: {kind}, {SMALL}, {key}: 1000000.0")

    assert config.rope_parameters["rope_theta"] == 1e6
    assert notes == []


def test_a_base_of_a_wrong_type_is_left_out():
    """A base that is not a number is left out with a note, and the default stays."""
    config, notes = imported(f"type: LlamaConfig, {SMALL}, theta: large")

    assert config.rope_parameters["rope_theta"] == 1e4
    assert notes == ["model.theta: left out"]


def test_a_checkpoint_has_its_own_sizes():
    """With ``pretrained_model_dir`` the sizes of the file are left out with a note."""
    text = f"pretrained_model_dir: folder\nmodel: {{model_config: {{{SMALL}}}, foo: 1}}\n"
    result = import_mindformers(text, "m.yaml")

    assert yaml.safe_load(result.text)["model"] == {"path": "folder"}
    assert result.notes == [
        "model.foo: left out",
        "model.model_config: left out, the checkpoint has its own",
    ]
