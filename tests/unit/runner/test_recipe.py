"""A recipe is checked completely, and each fault is an error of one line."""

import dataclasses
import json
import sys

import pytest
import torch

from mfwrap.runner import RecipeError, parse_recipe
from mfwrap.runner.library import shipped_recipes
from support.recipe_texts import SMALL_LLAMA, message, parsed, recipe_text
from support.shipped_recipes import provide


def test_local_norms_need_gradients_that_are_reduced_together():
    """Local norms with accelerate's `sync_each_batch` are refused where the recipe sets it."""
    accumulation = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    training = {"gradient_accumulation_steps": 2, "accelerator_config": accumulation}
    parsed(training=training)

    text = recipe_text(training=training, runner_wrapper={"local_norm": True})
    assert "accelerator_config: `local_norm` must be False if `sync_each" in message(text=text)


@pytest.mark.parametrize(
    ("name", "library"),
    [("supervised_tuning", "trl"), ("grpo", "trl"), ("embedding", "sentence_transformers")],
)
def test_a_task_without_its_library(monkeypatch, name, library):
    """The line of the task says what to install."""
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(RecipeError, match=rf"^{name}:\d+: task: needs .* of {library}; install it"):
        parse_recipe(shipped_recipes()[name].text, name)


# TRL sets `gradient_checkpointing`, which newer releases of transformers deprecate.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name, tmp_path, monkeypatch):
    """Every shipped recipe is valid without a warning, and begins with a one-line summary."""
    monkeypatch.chdir(tmp_path)
    provide(name, tmp_path)
    recipe = shipped_recipes()[name]
    assert parse_recipe(recipe.text, name).arguments.output_dir == f"runs/{name}"

    assert recipe.text.startswith(f"# {recipe.summary}\n")
    assert recipe.summary.endswith(".")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainin.x=1", "trainin: unknown section; did you mean 'training'?"),
        (
            "learning_rate=1",
            "learning_rate: is a key of the section training; write it as training.",
        ),
        ("training.epochs=3", "training.epochs: unknown key; did you mean 'num_train_epochs'?"),
        ("training.max_stepz=1", "training.max_stepz: unknown key; did you mean 'max_steps'?"),
        ("training.max_steps=often", "training.max_steps: expected an integer, got 'often'"),
        ("training.learning_rate=fast", "training.learning_rate: expected a number, got 'fast'"),
        ("training.learning_rate=.nan", "training.learning_rate: expected a number >= 0, got nan"),
        (
            "training.per_device_train_batch_size=0",
            "training.per_device_train_batch_size: expected a number >= 1, got 0",
        ),
        (
            "model.norm_dtype=bfloat16",
            "model.norm_dtype: expected 'float32', as in model.dtype, or training.bf16 or ",
        ),
        ("training.seed=-1", "training.seed: expected a number >= 0, got -1"),
        ("training.eval_strategy=sometimes", "training.eval_strategy: "),
        ("training.metric_for_best_model=3", "training.metric_for_best_model: expected a string"),
        ("ema.decay=1.5", "ema.decay: must be in [0, 1), got 1.5"),
        ("ema.decai=0.5", "ema.decai: unknown key; did you mean 'decay'?"),
        ("ema.dtype=float32", "ema.dtype: unknown key; known: ['decay', 'device', 'sigma_rel', "),
        ("task=regresion", "task: expected one of ['causal_lm', "),
        ("data.type=diabetess", "data.type: expected one of ['csv', 'datasets', "),
        ("data.type=digits", "data.type: expected data with the columns ['features', 'target']"),
        ("data.eval_fraction=1", "data.eval_fraction: must be in [0, 1), got 1"),
        ("data.eval_fractio=0.1", "data.eval_fractio: unknown key; did you mean 'eval_fraction'?"),
        ("data.sequence_length=8", "data.sequence_length: is not a setting of the task"),
        (
            "data.columns={target: age}",
            "data.columns: must have values among ['features', 'target']",
        ),
        (
            "model={path: x, config: {model_type: perceptron}}",
            "model.path: must be set if `config` is not, and left out if it is, got both",
        ),
        ("model.config.hidden_sise=3", "did you mean 'hidden_size'?"),
        ("model.config.hidden_size=0", "model.config.hidden_size: must be >= 1, got 0"),
        ("model.config.model_type=perceptrn", "did you mean 'perceptron'?"),
        (
            "model.config.model_type=llama",
            "model.config.model_type: expected a model type that this task can train, got 'llama'",
        ),
        (
            "model.config.model_type=vit",
            "; known: ['perceptron']; tasks that can train it: image_classification",
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
        (
            "runner_wrapper.spike_policy=clamp",
            "runner_wrapper.spike_policy: expected 'record', 'skip' or 'clip', got 'clamp'",
        ),
        (
            "runner_wrapper.spike_z=3",
            'runner_wrapper.spike_z: has no effect with spike_policy="record", got 3',
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
            "got 'MFLosMonitor'; did you mean 'MFLossMonitor'?",
        ),
        (
            "callbacks=[{type: MFLossMonitor, per_print_time: 1}]",
            "callbacks.0.per_print_time: unknown key; did you mean 'per_print_times'?",
        ),
        (
            "callbacks=[{type: MFLossMonitor, per_print_times: 0}]",
            "callbacks.0.per_print_times: must be >= 1, got 0",
        ),
        ("callbacks=[{type: [x]}]", "callbacks.0.type: expected one of ["),
        ("callbacks=[{typ: MFLossMonitor}]", "0.typ: unknown key; did you mean 'type'?"),
        ("callbacks=[{}]", "callbacks.0.type: required, but missing; expected one of ["),
        ("runner_wrapper.scale_sense={type: [x]}", "scale_sense.type: expected one of ["),
        ("optimizer={typ: AdamW}", "optimizer.typ: unknown key; did you mean 'type'?"),
        ("lr_schedule={type: {a: b}}", "lr_schedule.type: expected one of ["),
        ("data.type=[x]", "expected one of ["),
        ("task=[x]", "expected a string, got ['x']"),
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
    assert found.startswith(f"--set {override.partition('=')[0]}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss_by", "site"), ("row_losses", True), ("path", {"web": "a.jsonl", "books": "a.jsonl"})],
)
def test_pairs_have_no_loss_by_row(tmp_path, monkeypatch, key, value):
    """Preference tuning refuses the loss by source and by row."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n')
    data = {"type": "json_lines", "path": "a.jsonl"} | {key: value}
    model = {"config": SMALL_LLAMA, "tokenizer": "bytes"}
    text = recipe_text(task="preference_tuning", model=None, data=None, training={})
    text += f"model: {json.dumps(model)}\ndata: {json.dumps(data)}\n"
    found = "loss_by" if key == "path" else key

    assert f"data.{found}: must be left out, because the rows of the task" in message(text=text)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_float16_without_a_gpu():
    """On a CPU, a Trainer does not compute in float16, which a warning says."""
    with pytest.warns(UserWarning, match="no GPU, and without one a Trainer computes in float32"):
        assert parsed(training={"fp16": True}).arguments.fp16


def test_a_misspelled_folder(tmp_path, monkeypatch):
    """A folder with a similar name is named if the hub does not have the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "my_model").mkdir()
    (tmp_path / "my_model/config.json").touch()
    text = recipe_text(task="causal_lm", model=None, data=None, training={})
    text += "model: {path: my_modl}\ndata: {type: python_topics}\n"

    says = r"model\.path: must be .* 'my_modl': no folder here, and .*; did you mean 'my_model'\?$"
    with pytest.raises(RecipeError, match=says):
        parse_recipe(text, "r.yaml")


def test_a_tab_is_named():
    """The error for a line that begins with a tab says that YAML wants spaces."""
    text = recipe_text().replace("  max_steps", "\tmax_steps")

    assert "indent lines with spaces, not with tabs" in message(text=text)


def test_errors_name_the_line():
    """The place of an error is the line of the key in the file."""
    lines = recipe_text(callbacks=[{"type": "MFLossMonitor", "per_print_times": 0}]).splitlines()
    number = lines.index("  per_print_times: 0") + 1

    assert message(text="\n".join(lines)) == (
        f"r.yaml:{number}: callbacks.0.per_print_times: must be >= 1, got 0"
    )


def test_a_missing_section_is_named():
    """A recipe without a model is an error that names the section."""
    assert "r.yaml: model: required, but missing" in message(text=recipe_text(model=None))


def test_reading_leaves_the_text_alone():
    """A parsed recipe keeps its sections as they were written, and cannot be changed."""
    recipe = parsed(ema={"decay": 0.5})

    assert recipe.document.data["ema"] == {"decay": 0.5}
    assert dataclasses.is_dataclass(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.peft = 1


def test_a_misspelt_section_is_named():
    """The error for a misspelled section names that section and suggests the right name."""
    with pytest.raises(RecipeError, match=r"datas: unknown section; did you mean 'data'"):
        parse_recipe(recipe_text().replace("\ndata:", "\ndatas:"), "r")
