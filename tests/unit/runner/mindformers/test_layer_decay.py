"""Learning rates by layer, which MindFormers up to 1.5 has for ViT and Swin, keep their numbers."""

import functools
import re

import pytest
from transformers import AutoModelForImageClassification, Trainer

from support.layer_rules import swin_layer, vit_layer
from support.mindformers_files import ABSENT, imported, imported_recipe, lost

SCALES = {"layer_scale": True, "layer_decay": 0.65, "lr_schedule.warmup_lr_init": 1e-5}
DEPTHS = [1, 2]


def file_of(kind, **settings):
    """Return changes that give the file a small network for images."""
    return {
        "trainer.type": "image_classification",
        "train_dataset.data_loader.type": "ImageFolderDataset",
        "model": {
            "arch": {"type": f"{kind}ForImageClassification"},
            "model_config": {"type": f"{kind}Config", "image_size": 8, "patch_size": 2} | settings,
        },
    }


VIT = file_of(
    "ViT",
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    layer_norm_eps=1e-6,
)
SWIN = file_of("Swin", embed_dim=8, depths=DEPTHS, num_heads=[1, 2], window_size=2)


def mindformers_groups(names, layer, last, is_decayed):
    """Return the rate's factor and the weight decay of each parameter.

    This is the loop of ``get_optimizer_grouped_parameters`` in MindFormers 1.5, whose variable
    ``weight_decay`` stays 0 once it has been set.
    """
    weight_decay, of_group, found = 0.1, {}, {}
    for name in names:
        group = (layer(name), is_decayed(name))
        if not group[1]:
            weight_decay = 0.0
        of_group.setdefault(group, weight_decay)
        found[name] = (0.65 ** (last - group[0]), of_group[group])
    return found


@pytest.mark.parametrize(
    ("changes", "layer", "last", "is_decayed"),
    [
        (
            VIT,
            functools.partial(vit_layer, num_layers=2),
            3,
            lambda name: not re.search(r"bias$|norm", name),
        ),
        (
            SWIN,
            functools.partial(swin_layer, depths=DEPTHS),
            4,
            lambda name: "relative_position_bias_table" not in name,
        ),
    ],
    ids=["ViT", "Swin"],
)
def test_rates_and_weight_decay_of_each_parameter(changes, layer, last, is_decayed):
    """Each parameter has MindFormers' factor of the whole schedule, and its weight decay."""
    recipe = imported_recipe(changes | SCALES)
    network = recipe.model.make_model(AutoModelForImageClassification)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decayed = Trainer.get_decay_parameter_names(None, network)
    optimizer = recipe.optimizer.build(recipe.arguments, network, decayed)
    schedule = recipe.schedule.make(optimizer, 40)
    expected = mindformers_groups(names.values(), layer, last, is_decayed)
    seen = set()
    for rate in (1e-5, 1e-5 + (1e-3 - 1e-5) / 4):  # a warm-up of 4 updates
        for group, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            for parameter in group["params"]:
                factor, weight_decay = expected[names[id(parameter)]]
                assert lr == pytest.approx(factor * rate, rel=1e-12)
                assert group["weight_decay"] == weight_decay
                seen.add(names[id(parameter)])
        optimizer.step()
        schedule.step()

    assert seen == set(expected)
    assert {decay for _, decay in expected.values()} == {0.0, 0.1}


def test_what_the_recipe_says():
    """The section is in the recipe, and the notes name the other rules."""
    result, recipe = imported(SWIN | SCALES)
    assert recipe["layer_decay"] == {"factor": 0.65, "weight_decay": "first_layers"}
    notes = " ".join(result.notes)
    assert "1.6" in notes
    assert "set all_layers" in notes
    assert result.losses == []


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_scale": False},
        {"lr_schedule": ABSENT, "optimizer.learning_rate": 1e-3},
    ],
)
def test_files_with_one_learning_rate(changes):
    """Without ``layer_scale`` or a schedule, ``layer_decay`` has no effect."""
    scales = {"layer_scale": True, "layer_decay": 0.65}
    _, recipe = imported(VIT | scales | changes)
    assert "layer_decay" not in recipe


def test_other_networks_have_one_learning_rate():
    """MindFormers numbers only the layers of ViT and Swin."""
    _, recipe = imported(SCALES)
    assert "layer_decay" not in recipe


def test_absolute_position_embeddings_of_swin_are_a_loss():
    """MindFormers takes them for a part of the head."""
    absolute = {"model.model_config.use_absolute_embeddings": True}
    assert lost(SWIN | SCALES | absolute, "layer_decay") == ["layer_decay"]


def test_biases_and_norms_of_swin_have_weight_decay():
    """All parameters of Swin but the bias tables have weight decay, also with one rate."""
    recipe = imported_recipe(SWIN)
    network = recipe.model.make_model(AutoModelForImageClassification)
    decayed = Trainer.get_decay_parameter_names(None, network)
    optimizer = recipe.optimizer.build(recipe.arguments, network, decayed)
    without = {
        id(parameter)
        for group in optimizer.param_groups
        if not group["weight_decay"]
        for parameter in group["params"]
    }
    assert without == {
        id(parameter)
        for name, parameter in network.named_parameters()
        if name.endswith("relative_position_bias_table")
    }
