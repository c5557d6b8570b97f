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
    """Return the checked recipe with these sections."""
    return parse_recipe(recipe_text(**sections), "r.yaml")


def message(*overrides: str, text: str | None = None) -> str:
    """Return the error message of a recipe."""
    with pytest.raises(RecipeError) as error:
        parse_recipe(recipe_text() if text is None else text, "r.yaml", overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")  # TRL's default
@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name):
    """Every shipped recipe is valid without a warning, and begins with a one-line summary."""
    recipe = shipped_recipes()[name]
    assert parse_recipe(recipe.text, name).arguments.output_dir == f"runs/{name}"

    assert recipe.text.startswith(f"# {recipe.summary}\n")
    assert recipe.summary.endswith(".")


def test_runner_wrapper_becomes_the_step():
    """MindFormers' keys set the step, the loss scale and the Trainer."""
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
    """With MindFormers' section the default is not to clip; without it, the Trainer's limit."""
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
    """Every kind of loss scale can be configured."""
    made = parsed(runner_wrapper={"scale_sense": scale_sense}).step.make_scale()

    assert isinstance(made, kind)


def test_the_threshold_of_spikes_comes_from_the_monitor():
    """As in MindFormers, ``monitor_config`` sets it, even if the monitor is off."""
    recipe = parsed(
        runner_wrapper={"use_clip_grad": True},
        monitor_config={"monitor_on": False, "global_norm_spike_threshold": 7.5},
    )

    assert recipe.step.config.global_norm_spike_threshold == 7.5
    assert recipe.make_callbacks == ()


def test_optimizer_section():
    """MindFormers' section ``optimizer`` sets the Trainer's arguments."""
    optimizer = {"type": "AdamW", "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    arguments = parsed(optimizer=optimizer).arguments

    assert (arguments.adam_beta1, arguments.adam_beta2) == (0.8, 0.95)
    assert (arguments.adam_epsilon, arguments.weight_decay) == (1e-7, 0.1)
    assert str(arguments.optim.value) == "adamw_torch_fused"


def test_lr_schedule_section():
    """MindFormers' schedule spans the training and sets the learning rate."""
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
    """Without a folder in the section, the curves go to the run folder."""
    recipe = parsed(monitor_config={"monitor_on": True} | shown)
    (make,) = recipe.make_callbacks

    assert isinstance(make(), TrainingStateMonitor)


def test_a_folder_of_curves_is_taken_as_it_is_written(tmp_path):
    """A folder in the section is used instead of the run folder."""
    names = {"tensorboard_dir": str(tmp_path / "curves"), "local_norm_format": "tensorboard"}
    recipe = parsed(monitor_config={"monitor_on": True} | names)
    (make,) = recipe.make_callbacks

    assert make.keywords["tensorboard_dir"] == str(tmp_path / "curves")


def test_callbacks_are_made_anew():
    """Each run gets new callbacks."""
    recipe = parsed(callbacks=[{"type": "MFLossMonitor", "per_print_times": 3}])
    (make,) = recipe.make_callbacks

    assert isinstance(make(), MFLossMonitor)
    assert make() is not make()


def test_keys_without_meaning_are_named_in_one_warning():
    """MindFormers keys without an effect are left out, with one warning for all."""
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
    ("override", "says"),
    [
        ("trainin.x=1", "trainin: unknown section; did you mean 'training'?"),
        ("training.max_stepz=1", "training.max_stepz: unknown key; did you mean 'max_steps'?"),
        ("training.max_steps=often", "training.max_steps: expected an integer, got 'often'"),
        ("training.learning_rate=fast", "training.learning_rate: expected a number, got 'fast'"),
        ("training.learning_rate=.nan", "training.learning_rate: expected a number >= 0, got nan"),
        (
            "training.per_device_train_batch_size=0",
            "training.per_device_train_batch_size: expected a number >= 1, got 0",
        ),
        ("training.seed=-1", "training.seed: expected a number >= 0, got -1"),
        ("training.eval_strategy=sometimes", "training.eval_strategy: "),
        ("training.metric_for_best_model=3", "training.metric_for_best_model: expected a string"),
        ("ema.decay=1.5", "ema.decay: must be in [0, 1), got 1.5"),
        ("ema.decai=0.5", "ema.decai: unknown key; did you mean 'decay'?"),
        ("ema.dtype=float32", "ema.dtype: unknown key; known: ['decay', 'device', 'update_every'"),
        ("task=regresion", "task: expected one of ['causal_lm', "),
        ("data.type=diabetess", "data.type: expected one of ['datasets', "),
        ("data.type=digits", "data.type: expected data with the columns ['features', 'target']"),
        ("data.eval_fraction=1", "data.eval_fraction: must be in [0, 1), got 1"),
        ("data.eval_fractio=0.1", "data.eval_fractio: unknown key; did you mean 'eval_fraction'?"),
        ("data.sequence_length=8", "data.sequence_length: is not a setting of the task"),
        ("data.columns={target: age}", "data.columns: must name columns of ['features', 'target']"),
        ("model.path=x", "model.path: must be set if `config` is not, and only then; got both"),
        ("model.config.hidden_sise=3", "did you mean 'hidden_size'?"),
        ("model.config.hidden_size=0", "model.config.hidden_size: must be >= 1, got 0"),
        ("model.config.model_type=perceptrn", "did you mean 'perceptron'?"),
        (
            "model.config.model_type=llama",
            "model.config.model_type: expected a model type that this task can train, got 'llama'",
        ),
        ("model.tokenizer=bytes", "model.tokenizer: is not a setting of a task without text"),
        ("model.dtype=float8", "model.dtype: expected 'float32', 'bfloat16' or 'float16', got"),
        ("runner_wrapper.type=Cell", "runner_wrapper.type: expected 'MFTrainOneStepCell' or"),
        ("runner_wrapper.max_grad_norn=1", "unknown key; did you mean 'max_grad_norm'?"),
        ("runner_wrapper.max_grad_norm=-1", "runner_wrapper.max_grad_norm: must be > 0, got -1"),
        ("runner_wrapper.scale_sense=0", "runner_wrapper.scale_sense: must be > 0 and finite"),
        (
            "runner_wrapper.scale_sense=true",
            "scale_sense: expected a number or a mapping, got True",
        ),
        (
            "runner_wrapper.scale_sense={type: X}",
            "runner_wrapper.scale_sense.type: expected one of ['AdaptiveLossScaleUpdateCell', ",
        ),
        (
            "runner_wrapper.scale_sense={type: FixedLossScaleUpdateCell}",
            "runner_wrapper.scale_sense.loss_scale_value: required, but missing",
        ),
        (
            "runner_wrapper.use_skip_data_by_global_norm=true",
            "runner_wrapper.use_skip_data_by_global_norm: needs the global norm",
        ),
        ("optimizer.type=SGDD", "optimizer.type: expected one of ['Adafactor', 'AdamW', "),
        (
            "optimizer={type: AdamW, betas: 0.9}",
            "optimizer.betas: expected a list of two numbers, got 0.9",
        ),
        ("optimizer={type: AdamW, bias: 1}", "optimizer.bias: unknown key; did you mean 'betas'?"),
        ("lr_schedule.type=Cosine", "lr_schedule.type: expected one of ['ConstantWarmUpLR', "),
        (
            "lr_schedule={type: LinearWithWarmUpLR, warmup_steps: -1}",
            "lr_schedule.warmup_steps: must be >= 0, got -1",
        ),
        (
            "callbacks=[{type: MFLosMonitor}]",
            "callbacks.0.type: expected the name of a callback, got 'MFLosMonitor'; did you mean",
        ),
        (
            "callbacks=[{type: MFLossMonitor, per_print_time: 1}]",
            "callbacks.0.per_print_time: unknown key; did you mean 'per_print_times'?",
        ),
        (
            "callbacks=[{type: MFLossMonitor, per_print_times: 0}]",
            "callbacks.0.per_print_times: must be >= 1, got 0",
        ),
        ("callbacks=[3]", "callbacks.0: expected a mapping, got 3"),
        ("monitor_config.monitor_off=true", "monitor_config.monitor_off: unknown key"),
        ("monitor_config={monitor_on: 1}", "monitor_config.monitor_on: expected true or false"),
        ("peft={type: loraa}", "peft.type: expected one of ["),
        ("peft={type: lora, rr: 3}", "peft.rr: unknown key"),
        ("peft={type: lora, r: x}", "peft.r: expected an integer, got 'x'"),
        ("training=3", "training: expected a mapping, got 3"),
    ],
)
def test_errors_name_key_expectation_and_place(override, says):
    """A wrong value is an error of one line: key, expected and found value, and place."""
    found = message(override)

    assert says in found
    assert found.endswith(f"(--set {override.partition('=')[0]})")


def test_errors_name_the_line():
    """The place of an error is the line of the key in the file."""
    lines = recipe_text(callbacks=[{"type": "MFLossMonitor", "per_print_times": 0}]).splitlines()
    number = lines.index("  per_print_times: 0") + 1

    assert message(text="\n".join(lines)) == (
        f"callbacks.0.per_print_times: must be >= 1, got 0 (r.yaml:{number})"
    )


def test_two_learning_rates():
    """Two sections that set different rates are an error."""
    section = {"type": "LinearWithWarmUpLR", "learning_rate": 1, "warmup_steps": 1}

    assert "training.learning_rate: expected the value of lr_schedule, 1, or no value" in message(
        text=recipe_text(lr_schedule=section)
    )


def test_two_learning_rates_are_named_where_they_stand():
    """A rate in `optimizer` that contradicts the schedule is named with its own line."""
    text = recipe_text(
        lr_schedule={"type": "LinearWithWarmUpLR", "learning_rate": 1, "warmup_steps": 1},
        optimizer={"type": "AdamW", "learning_rate": 0.5},
        training=None,
    )
    number = len(text.splitlines()) - text.splitlines()[::-1].index("  learning_rate: 0.5")

    assert message(text=text) == (
        "optimizer.learning_rate: expected the value of lr_schedule, 1, or no value, got 0.5 "
        f"(r.yaml:{number})"
    )
    assert message("training.learning_rate=0.5", text=text) == (
        "training.learning_rate: expected the value of lr_schedule, 1, or no value, got 0.5 "
        "(--set training.learning_rate)"
    )


def test_a_missing_section_is_named():
    """A recipe without a model is an error."""
    assert "model: required, but missing (r.yaml)" in message(text=recipe_text(model=None))


def test_reading_leaves_the_text_alone():
    """The recipe keeps its sections as they were written, and cannot be changed."""
    recipe = parsed(ema={"decay": 0.5})

    assert recipe.document.data["ema"] == {"decay": 0.5}
    assert dataclasses.is_dataclass(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.peft = 1


def test_a_misspelt_section_is_named():
    """A misspelled section is reported, not only the missing one."""
    with pytest.raises(RecipeError, match=r"datas: unknown section; did you mean 'data'"):
        parse_recipe(recipe_text().replace("\ndata:", "\ndatas:"), "r")
