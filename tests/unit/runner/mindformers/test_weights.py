"""The recipe starts from the weights that MindFormers starts from, or the file is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from mfwrap.recipes.data.places import check_place
from mfwrap.runner import RecipeError
from mfwrap.runner.mindformers.weights import HUB_NAMES, published_name
from support.mindformers_files import imported, lost


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"load_checkpoint": "llama2_7b"}, "meta-llama/Llama-2-7b-hf"),
        ({"load_checkpoint": "Qwen/Qwen2.5-7B"}, "Qwen/Qwen2.5-7B"),
        (
            {"run_mode": "finetune", "model.model_config.checkpoint_name_or_path": "llama_7b"},
            "huggyllama/llama-7b",
        ),
        (
            {"auto_trans_ckpt": True, "model.model_config.checkpoint_name_or_path": "gpt2"},
            "openai-community/gpt2",
        ),
        ({"pretrained_model_dir": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_published_checkpoint(changes, path):
    """A name of MindFormers becomes the published checkpoint; a name on the hub is kept."""
    _, recipe = imported(changes)

    assert recipe["model"] == {"path": path, "dtype": "float32"}


def test_a_folder_of_transformers(tmp_path):
    """A folder with ``config.json`` and safetensors is the recipe's checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")

    assert imported({"load_checkpoint": str(tmp_path)})[1]["model"]["path"] == str(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"load_checkpoint": "./llama.ckpt"}, r"m.yaml:\d+: load_checkpoint: './llama.ckpt' is"),
        ({"load_checkpoint": "glm2_6b"}, "load_checkpoint: 'glm2_6b' is neither a folder"),
        ({"pretrained_model_dir": "./model"}, "pretrained_model_dir: './model' is neither"),
        ({"load_checkpoint": "path/to.ckpt"}, "load_checkpoint: 'path/to.ckpt' is neither"),
        ({"run_mode": "finetune"}, r"m.yaml:1: run_mode: the file finetunes weights that it"),
        (
            {"run_mode": "finetune", "trainer.model_name": "qwen2_5_7b_lora"},
            "set model.path in it to Qwen/Qwen2.5-7B, for example",
        ),
    ],
)
def test_other_weights_are_a_loss(changes, says):
    """Weights that cannot be loaded are an error, or random with ``--accept weights``."""
    with pytest.raises(RecipeError, match=says):
        imported(changes)

    result, recipe = imported(changes, ("weights",))
    assert [loss.name for loss in result.losses] == ["weights"]
    assert "path" not in recipe["model"]


def test_a_missing_folder_that_describes_the_network():
    """Without the folder and without a description of the network there is no recipe.

    The error names the file's own key, not a key of the recipe.
    """
    changes = {
        "pretrained_model_dir": "path/to/model",
        "model": {"model_config": {"compute_dtype": "bfloat16"}},
    }

    with pytest.raises(RecipeError, match=r"m.yaml:\d+: pretrained_model_dir: expected a"):
        imported(changes)


def test_a_pretraining_ignores_the_name_in_the_model():
    """As in MindFormers, ``run_mode: train`` reads ``load_checkpoint`` alone; a note says so."""
    result, recipe = imported({"model.model_config.checkpoint_name_or_path": "llama2_7b"})

    assert "path" not in recipe["model"]
    assert "MindFormers takes weights from load_checkpoint alone" in " ".join(result.notes)


def test_a_resumed_run_is_a_loss():
    """The recipe cannot continue a run of MindSpore."""
    changes = {"resume_training": True, "load_checkpoint": "llama2_7b"}

    assert lost(changes, "resume") == ["resume"]


def test_published_names_have_the_form_of_the_hub():
    """Each name in the table is a name on the hub; spellings of one name are one."""
    for name in HUB_NAMES.values():
        check_place("path", name, (), "a model folder")

    assert published_name("mindspore/mixtral-8x7b") == "mistralai/Mixtral-8x7B-v0.1"


def test_a_published_vit_has_no_mean_pooling():
    """The published checkpoint is transformers' ViT, which is another network than the file's."""
    vit = {
        "trainer.type": "image_classification",
        "load_checkpoint": "vit_base_p16",
        "model": {
            "arch": {"type": "ViTForImageClassification"},
            "model_config": {"type": "ViTConfig", "layer_norm_eps": 1e-6},
        },
    }
    assert lost(vit, "architecture") == ["architecture"]
    assert lost(vit | {"load_checkpoint": ""}) == []
