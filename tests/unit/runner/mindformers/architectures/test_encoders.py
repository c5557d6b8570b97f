"""BERT, ViT and Swin keep what MindFormers computes, or lose it by name."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoConfig, AutoModelForImageClassification

from mfwrap.runner import RecipeError
from support.model_config import converted
from support.versions import needs


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
    """Transformers' ViT classifies the class token; BEiT pools, but with the eps of all norms."""
    assert [loss.path[-1] for loss in converted("{type: ViTConfig}").losses] == [
        "drop_path_rate",
        "use_mean_pooling",
    ]
    model = converted(
        "{type: ViTConfig, drop_path_rate: 0.0, use_mean_pooling: false, num_labels: 10,"
        " init_values: 0.1}",
        "image_classification",
    )
    assert [loss.path[-1] for loss in model.losses] == ["use_mean_pooling", "init_values"]
    assert model.config["num_labels"] == 10


VIT = (
    "{type: ViTConfig, layer_norm_eps: 1.0e-6, image_size: 8, patch_size: 4, hidden_size: 16,"
    " num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 24, num_labels: 5,"
    " drop_path_rate: 0.2, hidden_act: gelu, init_values: 0.3}"
)


def vit_of_mindformers(weights, images, key_bias):
    """Return the logits of MindFormers' ViT with mean pooling, outside of a training."""

    def norm(x, name):
        return layer_norm(x, (16,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    def dense(x, name):
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3)
    kernel = weights["beit.embeddings.patch_embeddings.projection.weight"].flatten(1)
    bias = weights["beit.embeddings.patch_embeddings.projection.bias"]
    x = linear(patches.flatten(1, 2), kernel, bias)
    start = weights["beit.embeddings.cls_token"].expand(len(x), 1, 16)
    x = torch.cat([start, x], dim=1) + weights["beit.embeddings.position_embeddings"]
    stack = next(name for name in weights if name.endswith("lambda_1")).split(".0.lambda_1")[0]
    for layer in (f"{stack}.{number}" for number in range(3)):
        normed = norm(x, f"{layer}.layernorm_before")
        names = [f"{layer}.attention.{part}_proj" for part in "qkv"]
        query, key, value = (
            (dense(normed, name) + (key_bias if "k_proj" in name else 0))
            .unflatten(-1, (2, 8))
            .transpose(1, 2)
            for name in names
        )
        scores = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
        attended = dense((scores @ value).transpose(1, 2).flatten(2), f"{layer}.attention.o_proj")
        x = x + weights[f"{layer}.lambda_1"] * attended
        hidden = dense(norm(x, f"{layer}.layernorm_after"), f"{layer}.mlp.fc1")
        hidden = dense(gelu(hidden, approximate="tanh"), f"{layer}.mlp.fc2")
        x = x + weights[f"{layer}.lambda_2"] * hidden
    pooled = norm(x[:, 1:].mean(1), "beit.pooler.layernorm")
    return dense(pooled, "classifier")


@needs("transformers", "5.23", "the names of BEiT's parameters")
def test_vit_with_mean_pooling():
    """The network is that of MindFormers, whose bias of keys has no effect, with drop paths."""
    model = converted(VIT, "image_classification")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model.config)
    network = AutoModelForImageClassification.from_config(config).double().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    expected = vit_of_mindformers(network.state_dict(), images, torch.randn(16).double())

    assert model.losses == []
    torch.testing.assert_close(network(pixel_values=images).logits, expected)
    drops = [module.drop_prob for module in network.modules() if hasattr(module, "drop_prob")]
    assert drops == pytest.approx([0.1, 0.2])  # from 0 in the first layer


def test_vit_without_mean_pooling_loses_its_missing_norm():
    """MindFormers classifies the class token of the last layer as it is; transformers does not."""
    text = VIT.replace(", init_values: 0.3", "")
    model = converted(text.replace("}", ", use_mean_pooling: false}"), "image_classification")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**model.config)
    network = AutoModelForImageClassification.from_config(config).eval()
    hidden = []
    network.vit.layernorm.register_forward_hook(lambda _, inputs, __: hidden.append(inputs[0]))
    logits = network(pixel_values=torch.randn(4, 3, 8, 8)).logits

    (last,) = hidden
    normalized = layer_norm(last[:, 0], (16,), eps=1e-6)
    of_mindformers = network.classifier(last[:, 0])
    torch.testing.assert_close(logits, network.classifier(normalized))
    assert (logits - of_mindformers).abs().max() > 0.1 * logits.abs().max()
    assert [(loss.name, loss.path[-1]) for loss in model.losses] == [
        ("dropout", "drop_path_rate"),
        ("architecture", "use_mean_pooling"),
    ]
    assert "without a norm" in model.losses[1].says


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
