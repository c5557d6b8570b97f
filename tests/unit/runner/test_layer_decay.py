"""The section ``layer_decay``: learning rates, and weight decay, by layer."""

import functools
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    OPTConfig,
    SwinConfig,
    T5Config,
    ViTConfig,
)

from mfwrap.runner import RecipeError, run_recipe
from mfwrap.runner.layer_decay import LayerDecaySection, layer_numbers
from mfwrap.schedules import SCHEDULES
from support.layer_rules import swin_layer, vit_layer
from support.recipe_texts import VIT, message, parsed, recipe_text

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
DEPTHS = [2, 3, 1]


def built(auto_class, config):
    """Return a model without memory for its weights."""
    with torch.device("meta"):
        return auto_class.from_config(config)


def vit():
    """Return a ViT of three layers."""
    config = ViTConfig(num_hidden_layers=3, image_size=8, patch_size=4, **SIZES)
    return built(AutoModelForImageClassification, config)


def swin():
    """Return a Swin of `DEPTHS` blocks."""
    sizes = {"embed_dim": 8, "num_heads": [1, 1, 2], "window_size": 2, "patch_size": 2}
    config = SwinConfig(depths=DEPTHS, image_size=16, **sizes)
    return built(AutoModelForImageClassification, config)


def bert():
    """Return a BERT of two layers, with a pooler and a classifier."""
    return built(AutoModelForSequenceClassification, BertConfig(num_hidden_layers=2, **SIZES))


def bert_layer(name):
    """Embeddings, two layers, pooler and classifier."""
    if name.startswith("bert.embeddings"):
        return 0
    return int(name.split(".")[3]) + 1 if name.startswith("bert.encoder") else 3


MODELS = {
    "vit": (vit, functools.partial(vit_layer, num_layers=3), 4),
    "swin": (swin, functools.partial(swin_layer, depths=DEPTHS), 7),
    "bert": (bert, bert_layer, 3),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_rate_of_each_parameter(kind):
    """A parameter of layer i has the rate times factor ** (number of layers + 1 - i)."""
    make, layer, last = MODELS[kind]
    network = make()
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decayed = [name for name in names.values() if not name.endswith("bias")]
    section = LayerDecaySection(factor=0.65)
    groups = section.groups(network, decayed, weight_decay=0.05, learning_rate=2e-3)
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in groups
        for parameter in group["params"]
    }

    assert found == {
        name: (
            pytest.approx(2e-3 * 0.65 ** (last - layer(name)), rel=1e-12),
            0.05 if name in decayed else 0.0,
        )
        for name in names.values()
    }
    assert {layer(name) for name in names.values()} == set(range(last + 1))
    assert groups[0]["lr"] == 2e-3  # the rate that the step reports


def weights_with_decay(network, decayed):
    """Return the names of the parameters with weight decay under ``first_layers``."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    section = LayerDecaySection(factor=0.5, weight_decay="first_layers")
    groups = section.groups(network, decayed, weight_decay=0.05, learning_rate=1.0)
    return {
        names[id(each)] for group in groups if group["weight_decay"] for each in group["params"]
    }


def test_weight_decay_of_the_first_layers():
    """As in MindFormers, groups that begin after the first undecayed parameter have none."""
    network = vit()
    decayed = [name for name, each in network.named_parameters() if each.dim() > 1]
    # The first parameter without weight decay is the bias of the patches, in layer 0.
    assert weights_with_decay(network, decayed) == {
        "vit.embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection.weight",
    }
    network = swin()
    names = [name for name, _ in network.named_parameters()]
    decayed = [name for name in names if "bias_table" not in name]
    # The first parameter without weight decay is in layer 1, whose group has begun by then.
    assert weights_with_decay(network, decayed) == {
        name for name in decayed if swin_layer(name, DEPTHS) < 2
    }


def test_wrapped_and_frozen_networks():
    """Names of wrapped networks count as well; frozen parameters are in no group."""
    network = vit().requires_grad_(requires_grad=False)
    network.classifier.requires_grad_()
    wrapped = torch.nn.Sequential()
    wrapped.add_module("_orig_mod", network)
    assert sorted(set(layer_numbers(wrapped).values())) == [0, 1, 2, 3, 4]
    section = LayerDecaySection(factor=0.5)
    groups = section.groups(wrapped, (), weight_decay=0.0, learning_rate=1.0)
    assert [group["name"] for group in groups] == ["layer_4"]


SETTINGS = {
    "CosineAnnealingLR": {"t_max": 7, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"t_0": 3, "eta_min": 0.001},
    "ConstantWithCoolDownLR": {
        "warmup_lr_init": 0.002, "warmup_steps": 2, "keep_steps": 2, "decay_steps": 3,
        "lr_end1": 0.001, "final_steps": 3, "lr_end2": 0.0002,
    },
    "WarmUpStableDecayLR": {"warmup_lr_init": 0.002, "warmup_steps": 2, "decay_start_steps": 4},
}  # fmt: skip
WARM_UP = {"warmup_lr_init": 0.002, "warmup_steps": 2}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_are_scaled_whole(kind):
    """Each layer has its factor times the schedule, also where that does not begin or end at 0."""
    rate = "base_lr" if kind.startswith("CosineAnnealing") else "learning_rate"
    section = {"type": kind, rate: 0.01, **SETTINGS.get(kind, WARM_UP)}
    recipe = parsed(lr_schedule=section, layer_decay={"factor": 0.5}, **IMAGES)
    network = recipe.model.make_model(AutoModelForImageClassification)
    optimizer = recipe.optimizer.build(recipe.arguments, network, ())
    schedule = recipe.schedule.make(optimizer, 12)
    alone = torch.optim.SGD([torch.zeros(1)], lr=0.01)
    plain = parsed(lr_schedule=section, **IMAGES).schedule.make(alone, 12)
    for _ in range(12):
        expected = [plain.get_last_lr()[0] * 0.5**power for power in range(3)]
        assert schedule.get_last_lr() == pytest.approx(expected, rel=1e-12)
        for optimizer_, schedule_ in ((optimizer, schedule), (alone, plain)):
            optimizer_.step()
            schedule_.step()


IMAGES = {
    "task": "image_classification",
    "model": VIT | {"config": VIT["config"] | {"image_size": 8, "num_labels": 10}},
    "data": {"type": "digits", "max_train_samples": 48},
}


def test_a_run(tmp_path):
    """The records of a run have each layer's rate, with the Trainer's own schedule as well."""
    training = {"output_dir": str(tmp_path), "logging_steps": 1, "lr_scheduler_type": "linear"}
    data = {"type": "digits", "max_train_samples": 48, "max_eval_samples": 8}
    model = {"config": {**VIT["config"], "num_channels": 1, "image_size": 8}}
    sections = IMAGES | {"data": data, "model": model, "training": training}
    run_recipe(parsed(layer_decay={"factor": 0.5}, **sections))
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [record["learning_rates"] for record in map(json.loads, lines) if "loss" in record]

    assert rates == [
        {
            f"layer_{layer}": pytest.approx(0.01 * 0.5 ** (2 - layer) * (1 - step / 6))
            for layer in range(3)
        }
        for step in range(6)
    ]


def test_networks_without_one_list_of_layers():
    """A network with two lists of layers, such as T5, is refused by name."""
    network = built(AutoModelForSequenceClassification, T5Config(num_layers=1, d_model=8))
    with pytest.raises(ValueError, match=r"one list of layers, got .*decoder.*encoder"):
        layer_numbers(network)
    with pytest.raises(ValueError, match="one list of layers, got none"):
        layer_numbers(torch.nn.Linear(2, 2))


def test_sublayers_are_no_layers():
    """The encoder of T5 has lists of two different sublayers; it has as many layers as blocks."""
    sizes = {"num_layers": 2, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 8}
    numbers = layer_numbers(built(AutoModelForTokenClassification, T5Config(**sizes)))

    assert numbers["transformer.encoder.block.0.layer.1.layer_norm.weight"] == 1
    assert numbers["transformer.encoder.block.1.layer.0.layer_norm.weight"] == 2
    assert numbers["transformer.encoder.final_layer_norm.weight"] == 3


def test_a_final_norm_that_is_created_first():
    """OPT creates what comes after its layers before them."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "ffn_dim": 8, "num_hidden_layers": 2}
    config = OPTConfig(word_embed_proj_dim=4, **sizes)
    numbers = layer_numbers(built(AutoModelForCausalLM, config))

    assert numbers["model.decoder.embed_positions.weight"] == 0
    assert numbers["model.decoder.project_in.weight"] == 0
    assert numbers["model.decoder.layers.1.fc1.weight"] == 2
    assert numbers["model.decoder.final_layer_norm.weight"] == 3
    assert numbers["model.decoder.project_out.weight"] == 3


def test_a_network_with_nothing_after_its_layers():
    """Its last layer would have the factor of the layer before."""
    network = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Linear(2, 2),
            "layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)]),
        }
    )
    with pytest.raises(ValueError, match="parameters after its layers, got none after layers"):
        layer_numbers(network)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"layer_decay": {"factor": 0}}, "layer_decay.factor: must be"),
        ({"layer_decay": {"factor": 0.5, "weight_decay": "none"}}, "layer_decay.weight_decay: "),
        ({"layer_decay": {"rate": 0.5}}, "layer_decay.rate: unknown key"),
        (
            {
                "layer_decay": {"factor": 0.5},
                "grouped_lr_schedule": {
                    "default": {"type": "ConstantWarmUpLR", "warmup_steps": 0},
                    "grouped": [],
                },
            },
            "layer_decay: must be left out, because the recipe has a section grouped_lr_schedule",
        ),
        (
            {
                "layer_decay": {"factor": 0.5},
                "training": {"optim": "galore_adamw", "optim_target_modules": ["output"]},
            },
            "because the recipe has a section layer_decay, got galore_adamw",
        ),
    ],
)
def test_wrong_sections(sections, says):
    """An error names the key, or the section that contradicts."""
    assert says in message(text=recipe_text(**sections))


def test_a_model_without_layers_is_refused_before_the_training():
    """The error names the section and the line."""
    with pytest.raises(RecipeError, match=r"layer_decay: needs a model with one list of layers"):
        parsed(layer_decay={"factor": 0.5}, optimizer={"type": "AdamW"})
