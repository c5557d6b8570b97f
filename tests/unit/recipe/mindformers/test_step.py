"""The step, optimizer and schedule of a MindFormers file keep their numbers."""

import pytest

from mfwrap.recipe import RecipeError
from support.mindformers_files import ABSENT, imported, imported_recipe, lost

DYNAMIC = {
    "type": "DynamicLossScaleUpdateCell",
    "loss_scale_value": 65536,
    "scale_factor": 2,
    "scale_window": 1000,
}


@pytest.mark.parametrize(
    ("changes", "wrapper"),
    [
        ({}, {"scale_sense": 1.0, "use_clip_grad": True}),
        ({"runner_wrapper": ABSENT}, {"scale_sense": DYNAMIC, "use_clip_grad": True}),
        (
            {"runner_wrapper": {"type": "MFTrainOneStepCell"}},
            {"scale_sense": 1.0, "use_clip_grad": False},
        ),
        (
            {
                "runner_wrapper": {"type": "mf_wrapper", "scale_sense": DYNAMIC},
                "runner_config.gradient_accumulation_steps": 2,
            },
            {"scale_sense": DYNAMIC, "use_clip_grad": True},
        ),
        (
            {"runner_wrapper": {"scale_sense": DYNAMIC | {"scale_factor": 1}}},
            {
                "scale_sense": {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 65536},
                "use_clip_grad": False,
            },
        ),
        (
            {"runner_wrapper": {"type": "TrainOneStepWithLossScaleCell", "scale_sense": DYNAMIC}},
            {"scale_sense": DYNAMIC, "use_clip_grad": False},
        ),
        (
            {"runner_wrapper": {"type": "MFPipelineWithLossScaleCell", "micro_batch_num": 8}},
            {"scale_sense": 1.0, "use_clip_grad": True},
        ),
    ],
)
def test_the_wrapper(changes, wrapper):
    """Loss scale and clipping are those of MindFormers, also where the file does not set them."""
    _, recipe = imported(changes)
    others = {"type": "MFTrainOneStepCell", "calculate_per_token_loss": False}

    assert recipe["runner_wrapper"] == others | wrapper


def test_skipping():
    """Top-level switches reach the step, with the monitor's threshold."""
    step = imported_recipe({
        "use_skip_data_by_global_norm": True,
        "monitor_config": {"monitor_on": True, "global_norm_spike_threshold": 3.0},
    }).step.config  # fmt: skip

    assert (step.use_skip_data_by_global_norm, step.global_norm_spike_threshold) == (True, 3.0)


def test_gradients_that_are_not_unscaled():
    """MindSpore's plain cell multiplies the gradients; the optimizer's eps makes up for it."""
    _, recipe = imported({"runner_wrapper": {"type": "TrainOneStepCell", "sens": 1024}})

    assert recipe["runner_wrapper"]["scale_sense"] == 1024
    assert recipe["optimizer"]["eps"] == 1e-8 / 1024


def test_the_optimizer():
    """The schedule's learning rate counts, and the values reach the Trainer."""
    recipe = imported_recipe({"optimizer.learning_rate": 5.0, "optimizer.type": "FusedAdamW"})
    arguments = recipe.arguments

    assert (arguments.learning_rate, arguments.adam_beta2) == (1e-3, 0.95)
    assert (arguments.adam_epsilon, arguments.weight_decay) == (1e-8, 0.1)
    assert recipe.schedule.settings == {"lr_end": 1e-5, "warmup_ratio": 0.1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fp32_adamw", "FP32StateAdamWeightDecay"),
        ("fused_adamw", "FusedAdamWeightDecay"),
    ],
)
def test_registered_names(name, kind):
    """Second names of optimizers become the names of their classes, with their default eps."""
    _, recipe = imported({"optimizer": {"type": name, "beta1": 0.9, "beta2": 0.95}})

    assert recipe["optimizer"] == {"type": kind, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6}


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr_schedule": ABSENT}, "lr_schedule: required"),
        ({"lr_schedule.type": "MegatronLR"}, r"m.yaml:\d+: lr_schedule.type: expected one of"),
        ({"lr_schedule.warmup_epochs": 5, "lr_schedule.warmup_ratio": ABSENT}, "warmup_epochs: ex"),
        ({"optimizer.type": "CAME"}, r"m.yaml:\d+: optimizer.type: expected one of"),
        ({"runner_wrapper.max_grad_nor": 1}, r"m.yaml:\d+: runner_wrapper.max_grad_nor: unknown"),
    ],
)
def test_what_is_refused(changes, says):
    """What mfwrap does not have is an error with the line of the file."""
    with pytest.raises(RecipeError, match=says):
        imported(changes)


def test_learning_rates_by_group_are_a_loss():
    """The names of parameters in groups are MindFormers'; the default schedule is kept."""
    default = {"type": "ConstantWarmUpLR", "learning_rate": 1e-4, "warmup_steps": 1}
    grouped = {"default": default, "grouped": [default | {"params": ["embedding.*"]}]}
    changes = {"lr_schedule": ABSENT, "grouped_lr_schedule": grouped}
    result, recipe = imported(changes, ("lr_groups",))

    assert [loss.name for loss in result.losses] == ["lr_groups"]
    assert recipe["lr_schedule"] == default


def test_learning_rates_by_layer_are_a_loss():
    """Learning rates by layer, which MindFormers has for ViT and Swin, are a loss."""
    vit = {
        "trainer.type": "image_classification",
        "model": {
            "arch": {"type": "ViTForImageClassification"},
            "model_config": {
                "type": "ViTConfig",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "patch_size": 2,
                "image_size": 8,
            },
        },
    }
    scales = {"layer_scale": True, "layer_decay": 0.65}

    assert "layer_decay" in lost(vit | scales, "layer_decay", "dropout", "architecture")
    assert lost(scales) == []
