"""MindFormers' YAML files are converted to recipes that train in the same way."""

import json
import math

import pytest
import yaml

from mfwrap.recipe import RecipeError, parse_recipe
from mfwrap.recipe.mindformers import import_mindformers
from mfwrap.recipe.run import run_recipe
from support.paths import TESTS

WHOLE = sorted((TESTS / "mindformers").glob("*.yaml"))
"""``every_key.yaml`` has all keys of MindFormers' documentation; the others follow its examples."""

WRAPPER = """
runner_wrapper:
  type: MFTrainOneStepCell
  scale_sense:
    type: DynamicLossScaleUpdateCell
    loss_scale_value: 65536
    scale_factor: 2
    scale_window: 1000
  use_clip_grad: True
  max_grad_norm: 1.0
"""
FULL = """
use_skip_data_by_global_norm: False
check_for_nan_in_loss_and_grad: False
calculate_per_token_loss: False
output_dir: './output'
do_eval: False
eval_step_interval: 100
eval_epoch_interval: -1
runner_config:
  epochs: 2
  batch_size: 1
  sink_mode: True
  sink_size: 1
  gradient_accumulation_steps: 1
  stop_step: 0
runner_wrapper:
  type: MFTrainOneStepCell
  scale_sense:
    type: DynamicLossScaleUpdateCell
    loss_scale_value: 65536
    scale_factor: 2
    scale_window: 1000
  use_clip_grad: True
  max_grad_norm: 1.0
  local_norm: False
optimizer:   {type: AdamW, betas: [0.9, 0.95], eps: 1.e-8, weight_decay: 0.0}
lr_schedule:
  {type: CosineWithWarmUpLR, learning_rate: 1.e-5, lr_end: 1.e-6, warmup_ratio: 0.01,
   total_steps: -1}
callbacks:
  - type: MFLossMonitor
    per_print_times: 1
monitor_config:
  monitor_on: True
  dump_path: './dump'
  target: ['layers.0.', 'layers.1.']
  invert: False
  step_interval: 1
  local_loss_format: ['log', 'tensorboard']
  device_local_loss_format: ['log', 'tensorboard']
  local_norm_format: ['log', 'tensorboard']
  device_local_norm_format: ['log', 'tensorboard']
  optimizer_state_format: null
  weight_state_format: null
  throughput_baseline: null
  print_struct: False
  check_for_global_norm: False
  global_norm_spike_threshold: 3.0
  global_norm_spike_count_threshold: 10
tensorboard:
  tensorboard_dir: 'worker/tensorboard'
  tensorboard_queue_size: 10
  log_loss_scale_to_tensorboard: True
  log_timers_to_tensorboard: True
profile: False
parallel: {parallel_mode: 1, gradients_mean: False, full_batch: False}
parallel_config: {data_parallel: 1, model_parallel: 4, pipeline_stage: 4, micro_batch_num: 4}
micro_batch_interleave_num: 1
"""
FILES = {
    "full": FULL,
    "llama": """
seed: 42
run_mode: 'train'
trainer: {type: CausalLanguageModelingTrainer, model_name: 'llama2_7b'}
model:
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 64
    hidden_size: 32
    num_layers: 2
    num_heads: 4
    vocab_size: 32000
    rms_norm_eps: 1.0e-5
    use_flash_attention: True
  arch: {type: LlamaForCausalLM}
train_dataset: {data_loader: {type: MindDataset, dataset_dir: ''}}
optimizer: {type: FP32StateAdamWeightDecay, beta1: 0.9, beta2: 0.95, eps: 1.e-8}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 3.e-4, warmup_ratio: 0.03, total_steps: -1}
"""
    + WRAPPER,
    "fixed": "runner_wrapper: {type: MFTrainOneStepCell, scale_sense: 1.0, use_clip_grad: True}\n",
    "adaptive": """
runner_wrapper:
  type: MFTrainOneStepCell
  scale_sense:
    type: AdaptiveLossScaleUpdateCell
    loss_scale_value: 4294967296
    scale_factor: 2
    scale_window: 20
    max_scale_window: 1000
    min_scale_window: 20
""",
    "fixed_cell": """
runner_wrapper:
  scale_sense: {type: FixedLossScaleUpdateCell, loss_scale_value: 1024}
""",
    "pipeline": """
runner_wrapper: {type: MFPipelineWithLossScaleCell, micro_batch_num: 8, use_clip_grad: True}
parallel_config: {pipeline_stage: 2, micro_batch_num: 8}
runner_config: {epochs: 1, batch_size: 2}
""",
    "sharded_accumulation": """
parallel: {parallel_mode: 1, parallel_optimizer_config: {gradient_accumulation_shard: True}}
""",
    "skip": """
use_skip_data_by_global_norm: True
runner_wrapper: {use_clip_grad: True, max_grad_norm: 1.0}
monitor_config: {monitor_on: True, global_norm_spike_threshold: 3.0}
""",
    "nan_check": "check_for_nan_in_loss_and_grad: True\n" + WRAPPER,
    "evaluation": "do_eval: True\neval_step_interval: 50\nrunner_config: {epochs: 1}\n",
    "linear": "lr_schedule: {type: LinearWithWarmUpLR, learning_rate: 1.e-4, warmup_steps: 10}\n",
    "constant": "lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1.e-4, warmup_steps: 0}\n",
    "polynomial": """
lr_schedule:
  {type: PolynomialWithWarmUpLR, learning_rate: 1.e-4, lr_end: 1.e-6, warmup_steps: 5, power: 2.0}
""",
    "registered": "lr_schedule: {type: polynomial, learning_rate: 5.e-5, warmup_steps: 0}\n",
    "vit": """
trainer: {type: ImageClassificationTrainer}
model: {model_config: {type: ViTConfig, hidden_size: 32, num_hidden_layers: 1,
        num_attention_heads: 2, intermediate_size: 64, patch_size: 2, image_size: 8}}
""",
    "bert": """
trainer: {type: TokenClassificationTrainer}
model: {model_config: {type: BertConfig, hidden_size: 32, num_layers: 1, num_heads: 2}}
""",
}
"""Files like those that MindFormers ships, and parts of such files."""


def imported(name):
    """Return the recipe of a file after parsing, and the result of the import."""
    result = import_mindformers(FILES[name], f"{name}.yaml")
    # Make the model small, because the check of a full-size model takes long.
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    overrides = [f"model.config.{key}={value}" for key, value in small.items()]
    if name not in {"vit", "bert"}:
        overrides.append("model.config.num_attention_heads=4")
    return parse_recipe(result.text, name, [*overrides, "training.use_cpu=true"]), result


@pytest.mark.filterwarnings("ignore::mfwrap.recipe.RecipeWarning")
@pytest.mark.parametrize("name", FILES)
def test_files_become_valid_recipes(name):
    """Every file is converted to a valid recipe."""
    recipe, result = imported(name)

    assert recipe.document.data["task"] in result.text
    assert result.text.startswith(f"# Imported from MindFormers' {name}.yaml.\n")


@pytest.mark.filterwarnings("ignore::mfwrap.recipe.RecipeWarning")
def test_sections_are_copied():
    """Five sections are copied unchanged, apart from the monitors' TensorBoard folder."""
    original = yaml.safe_load(FULL)
    recipe = yaml.safe_load(import_mindformers(FULL, "full.yaml").text)

    folder = {"tensorboard_dir": "worker/tensorboard"}
    assert recipe["monitor_config"] == original["monitor_config"] | folder
    assert recipe["runner_wrapper"] == original["runner_wrapper"]
    assert recipe["optimizer"] == original["optimizer"] | {"eps": 1e-8}
    assert float(recipe["lr_schedule"]["learning_rate"]) == 1e-5
    (monitor,) = recipe["callbacks"]
    assert monitor["tensorboard_dir"] == "worker/tensorboard"


@pytest.mark.filterwarnings("ignore::mfwrap.recipe.RecipeWarning")
def test_numbers_arrive():
    """The values of the file reach the Trainer and the step."""
    recipe, _ = imported("llama")
    arguments = recipe.arguments

    assert (arguments.learning_rate, arguments.adam_beta2) == (3e-4, 0.95)
    assert (arguments.seed, arguments.max_grad_norm) == (42, 1.0)
    assert recipe.step.make_scale().get_loss_scale() == 65536
    assert recipe.schedule.settings == {"warmup_ratio": 0.03}
    assert recipe.model.config["vocab_size"] == 32000
    assert recipe.data.sequence_length == 64


def test_top_level_switches():
    """Top-level switches become settings of the step, the monitor or the training."""
    skip, _ = imported("skip")
    check, _ = imported("nan_check")
    evaluation, _ = imported("evaluation")
    pipeline, _ = imported("pipeline")
    sharded, _ = imported("sharded_accumulation")

    assert skip.step.config.use_skip_data_by_global_norm
    assert skip.step.config.global_norm_spike_threshold == 3.0
    assert len(skip.make_callbacks) == len(check.make_callbacks) == 1
    assert (evaluation.arguments.eval_strategy, evaluation.arguments.eval_steps) == ("steps", 50)
    assert pipeline.arguments.gradient_accumulation_steps == 8
    accumulation = sharded.arguments.accelerator_config.gradient_accumulation_kwargs
    assert accumulation == {"sync_each_batch": True}


def test_sharded_accumulation_excludes_local_norms():
    """Local norms of several micro-batches are kept; a note says what is left out for them."""
    text = """
parallel: {parallel_mode: 1, parallel_optimizer_config: {gradient_accumulation_shard: True}}
runner_config: {epochs: 1, gradient_accumulation_steps: 2}
"""
    key = "parallel.parallel_optimizer_config.gradient_accumulation_shard"
    for norms in (
        "runner_wrapper: {local_norm: True}",
        "monitor_config: {monitor_on: True, local_norm_format: tensorboard}",
    ):
        result = import_mindformers(text + norms, "m.yaml")
        assert f"{key}: left out, because it excludes local norms" in result.notes
        assert "sync_each_batch" not in result.text

    result = import_mindformers(text, "m.yaml")
    assert {f"{key}: becomes training.accelerator_config", "parallel.parallel_mode: left out"} <= {
        *result.notes
    }
    assert "parallel: left out" not in result.notes


def test_what_is_left_out_is_noted():
    """Every section that is left out has a note, which is also in the recipe."""
    result = import_mindformers(FULL, "full.yaml")

    assert {"parallel: left out", "profile: left out"} <= set(result.notes)
    assert all(f"# {note}\n" in result.text for note in result.notes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer: {type: ImageToTextRetrievalTrainer}\n", "trainer: expected one of the trainers"),
        ("runner_config: 3\n", r"m.yaml:1: runner_config: expected a mapping, got 3"),
        ("- a\n", "expected a mapping of sections"),
        ("runner_wrapper: {type: [x]}\n", r"m.yaml:1: runner_wrapper.type: expected a string, got"),
        ("callbacks: [{type: {a: b}}]\n", r"m.yaml:1: callbacks.0.type: expected a string, got"),
        ("callbacks: 3\n", r"m.yaml:1: callbacks: expected a list, got 3"),
        ("optimizer: [1]\n", r"m.yaml:1: optimizer: expected a mapping, got \[1\]"),
        ("trainer: {task_name: [x]}\n", r"m.yaml:1: trainer: expected one of the trainers"),
        ("a: &a {<<: *a}\n", r"m.yaml:1: a: expected at most 50 nested levels"),
        ("callbacks: [{hub_token: x}]\n", r"m.yaml:1: callbacks.0.hub_token: expected no secret"),
    ],
)
def test_what_cannot_be_imported(text, says):
    """A file that cannot be imported is an error that names file and section."""
    with pytest.raises(RecipeError, match=says):
        import_mindformers(text, "m.yaml")


@pytest.mark.filterwarnings("ignore::mfwrap.recipe.RecipeWarning")
@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_whole_files_become_valid_recipes(file):
    """Files like those that MindFormers ships become valid recipes at their full width."""
    original = yaml.safe_load(file.read_text())
    result = import_mindformers(file.read_text(), file.name)
    overrides = ["training.use_cpu=true"]
    if "config" in yaml.safe_load(result.text)["model"]:
        overrides.append("model.config.num_hidden_layers=1")
    else:  # the folder of the checkpoint is on MindFormers' machine
        overrides.append("model.path=org/name")
    recipe = parse_recipe(result.text, file.name, overrides)

    assert recipe.arguments.num_train_epochs == original["runner_config"]["epochs"]
    clips = original["runner_wrapper"]["use_clip_grad"]
    assert recipe.step.config.use_clip_grad == clips
    assert {"parallel: left out", "context: left out"} & set(result.notes)


@pytest.mark.filterwarnings("ignore::mfwrap.recipe.RecipeWarning")
def test_models_of_other_names():
    """Sizes of a model get transformers' names, and an unknown model type is an error."""
    gpt2 = next(file for file in WHOLE if file.stem == "pretrain_gpt2")
    result = import_mindformers(gpt2.read_text(), "gpt2.yaml")
    config = parse_recipe(result.text, "g", ["training.use_cpu=true"]).model.config

    assert {"hidden_size": 768, "num_hidden_layers": 12}.items() <= config.items()
    assert "model.expand_ratio: left out" in result.notes
    text = "model: {model_config: {model_type: llamma}}\n"
    with pytest.raises(RecipeError, match="expected a model type of transformers, got 'llamma'"):
        import_mindformers(text, "m.yaml")


def test_the_embedding_threshold_becomes_a_norm():
    """MindFormers' threshold of the squared norm becomes a threshold of the norm."""
    text = next(file for file in WHOLE if file.stem == "every_key").read_text()
    recipe = yaml.safe_load(import_mindformers(text, "m.yaml").text)

    limits = [one.get("embedding_local_norm_threshold") for one in recipe["callbacks"]]
    assert limits == [None, math.sqrt(270)]


@pytest.mark.filterwarnings("ignore::mfwrap.recipe.RecipeWarning")
def test_a_monitor_that_shows_local_norms_gets_them():
    """A monitor that shows local norms sets `local_norm`, even over ``False`` in the file."""
    monitor = "monitor_config: {monitor_on: True, local_norm_format: log}\n"
    off = monitor.replace("True", "False")
    recipes = [
        parse_recipe(import_mindformers(text, "m").text, "m", ["training.use_cpu=true"])
        for text in (monitor, off, monitor + "runner_wrapper: {local_norm: False}\n")
    ]

    assert [one.step.config.local_norm for one in recipes] == [True, False, True]


@pytest.mark.filterwarnings("ignore")
def test_an_imported_file_trains(tmp_path, monkeypatch):
    """The file with every key trains, with a small model and little data."""
    monkeypatch.chdir(tmp_path)
    text = next(file for file in WHOLE if file.stem == "every_key").read_text()
    small = {
        "model.config.hidden_size": 16,
        "model.config.intermediate_size": 16,
        "model.config.num_hidden_layers": 2,
        "model.config.num_attention_heads": 2,
        "data.sequence_length": 16,
        "data.max_train_samples": 2,
        "training.max_steps": 2,
        "training.use_cpu": "true",
    }
    overrides = [f"{key}={value}" for key, value in small.items()]
    result = run_recipe(parse_recipe(import_mindformers(text, "m").text, "m", overrides))
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    steps = [one for line in lines if "loss" in (one := json.loads(line))]

    assert [step["loss_scale"] for step in steps] == [65536, 65536]
    assert all(math.isfinite(step["loss"]) for step in steps)
