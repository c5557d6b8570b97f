"""MindFormers' YAML files are converted to recipes that train in the same way, or refused."""

import math

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mfwrap.runner import RecipeError, import_mindformers, parse_recipe
from mfwrap.runner.mindformers.losses import LOSSES
from mfwrap.runner.rehearsal import rehearse
from mfwrap.runner.run import run_recipe
from support.mindformers_files import (
    ABSENT,
    imported,
    imported_recipe,
    mindformers_text,
    paths_of_keys,
)
from support.paths import TESTS

WHOLE = sorted((TESTS / "mindformers").glob("*.yaml"))
"""``every_key.yaml`` has all keys of MindFormers' documentation; the others follow its examples."""


def test_a_recipe_has_notes():
    """Notes and losses are comments of the recipe; keys without effect share one note."""
    result, recipe = imported({"run_mode": "finetune"}, ("weights",))

    assert result.text.startswith("# Imported from MindFormers' m.yaml.\n# lost (weights): the ")
    assert recipe["task"] == "causal_lm"
    assert [note for note in result.notes if note.startswith("no effect")] == result.notes[-1:]
    assert "context, " in result.notes[-1]
    assert all(len(line) <= 100 for line in result.text.splitlines())


def test_the_number_of_parameters_is_noted():
    """The embedding and the head have 300 x 32 weights each; the rest is in two layers."""
    per_layer = 4 * 32 * 32 + 3 * 32 * 256 + 2 * 32
    total = 2 * 300 * 32 + 2 * per_layer + 32

    assert f"model: {total:,} parameters" in imported()[0].notes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run_mode": "predict"}, r"m.yaml:1: run_mode: expected a file that trains"),
        ({"run_mode": "eval"}, "run_mode: expected a file that trains"),
        ({"only_save_strategy": True}, "only_save_strategy: expected a file that trains"),
        ({"trainer.type": "MaskedImageModelingTrainer"}, "trainer: expected one of the trainers"),
        ({"profil": True}, r"m.yaml:\d+: profil: unknown section; did you mean 'profile'"),
        ({"model.model_config.hiden_size": 3}, "model.model_config.hiden_size: unknown key"),
        ({"model.archi": {"type": "x"}}, "model.archi: unknown key"),
        ({"runner_config": 3}, "runner_config: expected a mapping, got 3"),
        ({"runner_wrapper.type": ["x"]}, "runner_wrapper.type: expected a string, got"),
        ({"callbacks": [{"hub_token": "x"}]}, "callbacks.0.hub_token: expected no secret"),
        ({"model": ABSENT}, "expected a section model"),
        ({"resume_training": True, "run_mode": "finetune"}, "--accept resume --accept weights$"),
    ],
)
def test_what_cannot_be_imported(changes, says):
    """A file that cannot be imported is an error of one sentence that names line and key."""
    with pytest.raises(RecipeError, match=says):
        import_mindformers(mindformers_text(changes), "m.yaml")


def test_files_that_do_not_train():
    """A file for the conversion of weights has none of the sections of a training."""
    with pytest.raises(RecipeError, match=r"m.yaml: expected a file that trains, got none of"):
        import_mindformers("ckpt_path: a\noutput_path: b\n", "m.yaml")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(paths_of_keys()),
    st.sampled_from([None, "", "x", [], [["a"]], {}, {"a": [1]}, -1, 3.5, True, 10**30, math.nan]),
)
@example("lr_schedule.total_steps", [])
def test_a_wrong_value_is_an_error_of_one_sentence(path, value):
    """Whatever a key holds, the file becomes a valid recipe, or is refused in one line."""
    try:
        found = import_mindformers(mindformers_text({path: value}), "m.yaml", LOSSES)
    except RecipeError as error:
        said = str(error)
        assert said.startswith("m.yaml:")
        assert "\n" not in said
    else:
        assert parse_recipe(found.text, "m.yaml")


def test_an_unknown_name_of_a_loss():
    """A misspelled name to accept is an error."""
    with pytest.raises(RecipeError, match=r"--accept: expected one of .*, got 'weight'"):
        imported(None, ("weight",))


def test_the_data_have_to_be_replaced():
    """The recipe is valid and cannot be trained before its data have been replaced."""
    recipe = imported_recipe()

    assert rehearse(recipe) == "mfwrap does not read the data of MindFormers' MindDataset"
    with pytest.raises(RecipeError, match=r"data.type: must be a source of mfwrap, .*w.mindrecord"):
        run_recipe(recipe)


@pytest.mark.fast_sample(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_whole_files(file):
    """Files like those that MindFormers ships become valid recipes that validate again."""
    original = yaml.safe_load(file.read_text())
    result = import_mindformers(file.read_text(), file.name, LOSSES)
    recipe = parse_recipe(result.text, file.name, ["training.use_cpu=true"])

    assert recipe.arguments.num_train_epochs == original["runner_config"]["epochs"]
    clips = original["runner_wrapper"]["use_clip_grad"]
    assert recipe.step.config.use_clip_grad == clips
    assert not recipe.without_meaning


@pytest.mark.filterwarnings("ignore")
def test_an_imported_file_trains(tmp_path, monkeypatch):
    """The recipe trains as soon as its data have been replaced."""
    monkeypatch.chdir(tmp_path)
    recipe = imported_recipe(
        {"lr_schedule.warmup_ratio": 0.0},
        "data={type: python_topics, max_train_samples: 4, sequence_length: 16}",
        "training.max_steps=2",
    )
    result = run_recipe(recipe)

    assert (result.folder / "model" / "model.safetensors").is_file()
    assert result.metrics["eval_loss"] < 7
