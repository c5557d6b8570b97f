"""The step and the optimizer of a MindFormers file keep their numbers."""

import pytest

from mfwrap.runner import RecipeError
from support.mindformers_files import ABSENT, imported, imported_recipe

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


def test_muon():
    """MindFormers' Muon has QK-clip, five iterations, and no weight decay unless it is set."""
    muon = {"optimizer": {"type": "Muon", "ns_steps": 7, "momentum": 0.9}}
    result, recipe = imported(muon, ("optimizer",))

    assert [loss.name for loss in result.losses] == ["optimizer"]
    assert recipe["optimizer"] == {
        "type": "Muon", "momentum": 0.9, "weight_decay": 0.0, "qk_clip_threshold": 100
    }  # fmt: skip
    assert "optimizer.ns_steps" in result.text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimizer": ABSENT}, "optimizer: required"),
        ({"optimizer.type": "CAME"}, r"m.yaml:\d+: optimizer.type: mfwrap has no CAME: Adafactor"),
        ({"optimizer.type": "PmaAdamW"}, r"no PmaAdamW: write AdamW and a section ema"),
        ({"optimizer.type": "Lion"}, r"m.yaml:\d+: optimizer.type: expected one of"),
        ({"runner_wrapper.max_grad_nor": 1}, r"m.yaml:\d+: runner_wrapper.max_grad_nor: unknown"),
    ],
)
def test_what_is_refused(changes, says):
    """What mfwrap does not have is an error with the line of the file."""
    with pytest.raises(RecipeError, match=says):
        imported(changes)
