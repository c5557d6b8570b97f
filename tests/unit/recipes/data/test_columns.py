"""Wrong values in a user's rows: the column and the row are named before anything is trained."""

import json

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from mfwrap.recipe import RecipeError, parse_recipe
from mfwrap.recipe.run import build_trainer
from mfwrap.recipes.data.columns import check_labelled_texts, check_numbers, check_texts
from mfwrap.recipes.data.source import DataError
from support.recipe_texts import SMALL_LLAMA, recipe_text

# What TRL and datasets warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "regression": {"config": {"model_type": "perceptron"}},
    "sequence_classification": {"config": BERT},
    "token_classification": {"config": BERT},
    "image_classification": {"config": {"model_type": "vit"}},
}
WORDS = {"tokens": ["a", "b"], "labels": ["x", "y"]}
TURNS = [{"role": "user", "content": "a"}]
IMAGE = [[0.0, 1.0], [1.0, 0.0]]


def refusal_of(folder, task, rows, held_out=None, **data):
    """Return the error of a task about rows of a file."""
    section = {"type": "json_lines", "path": str(folder / "rows.jsonl"), **data}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if held_out is not None:
        section["eval_path"] = str(folder / "held_out.jsonl")
        (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    model = MODELS.get(task, {"config": SMALL_LLAMA})
    text = recipe_text(task=task, model=None, data=None)
    text += f"model: {json.dumps(model)}\ndata: {json.dumps(section)}\n"
    with pytest.raises(RecipeError) as caught:
        build_trainer(parse_recipe(text, "r.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "good", "bad", "says"),
    [
        ("causal_lm", {"text": "a"}, {"text": None}, "a string in each row of `text`, got None"),
        ("causal_lm", {"text": "a"}, {"text": 5}, "a string in each row of `text`, got 5"),
        (
            "sequence_classification",
            {"text": "a", "label": 0},
            {"text": "b", "label": "x"},
            "a number, like 0 in row 1, in each row of `label`, got 'x'",
        ),
        (
            "sequence_classification",
            {"text": "a", "label": "x"},
            {"text": "a", "label": None},
            "a string, like 'x' in row 1, in each row of `label`, got None",
        ),
        (
            "sequence_classification",
            {"text": "a", "label": "x"},
            {"text": None, "label": "x"},
            "a string in each row of `text`, got None",
        ),
        (
            "token_classification",
            WORDS,
            WORDS | {"tokens": ["a", None]},
            "a list of strings in each row of `tokens`, got ['a', None]",
        ),
        (
            "token_classification",
            WORDS,
            WORDS | {"labels": [1, 2]},
            "a list of strings alone, or of numbers alone, in each row of `labels`, got [1, 2]",
        ),
        (
            "token_classification",
            WORDS,
            WORDS | {"labels": ["x"]},
            "as many values as `tokens`, 2, in each row of `labels`, got ['x']",
        ),
        (
            "image_classification",
            {"image": IMAGE, "label": 1},
            {"image": IMAGE, "label": None},
            "a number, like 1 in row 1, in each row of `label`, got None",
        ),
        (
            "regression",
            {"features": [1.0, 2.0], "target": 1.0},
            {"features": [1.0, None], "target": 1.0},
            "a list of 2 numbers, as row 1 has, in each row of `features`, got [1.0, None]",
        ),
        (
            "regression",
            {"features": [1.0, 2.0], "target": 1.0},
            {"features": [1.0, 2.0, 3.0], "target": 1.0},
            "a list of 2 numbers, as row 1 has, in each row of `features`, got [1.0, 2.0, 3.0]",
        ),
        (
            "regression",
            {"features": [1.0], "target": 1.0},
            {"features": [1.0], "target": "high"},
            "a number in each row of `target`, got 'high'",
        ),
        (
            "supervised_tuning",
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": None},
            "a string, as row 1 has, in each row of `completion`, got None",
        ),
        (
            "supervised_tuning",
            {"prompt": TURNS, "completion": TURNS},
            {"prompt": "a", "completion": TURNS},
            "a list of messages, as row 1 has, in each row of `prompt`, got 'a'",
        ),
        (
            "supervised_tuning",
            {"messages": TURNS},
            {"messages": None},
            "a list of messages in each row of `messages`, got None",
        ),
        (
            "preference_tuning",
            {"chosen": "a", "rejected": "b"},
            {"chosen": "a", "rejected": 5},
            "a string, as row 1 has, in each row of `rejected`, got 5",
        ),
    ],
)
def test_a_wrong_value_is_named(tmp_path, task, good, bad, says):
    """The error has the column, what was expected, what was found, and in which row."""
    message = refusal_of(tmp_path, task, [good, good, bad, good, good, good])

    assert message.startswith("r.yaml, line ")
    assert f": `data` must have {says} in row 3 (the first is row 1)" in message
    assert "\n" not in message


def test_the_name_is_that_of_the_data(tmp_path):
    """With ``columns`` the error has the name that the user knows; also of what is held out."""
    good = {"review": "a"}
    rows, columns = [good] * 3, {"columns": {"text": "review"}}
    message = refusal_of(tmp_path, "causal_lm", rows, [good, {"review": None}], **columns)

    assert "of `review`, got None in row 2" in message
    assert message.endswith("of those that are held out")


def test_a_first_row_that_is_wrong(tmp_path):
    """It is the one that is named, and nothing is compared with it."""
    rows = [{"features": 1.0, "target": 1.0}] * 3

    message = refusal_of(tmp_path, "regression", rows)
    assert "a list of numbers in each row of `features`, got 1.0 in row 1" in message


def test_bytes_that_are_no_text(tmp_path):
    """A line in another encoding than UTF-8 is a row like others that do not fit."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "b"}\n')
    text = recipe_text(task="causal_lm", model=None, data=None)
    text += f"model: {json.dumps({'config': SMALL_LLAMA})}\n"
    text += f"data: {{type: json_lines, path: {file}}}\n"

    with pytest.raises(RecipeError, match=r"a string in each row of `text`, got b'caf.* row 2"):
        build_trainer(parse_recipe(text, "r.yaml"))


def test_whole_numbers_are_numbers():
    """Numbers of several kinds, names of classes and rows in another format pass."""
    numbers = Dataset.from_dict({"features": [[1.0, 2.0]] * 2, "target": [1, 2]})
    check_numbers(numbers.with_format("numpy"), {})
    features = Features({"text": Value("large_string"), "label": ClassLabel(names=["x", "y"])})
    check_labelled_texts(Dataset.from_dict({"text": ["a"], "label": [1]}, features=features), {})
    check_texts(Dataset.from_dict({"text": []}), {})


def test_rows_that_are_left_out_may_be_wrong():
    """Of a table of which rows were chosen, those alone are looked at."""
    table = Dataset.from_dict({"text": ["a", None, "b"]})
    check_texts(table.select([0, 2]), {})

    with pytest.raises(DataError, match="row 2"):
        check_texts(table, {})
