"""A value that makes the scale of a table's column is said, with its place."""

import json

import numpy as np
import pytest

from mfwrap.runner.preview import preview
from mfwrap.runner.rehearsal import rehearse
from mfwrap.runner.run import checked_rows
from support.recipe_data import recipe_of
from support.recipe_texts import PERCEPTRON

# Ignore the warnings that datasets emits.
pytestmark = pytest.mark.filterwarnings("ignore")
NUMBER = 400


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a table, and returns a recipe that is trained on it."""

    def write(a, y, model=PERCEPTRON):
        rows = enumerate(zip(a, y, strict=True))
        lines = ["a,b,y", *(f"{one},{at % 7},{two}" for at, (one, two) in rows)]
        (tmp_path / "rows.csv").write_text("\n".join(lines))
        data = {"path": str(tmp_path / "rows.csv")}
        data["columns"] = {"features": ["a", "b"], "target": "y"}
        return recipe_of("regression", data, model=model, max_steps=1)

    return write


def said_of(recipe):
    """Return what is said about the rows of a recipe."""
    said = []
    checked_rows(recipe, say=said.append)
    return said


def normal(seed=0, number=NUMBER):
    """Return normal values."""
    return np.random.default_rng(seed).normal(size=number)


@pytest.mark.parametrize("column", ["feature 'a'", "target 'y'"])
def test_a_value_far_from_the_others(recipe, column):
    """One huge value is said with file and line, by every command, and once."""
    columns = {"feature 'a'": normal(0), "target 'y'": normal(1)}
    columns[column][16] = -1e5
    table = recipe(*columns.values())
    low, high = np.quantile(columns[column], [0.25, 0.75])
    (said,) = said_of(table)

    assert said.startswith(f"warning: {column} is -100000.0 at ")
    assert "rows.csv:18, but half of its values are between " in said
    assert f"between {low:.4g} and {high:.4g}; the model divides by" in said
    assert f"deviation, {columns[column].std():.4g}, which" in said
    lines = []
    rehearse(table, lines.append)
    assert lines.count(said) == 1
    assert preview(table)[0] == said


def test_several_values(recipe):
    """The number of other rows with such values is said."""
    values = normal()
    values[[3, 50, 90]] = 999_999

    assert (
        "rows.csv:5 (and 2 more rows have such values), but" in said_of(recipe(values, normal()))[0]
    )


ORDINARY = {
    "log-normal": np.exp(normal(number=20_000)),
    "wide log-normal": np.exp(2 * normal(number=20_000)),
    "Student": np.random.default_rng(0).standard_t(2, 20_000),
    "Pareto": np.random.default_rng(0).pareto(1.5, 20_000),
    "one of one": np.eye(1, NUMBER)[0],
    "rare": np.where(np.arange(NUMBER) % 40, 0, 1e6),
    "equal": np.ones(NUMBER),
    "counts": np.random.default_rng(0).poisson(0.1, NUMBER),
    "small and large": np.where(np.arange(NUMBER) % 2, 1e-9, 1e9),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_columns(recipe, name):
    """Heavy tails, classes of which one is rare, and constants are no reason for a line."""
    values = ORDINARY[name]
    assert said_of(recipe(values, normal(1, len(values)))) == []
    assert said_of(recipe(normal(1, len(values)), values)) == []


def test_a_model_that_does_not_standardize(recipe):
    """Nothing is said if the scale does not count."""
    values = normal()
    values[0] = 1e6
    model = {"config": PERCEPTRON["config"] | {"standardize": False}}

    assert said_of(recipe(values, normal(1), model)) == []


def test_a_column_of_lists(tmp_path):
    """A feature in a list is named by its place."""
    values = normal()
    values[1] = 1e6
    rows = [{"features": [0.5, float(one)], "target": float(one)} for one in values]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl")}

    said = said_of(recipe_of("regression", data, model=PERCEPTRON))
    assert [line.partition(" is ")[0] for line in said] == [
        "warning: features[1]",
        "warning: target 'target'",
    ]
