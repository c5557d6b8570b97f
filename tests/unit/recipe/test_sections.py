"""A recipe is checked to its last value, and becomes the objects that it describes."""

import dataclasses
import math

import pytest
import torch

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
)
from mfwrap.callbacks import MFLossMonitor, TrainingStateMonitor
from mfwrap.recipe import RecipeError, RecipeWarning, parse_recipe
from mfwrap.recipe.library import shipped_recipes
from support.recipe_texts import recipe_text

SCALE = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 4096, "scale_factor": 2}


def parsed(**sections):
    """Return the recipe with these sections."""
    return parse_recipe(recipe_text(**sections), "r.yaml")


def message(*overrides: str, text: str | None = None) -> str:
    """Return the error that a recipe gets."""
    with pytest.raises(RecipeError) as error:
        parse_recipe(recipe_text() if text is None else text, "r.yaml", overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")  # TRL's default
@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name):
    """Every recipe that comes with the package fits, without a warning, and says what it does."""
    recipe = shipped_recipes()[name]
    assert parse_recipe(recipe.text, name).arguments.output_dir == f"runs/{name}"

    assert recipe.text.startswith(f"# {recipe.summary}\n")
    assert recipe.summary.endswith(".")


def test_runner_wrapper_becomes_the_step():
    """MindFormers' keys reach the settings of the step, the loss scale, and the Trainer."""
    wrapper = {
        "type": "MFTrainOneStepCell",
        "scale_sense": SCALE | {"scale_window": 50},
        "use_clip_grad": True,
        "max_grad_norm": 0.5,
        "local_norm": True,
        "use_skip_data_by_global_norm": True,
        "global_norm_spike_threshold": 3,
        "max_consecutive_skips": None,
    }
    recipe = parsed(runner_wrapper=wrapper)
    scale = recipe.step.make_scale()

    assert recipe.arguments.max_grad_norm == 0.5
    assert recipe.step.config.local_norm
    assert recipe.step.config.use_skip_data_by_global_norm
    assert recipe.step.config.global_norm_spike_threshold == 3
    assert recipe.step.config.max_consecutive_skips is None
    assert isinstance(scale, DynamicLossScaleUpdateCell)
    assert (scale.get_loss_scale(), scale.scale_window) == (4096, 50)
    assert recipe.step.make_scale() is not scale


@pytest.mark.parametrize(
    ("wrapper", "training", "limit"),
    [
        (None, {}, 1.0),
        (None, {"max_grad_norm": 0.3}, 0.3),
        ({}, {}, 0.0),
        ({}, {"max_grad_norm": 0.3}, 0.3),
        ({"use_clip_grad": True}, {}, 1.0),
        ({"use_clip_grad": True}, {"max_grad_norm": 0.3}, 0.3),
        ({"use_clip_grad": True, "max_grad_norm": 2.0}, {}, 2.0),
        ({"use_clip_grad": True, "max_grad_norm": math.inf}, {}, math.inf),
        ({"use_clip_grad": False, "max_grad_norm": 2.0}, {}, 0.0),
    ],
)
def test_clipping(wrapper, training, limit):
    """MindFormers' default is not to clip; without its section it is the Trainer's."""
    sections = {} if wrapper is None else {"runner_wrapper": wrapper}

    assert parsed(training=training, **sections).arguments.max_grad_norm == limit


@pytest.mark.parametrize(
    ("scale_sense", "kind"),
    [
        ({"type": "FixedLossScaleUpdateCell", "loss_scale_value": 8}, FixedLossScaleUpdateCell),
        (
            {
                "type": "AdaptiveLossScaleUpdateCell",
                "loss_scale_value": 8,
                "scale_factor": 2,
                "scale_window": 20,
                "max_scale_window": 100,
                "min_scale_window": 20,
            },
            AdaptiveLossScaleUpdateCell,
        ),
        (2.0, float),
        (1, float),
    ],
)
def test_loss_scales(scale_sense, kind):
    """Every kind of loss scale can be named."""
    made = parsed(runner_wrapper={"scale_sense": scale_sense}).step.make_scale()

    assert isinstance(made, kind)


def test_the_threshold_of_spikes_comes_from_the_monitor():
    """As in MindFormers, ``monitor_config`` has it, whether the monitor is on or not."""
    recipe = parsed(
        runner_wrapper={"use_clip_grad": True},
        monitor_config={"monitor_on": False, "global_norm_spike_threshold": 7.5},
    )

    assert recipe.step.config.global_norm_spike_threshold == 7.5
    assert recipe.make_callbacks == ()


def test_optimizer_section():
    """MindFormers' optimizer becomes the Trainer's arguments."""
    optimizer = {"type": "AdamW", "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    arguments = parsed(optimizer=optimizer).arguments

    assert (arguments.adam_beta1, arguments.adam_beta2) == (0.8, 0.95)
    assert (arguments.adam_epsilon, arguments.weight_decay) == (1e-7, 0.1)
    assert str(arguments.optim.value) == "adamw_torch_fused"


def test_lr_schedule_section():
    """MindFormers' schedule is made over the length of the training, with the rate it gives."""
    section = {"type": "CosineWithWarmUpLR", "learning_rate": 1.0, "lr_end": 0.1, "warmup_steps": 2}
    recipe = parsed(
        lr_schedule=section | {"total_steps": -1}, training={"learning_rate": 1.0, "max_steps": 10}
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=recipe.arguments.learning_rate)
    schedule = recipe.schedule.make(optimizer, 10)

    # The reference's recorded values.
    rates = [schedule.rate(1.0, step) for step in (0, 1, 2, 6, 9, 10)]
    assert rates == pytest.approx([0, 0.5, 1, 0.55, 0.134254, 0.1], abs=1e-6)


@pytest.mark.parametrize(
    "shown",
    [
        {"local_norm_format": ["log", "tensorboard"]},
        {"stable_rank_config": {"format": "tensorboard"}},
        {"stable_rank_config": {"format": ["log", "tensorboard"]}},
    ],
)
def test_curves_of_the_monitor_have_a_folder(shown):
    """MindFormers' section names none: they lie beside the run."""
    recipe = parsed(monitor_config={"monitor_on": True} | shown)
    (make,) = recipe.make_callbacks

    assert isinstance(make(), TrainingStateMonitor)


def test_a_folder_of_curves_is_taken_as_it_is_written(tmp_path):
    """A section that names one has its curves there, not beside the run."""
    names = {"tensorboard_dir": str(tmp_path / "curves"), "local_norm_format": "tensorboard"}
    recipe = parsed(monitor_config={"monitor_on": True} | names)
    (make,) = recipe.make_callbacks

    assert make.keywords["tensorboard_dir"] == str(tmp_path / "curves")


def test_callbacks_are_made_anew():
    """Each run gets callbacks of its own."""
    recipe = parsed(callbacks=[{"type": "MFLossMonitor", "per_print_times": 3}])
    (make,) = recipe.make_callbacks

    assert isinstance(make(), MFLossMonitor)
    assert make() is not make()


def test_keys_without_meaning_are_named_in_one_warning():
    """MindFormers' own keys are left out, and all named at once."""
    monitor = {"type": "MFLossMonitor", "micro_batch_num": 4, "learning_rate": 0.1}
    text = recipe_text(
        callbacks=[monitor, {"type": "SummaryMonitor"}],
        monitor_config={"monitor_on": False, "dump_path": "./dump"},
        optimizer={"type": "AdamW", "swap": False},
    )
    with pytest.warns(RecipeWarning) as caught:
        recipe = parse_recipe(text, "r.yaml")

    (warning,) = caught
    named = [
        "optimizer.swap",
        "callbacks.0.micro_batch_num",
        "callbacks.0.learning_rate",
        "callbacks.1 (SummaryMonitor)",
        "monitor_config.dump_path",
    ]
    assert set(recipe.without_meaning) == set(named)
    assert all(name in str(warning.message) for name in named)
    assert len(recipe.make_callbacks) == 1


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainin.x=1", ["`trainin`", "did you mean `training`?"]),
        ("training.max_stepz=1", ["`training.max_stepz`", "did you mean `max_steps`?"]),
        ("training.learning_rate=fast", ["`training.learning_rate` must be", "'fast'"]),
        ("training.learning_rate=.nan", ["`training.learning_rate` must be >= 0, got nan"]),
        ("training.per_device_train_batch_size=0", ["per_device_train_batch_size` must be >= 1"]),
        ("training.seed=-1", ["`training.seed` must be >= 0"]),
        ("training.eval_strategy=sometimes", ["`training.eval_strategy`"]),
        ("training.metric_for_best_model=3", ["`training.metric_for_best_model` must be"]),
        ("ema.decay=1.5", ["`ema.decay` must be in [0, 1), got 1.5"]),
        ("ema.decai=0.5", ["`ema.decai`", "did you mean `decay`?"]),
        ("task=regresion", ["`task` must be one of", "'regresion'"]),
        ("data.type=diabetess", ["`data.type` must be one of"]),
        ("data.type=digits", ["`data.type` must have the columns ['features', 'target']"]),
        ("data.eval_fraction=1", ["`data.eval_fraction` must be in [0, 1), got 1"]),
        ("data.eval_fractio=0.1", ["did you mean `eval_fraction`?"]),
        ("data.sequence_length=8", ["`data.sequence_length` is not a setting of the task"]),
        ("data.columns={target: age}", ["`data.columns` must name columns of"]),
        ("model.path=x", ["`model.path` or `config` must be given", "got both"]),
        ("model.config.hidden_sise=3", ["`model.config.hidden_sise`", "'hidden_size'"]),
        ("model.config.hidden_size=0", ["`model.config.hidden_size` must be an int >= 1"]),
        ("model.config.model_type=perceptrn", ["`model.config.model_type`", "'perceptron'"]),
        ("model.config.model_type=llama", ["`model.config.model_type` must be a model that"]),
        ("model.tokenizer=bytes", ["`model.tokenizer` is not a setting"]),
        ("model.dtype=float8", ["`model.dtype` must be 'float32', 'bfloat16' or 'float16'"]),
        ("runner_wrapper.type=Cell", ["`runner_wrapper.type` must be"]),
        ("runner_wrapper.max_grad_norn=1", ["did you mean `max_grad_norm`?"]),
        ("runner_wrapper.max_grad_norm=-1", ["`runner_wrapper.max_grad_norm` must be > 0"]),
        ("runner_wrapper.scale_sense=0", ["`runner_wrapper.scale_sense` must be > 0"]),
        ("runner_wrapper.scale_sense=true", ["`runner_wrapper.scale_sense` must be"]),
        ("runner_wrapper.scale_sense={type: X}", ["`runner_wrapper.scale_sense.type` must be"]),
        (
            "runner_wrapper.use_skip_data_by_global_norm=true",
            ["`runner_wrapper.use_skip_data_by_global_norm` needs"],
        ),
        ("optimizer.type=SGDD", ["`optimizer.type` must be one of"]),
        ("optimizer={type: AdamW, betas: 0.9}", ["`optimizer.betas` must be two, got 0.9"]),
        ("optimizer={type: AdamW, bias: 1}", ["`optimizer.bias`", "did you mean"]),
        ("lr_schedule.type=Cosine", ["`lr_schedule.type` must be one of"]),
        (
            "lr_schedule={type: LinearWithWarmUpLR, warmup_steps: -1}",
            ["`lr_schedule.warmup_steps` must be >= 0"],
        ),
        ("callbacks=[{type: MFLosMonitor}]", ["`callbacks.0.type`", "'MFLossMonitor'"]),
        (
            "callbacks=[{type: MFLossMonitor, per_print_time: 1}]",
            ["`callbacks.0.per_print_time`", "did you mean `per_print_times`?"],
        ),
        (
            "callbacks=[{type: MFLossMonitor, per_print_times: 0}]",
            ["`callbacks.0.per_print_times` must be >= 1, got 0"],
        ),
        ("callbacks=[3]", ["`callbacks.0` must be"]),
        ("monitor_config.monitor_off=true", ["`monitor_config.monitor_off`"]),
        ("monitor_config={monitor_on: 1}", ["`monitor_config.monitor_on` must be a bool"]),
        ("peft={type: loraa}", ["`peft.type` must be one of"]),
        ("peft={type: lora, rr: 3}", ["`peft.rr` is not a key"]),
        ("peft={type: lora, r: x}", ["`peft.r` must be"]),
        ("training=3", ["`training` must be"]),
    ],
)
def test_errors_name_key_and_remedy(override, parts):
    """Whatever is wrong is said in one line, with the key and what it should be."""
    found = message(override)

    assert found.startswith("r.yaml")
    assert "--set" in found
    assert all(part in found for part in parts), found


def test_errors_name_the_line():
    """The line is that of the key in the file."""
    lines = recipe_text(callbacks=[{"type": "MFLossMonitor", "per_print_times": 0}]).splitlines()
    number = lines.index("  per_print_times: 0") + 1

    assert f"r.yaml, line {number}: `callbacks.0.per_print_times`" in message(text="\n".join(lines))


def test_two_learning_rates():
    """A rate that is given twice must be one."""
    section = {"type": "LinearWithWarmUpLR", "learning_rate": 1, "warmup_steps": 1}

    assert "`training.learning_rate` must be what `lr_schedule` says, 1, or left out" in message(
        text=recipe_text(lr_schedule=section)
    )


def test_two_learning_rates_are_named_where_they_stand():
    """A rate of `optimizer` that is not the schedule's is named there, with its line."""
    text = recipe_text(
        lr_schedule={"type": "LinearWithWarmUpLR", "learning_rate": 1, "warmup_steps": 1},
        optimizer={"type": "AdamW", "learning_rate": 0.5},
        training=None,
    )
    number = len(text.splitlines()) - text.splitlines()[::-1].index("  learning_rate: 0.5")

    assert message(text=text) == (
        f"r.yaml, line {number}: `optimizer.learning_rate` must be what `lr_schedule` says, 1, "
        "or left out, got 0.5"
    )
    assert message("training.learning_rate=0.5", text=text).startswith(
        "r.yaml, --set training.learning_rate: `training.learning_rate` must be what `lr_schedule`"
    )


def test_a_missing_section_is_named():
    """Model and data cannot be left out."""
    assert "`model` must be given, got nothing" in message(text=recipe_text(model=None))


def test_reading_leaves_the_text_alone():
    """What was read is kept as it was written."""
    recipe = parsed(ema={"decay": 0.5})

    assert recipe.document.data["ema"] == {"decay": 0.5}
    assert dataclasses.is_dataclass(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.peft = 1


def test_a_misspelt_section_is_named():
    """Not only that the one that is meant is missing."""
    with pytest.raises(RecipeError, match=r"`datas`.*did you mean `data`"):
        parse_recipe(recipe_text().replace("\ndata:", "\ndatas:"), "r")
