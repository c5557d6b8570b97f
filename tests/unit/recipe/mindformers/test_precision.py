"""Dtypes of a MindFormers file become the dtype of the weights and the mixed precision."""

import pytest

from mfwrap.recipe import RecipeError
from support.mindformers_files import ABSENT, imported, lost

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


def test_computations_above_the_weights_are_a_loss():
    """Torch does not compute in float32 with weights in half precision."""
    changes = {WEIGHTS: "float16", COMPUTE: "float32", "optimizer.type": "FusedAdamWeightDecay"}

    assert lost(changes, "precision") == ["precision"]


def test_dtypes_of_parts():
    """A part in float32 is as in torch; a part in half precision has a note."""
    result, _ = imported({
        "model.model_config.softmax_compute_type": "float16",
        "model.model_config.layernorm_compute_type": "float32",
    })  # fmt: skip
    *notes, without_effect = result.notes

    assert any("softmax_compute_type: torch computes these parts" in note for note in notes)
    assert "layernorm_compute_type" in without_effect


def test_an_unknown_dtype():
    """A dtype that MindFormers does not have is an error."""
    with pytest.raises(RecipeError, match=r"compute_dtype: expected one of .*, got 'fp8'"):
        imported({COMPUTE: "fp8"})
