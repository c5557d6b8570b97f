"""BERT, ViT and Swin keep what MindFormers computes, or lose it by name."""

import pytest

from mfwrap.runner import RecipeError
from support.model_config import converted


def test_bert_computes_what_mindformers_computes():
    """MindFormers' BERT has its own GELU and eps, whatever the file says."""
    model = converted(
        "{type: BertConfig, num_labels: 1, embedding_size: 768, num_layers: 12, num_heads: 12,"
        " expand_ratio: 4, hidden_act: gelu, post_layernorm_residual: true, dropout_prob: 0.2}"
    )

    assert model.config["hidden_act"] == "gelu_pytorch_tanh"
    assert model.config["layer_norm_eps"] == 1e-5
    assert model.config["classifier_dropout"] == 0.2
    assert "num_labels" not in model.config
    assert model.losses == []


@pytest.mark.parametrize(
    "setting",
    ["num_layers: 24", "post_layernorm_residual: false", "use_relative_positions: true"],
)
def test_another_bert_is_refused(setting):
    """Sizes under names that MindFormers ignores, and other networks, are errors."""
    with pytest.raises(RecipeError):
        converted(f"{{type: BertConfig, {setting}}}")


@pytest.mark.parametrize(
    ("network", "rate"), [("BertForTokenClassification", 0.3), ("BertForMultipleChoice", 0.2)]
)
def test_the_dropout_of_the_head(network, rate):
    """A network that tags tokens has the dropout of its layers in the head, others their own."""
    text = "{type: BertConfig, hidden_dropout_prob: 0.3, dropout_prob: 0.2}"
    model = converted(text, "token_classification", arch=network)

    assert model.config["classifier_dropout"] == rate


def test_vit_loses_its_pooling_and_drop_path():
    """Transformers' ViT classifies the class token, and keeps each layer."""
    assert [loss.path[-1] for loss in converted("{type: ViTConfig}").losses] == [
        "drop_path_rate",
        "use_mean_pooling",
    ]
    model = converted(
        "{type: ViTConfig, drop_path_rate: 0.0, use_mean_pooling: false, num_labels: 10,"
        " init_values: 0.1}",
        "image_classification",
    )
    assert [loss.path[-1] for loss in model.losses] == ["init_values"]
    assert model.config["num_labels"] == 10


def test_the_number_of_classes_has_two_names():
    """Releases name it differently; two numbers are an error, because each release reads one."""
    text = "type: ViTConfig, drop_path_rate: 0.0, use_mean_pooling: false, num_classes: 10"

    model = converted(f"{{{text}}}", "image_classification")
    assert model.config["num_labels"] == 10
    with pytest.raises(RecipeError, match="expected the same value as num_labels"):
        converted(f"{{{text}, num_labels: 1000}}", "image_classification")


def test_swin_keeps_its_drop_path():
    """Transformers' Swin has a drop path; depths are checked."""
    model = converted("{type: SwinConfig, drop_path_rate: 0.2}", "image_classification")

    assert (model.config["drop_path_rate"], model.config["num_labels"]) == (0.2, 1000)
    assert model.losses == []
    for setting in ("depths: [2, 0]", "num_heads: 4", "patch_norm: false"):
        with pytest.raises(RecipeError):
            converted(f"{{type: SwinConfig, {setting}}}")
