"""A recipe's own metric is computed from each evaluation."""

import json

import pytest

from mfwrap.runner import RecipeError, load_recipe, run_recipe
from support.own_parts import write_project

# Ignore the warnings that datasets emits.
pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = {"config": {"model_type": "perceptron", "hidden_size": 4, "num_hidden_layers": 1}}


def checked(folder, *overrides, allow_code=True, **sections):
    """Write the project with a model and data of mfwrap, and return its checked recipe."""
    base = {"model": MODEL, "data": {"type": "diabetes"}, "callbacks": None}
    file = write_project(folder, **{**base, **sections})
    return load_recipe(file, overrides, allow_code=allow_code)


def result(folder, recipe):
    """Run a recipe; return the metrics of its result file."""
    run_recipe(recipe)
    return json.loads((folder / "run" / "result.json").read_text())["metrics"]


@pytest.mark.parametrize("name", ["largest", "Largest"])
def test_its_numbers_are_added_to_those_of_the_task(tmp_path, name):
    """A function and a class get the predictions, and their arguments."""
    to_run = f"training.output_dir={tmp_path / 'run'}"
    plain = result(tmp_path, checked(tmp_path, to_run))
    found = []
    for scale in (1.0, -3.0):
        metric = {"type": f"my_parts.{name}", "scale": scale}
        recipe = checked(tmp_path, to_run, metric=metric)
        run_recipe(recipe, overwrite=True)
        found.append(json.loads((tmp_path / "run" / "result.json").read_text())["metrics"])

    assert found[0].keys() - plain.keys() == {"eval_largest"}
    assert found[0]["eval_loss"] == plain["eval_loss"]
    assert found[1]["eval_largest"] == pytest.approx(-3 * found[0]["eval_largest"])


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ({"type": "PerplexityMetric"}, "metric.type: expected module.Name of a function of transf"),
        ({"scale": 2.0}, "metric.type: expected module.Name of a function of transformers.EvalPr"),
        ({"type": "my_parts.largets"}, "has no 'largets'; did you mean 'largest'?"),
        ({"type": "my_parts.largest", "scael": 2}, "metric.scael: unknown key; did you mean 'sc"),
        ({"type": "my_parts.Largest", "scale": "big"}, "metric.scale: expected"),
    ],
)
def test_what_is_refused(tmp_path, metric, says):
    """An error is one sentence."""
    with pytest.raises(RecipeError) as error:
        checked(tmp_path, metric=metric)

    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_metric_needs_an_evaluation(tmp_path):
    """Without held-out rows the metric would never be computed."""
    recipe = checked(
        tmp_path,
        f"training.output_dir={tmp_path / 'run'}",
        data={"type": "diabetes", "eval_fraction": 0},
        metric={"type": "my_parts.largest"},
    )

    with pytest.raises(RecipeError, match="expected held-out rows because metric is set, got none"):
        run_recipe(recipe)


def test_a_metric_returns_numbers_by_name(tmp_path):
    """Anything else is an error that names the function."""
    recipe = checked(
        tmp_path,
        f"training.output_dir={tmp_path / 'run'}",
        metric={"type": "my_parts.nothing"},
    )

    with pytest.raises(TypeError, match="nothing must return numbers by name, got None"):
        run_recipe(recipe)


def test_no_code_runs_without_the_flag(tmp_path):
    """The recipe is checked without the metric."""
    recipe = checked(tmp_path, allow_code=False, metric={"type": "my_parts.largest", "odd": 1})

    assert recipe.add_metric is None
    assert recipe.unchecked == {("metric", "type"): "my_parts.largest"}
