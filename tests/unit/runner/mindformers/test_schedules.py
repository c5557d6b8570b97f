"""The learning rates of a MindFormers file keep their numbers."""

import pytest

from mfwrap.runner import RecipeError, parse_recipe
from support.mindformers_files import ABSENT, imported, imported_recipe

CONSTANT = {"type": "ConstantWarmUpLR", "learning_rate": 1e-4, "warmup_steps": 1}

QWEN = {
    "model": {
        "model_config": {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "compute_dtype": "bfloat16",
            "params_dtype": "float32",
        }
    }
}
"""A model whose parameters have the names of MindFormers' current models."""


@pytest.mark.parametrize("epochs", [1, 2, 5, 20])
def test_warm_up_epochs(epochs):
    """A warm-up of whole epochs has the same number of steps, whatever the length of an epoch."""
    _, recipe = imported({
        "runner_config.epochs": 100,
        "lr_schedule": {
            "type": "cosine", "learning_rate": 1e-3, "warmup_epochs": epochs, "total_steps": -1
        },
    })  # fmt: skip
    ratio = recipe["lr_schedule"]["warmup_ratio"]

    assert all(int(100 * steps * ratio) == epochs * steps for steps in (1, 3, 7, 1251, 99991))


def test_a_key_of_another_schedule_has_no_effect():
    """MindFormers' schedules take any key, and read only their own; a misspelt one is an error."""
    found, recipe = imported({"lr_schedule": {**CONSTANT, "lr_end": 1e-7, "num_cycles": 1}})

    assert recipe["lr_schedule"] == CONSTANT
    assert "lr_schedule.lr_end, lr_schedule.num_cycles" in found.notes[-1]
    with pytest.raises(RecipeError, match=r"lr_schedule\.warmup_step: unknown key; did you mean"):
        imported({"lr_schedule": {**CONSTANT, "warmup_step": 1}})


def test_a_scaled_learning_rate():
    """``lr_scale`` multiplies the learning rate by the share of the batch in the factor."""
    changes = {
        "lr_scale": True,
        "lr_scale_factor": 256,
        "parallel": {"parallel_mode": 0, "gradients_mean": True},
        "parallel_config": {"data_parallel": 8},
        "runner_config.batch_size": 64,
    }

    assert imported(changes)[1]["lr_schedule"]["learning_rate"] == 2e-3
    with pytest.raises(RecipeError, match="lr_scale: expected false; set lr_schedule"):
        imported({"lr_scale": True})


def test_a_rate_without_a_schedule():
    """Without a schedule, MindFormers keeps the optimizer's learning rate."""
    _, recipe = imported({"lr_schedule": ABSENT, "optimizer.learning_rate": 2e-5})

    assert recipe["lr_schedule"] == CONSTANT | {"learning_rate": 2e-5, "warmup_steps": 0}
    assert "learning_rate" not in recipe["optimizer"]


def test_a_training_that_stops_early():
    """``stop_step`` does not shorten MindFormers' schedule, so its length must be in the file."""
    stop = {"runner_config.stop_step": 5}
    recipe = imported_recipe({**stop, "lr_schedule.total_steps": 70})

    assert (recipe.arguments.max_steps, recipe.schedule.total_steps) == (5, 70)
    assert imported({**stop, "lr_schedule": CONSTANT})[1]["training"]["max_steps"] == 5
    with pytest.raises(RecipeError, match=r"total_steps: required with runner_config"):
        imported(stop)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr_schedule": ABSENT}, "lr_schedule: required"),
        ({"lr_schedule.type": "MegatronLR"}, r"m.yaml:\d+: lr_schedule.type: expected one of"),
        ({"lr_schedule.warmup_epochs": 5, "lr_schedule.warmup_ratio": ABSENT}, "warmup_epochs: ex"),
        (
            {
                "lr_schedule": {
                    **CONSTANT, "type": "cosine", "warmup_epochs": 1, "total_steps": 9,
                }
            },
            "lr_schedule.warmup_epochs: expected warmup_steps, because total_steps says",
        ),
        ({"grouped_lr_schedule": {"grouped": [CONSTANT]}}, "default: required, but missing"),
        (
            {"grouped_lr_schedule": {"default": CONSTANT, "grouped": [CONSTANT]}},
            "grouped_lr_schedule.grouped.0: expected a schedule with params, a list of names",
        ),
        (
            {"grouped_lr_schedule": {"default": CONSTANT, "groups": []}},
            "grouped_lr_schedule.groups: unknown key",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(changes, says):
    """What mfwrap does not have is an error with the line of the file."""
    with pytest.raises(RecipeError, match=says):
        imported(changes)


def test_learning_rates_by_group():
    """MindFormers' names of parameters become those of transformers."""
    grouped = {
        "default": CONSTANT,
        "grouped": [
            {
                "type": "linear",
                "learning_rate": 2e-4,
                "warmup_steps": 0,
                "total_steps": 10,
                "params": ["embedding.*", "output_layer.weight"],
            },
            CONSTANT | {"learning_rate": 3e-4, "params": ["layers.1.self_attention.linear_qkv"]},
        ],
    }
    changes = QWEN | {
        "grouped_lr_schedule": grouped,
        "optimizer.learning_rate": 5.0,
        "runner_config.epochs": 1,
    }
    result, _ = imported(changes)
    recipe = parse_recipe(result.text, "m.yaml", ["training.use_cpu=true"])
    _, first, second = recipe.schedule.schedules

    assert first == "model.embed_tokens.weight,lm_head.weight"
    assert second.split(",") == [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    assert recipe.arguments.learning_rate == 1e-4


@pytest.mark.parametrize("params", ["embedding.*", "mtp.layers"])
def test_learning_rates_of_unknown_groups_are_a_loss(params):
    """Names that mfwrap cannot convert are a loss; the default schedule is kept."""
    changes = QWEN if params.startswith("mtp") else {}
    grouped = {"default": CONSTANT, "grouped": [CONSTANT | {"params": [params]}]}
    changes = changes | {"lr_schedule": ABSENT, "grouped_lr_schedule": grouped}
    result, recipe = imported(changes, ("lr_groups",))

    assert [loss.name for loss in result.losses] == ["lr_groups"]
    assert recipe["lr_schedule"] == CONSTANT
