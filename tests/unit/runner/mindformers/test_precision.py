"""Dtypes of a MindFormers file become the dtype of the weights and the mixed precision."""

import pytest
import torch

from mfwrap.runner import RecipeError
from mfwrap.runner.run import build_trainer
from support.mindformers_files import ABSENT, imported, imported_recipe, lost

COMPUTE, WEIGHTS = "model.model_config.compute_dtype", "model.model_config.param_init_type"


@pytest.mark.parametrize(
    ("compute", "weights", "flags"),
    [
        ("bfloat16", "float32", {"bf16"}),
        ("float16", "float32", {"fp16"}),
        ("float32", "float32", set()),
        (ABSENT, "float32", {"fp16"}),
    ],
)
def test_mixed_precision(compute, weights, flags):
    """Computations in half precision are the Trainer's mixed precision."""
    changes = {WEIGHTS: weights} | ({COMPUTE: compute} if compute is not ABSENT else {})
    changes |= {COMPUTE: ABSENT} if compute is ABSENT else {}
    _, recipe = imported(changes)

    assert recipe["model"]["dtype"] == "float32"
    assert {"bf16", "fp16"} & recipe["training"].keys() == flags


def test_weights_in_half_precision():
    """The weights keep their dtype, and an AdamW its state in float32."""
    _, recipe = imported({WEIGHTS: "bfloat16"})

    assert recipe["model"]["dtype"] == "bfloat16"
    assert recipe["training"]["bf16"] is True


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, {"norm_dtype": "float32"}),
        ({"layernorm_compute_type": "bfloat16"}, {}),
        ({"layernorm_compute_type": "float16"}, {"norm_dtype": "float16"}),
        ({"embedding_init_type": "float32"}, {"norm_dtype": "float32",
                                              "embedding_dtype": "float32"}),
    ],
)  # fmt: skip
def test_weights_of_norms_and_embeddings(changes, parts):
    """Weights of norms are in the dtype in which norms are computed; embeddings have their own."""
    changes = {f"model.model_config.{key}": value for key, value in changes.items()}
    _, recipe = imported({WEIGHTS: "bfloat16"} | changes)

    assert {key: recipe["model"][key] for key in recipe["model"] if key.endswith("_dtype")} == parts


def test_a_step_moves_the_norms_of_a_network_in_half_precision(tmp_path):
    """Steps of 1e-4 move the float32 weights of norms; in bfloat16 they would stay at 1."""
    recipe = imported_recipe(
        {WEIGHTS: "bfloat16", "lr_schedule.learning_rate": 1e-4, "lr_schedule.warmup_ratio": 0.0},
        "data={type: python_topics, max_train_samples: 4, sequence_length: 16}",
        "training.max_steps=1",
        f"training.output_dir={tmp_path}",
    )
    trainer, _ = build_trainer(recipe)
    trainer.train()
    norms = [one for name, one in trainer.model.named_parameters() if "norm" in name]

    assert {norm.dtype for norm in norms} == {torch.float32}
    assert all(bool((norm != 1).any()) for norm in norms)


def test_embeddings_in_half_precision():
    """AdamW keeps its state in float32 for half-precision embeddings, too."""
    half = imported_recipe({"model.model_config.embedding_init_type": "bfloat16"})

    assert half.model.embedding_dtype == "bfloat16"
    assert half.optimizer is not None
    assert imported_recipe().optimizer is None


def test_computations_above_the_weights_are_a_loss():
    """Torch does not compute in float32 with weights in half precision."""
    changes = {WEIGHTS: "float16", COMPUTE: "float32", "optimizer.type": "FusedAdamWeightDecay"}

    assert lost(changes, "precision") == ["precision"]


def test_dtypes_of_parts():
    """A part in float32 is as in torch; a part in half precision has a note."""
    result, _ = imported({
        "model.model_config.softmax_compute_type": "float16",
        "model.model_config.rotary_dtype": "float32",
    })  # fmt: skip
    *notes, without_effect = result.notes

    assert any("softmax_compute_type: torch computes these parts" in note for note in notes)
    assert "rotary_dtype" in without_effect


def test_an_unknown_dtype():
    """A dtype that MindFormers does not have is an error."""
    with pytest.raises(RecipeError, match=r"compute_dtype: expected one of .*, got 'fp8'"):
        imported({COMPUTE: "fp8"})
