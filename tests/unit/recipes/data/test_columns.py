"""A wrong value in a user's rows is an error that names column and row, before training."""

import json
import re

import PIL.Image
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from mfwrap.recipes.data.columns import IMAGE as IMAGES
from mfwrap.recipes.data.columns import LABEL, NUMBER, NUMBERS, TEXT, ClassCheck, check_rows
from mfwrap.recipes.data.source import DataError
from mfwrap.runner import RecipeError, parse_recipe
from mfwrap.runner.run import build_trainer
from support.recipe_texts import SMALL_LLAMA, recipe_text

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "regression": {"config": {"model_type": "perceptron"}},
    "sequence_classification": {"config": BERT},
    "token_classification": {"config": BERT},
    "image_classification": {"config": {"model_type": "vit"}},
}
WORDS = {"tokens": ["a", "b"], "labels": ["x", "y"]}
ASKED = [{"role": "user", "content": "a"}]
ANSWER = [{"role": "assistant", "content": "b"}]
IMAGE = [[0.0, 1.0], [1.0, 0.0]]


def refusal_of(folder, task, rows, held_out=None, config=None, **data):
    """Build a Trainer on a file with invalid rows, and return the error message."""
    section = {"type": "json_lines", "path": str(folder / "rows.jsonl"), **data}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if held_out is not None:
        section["eval_path"] = str(folder / "held_out.jsonl")
        (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    model = MODELS.get(task, {"config": SMALL_LLAMA})
    model = {"config": model["config"] | (config or {})}
    text = recipe_text(task=task, model=None, data=None)
    text += f"model: {json.dumps(model)}\ndata: {json.dumps(section)}\n"
    with pytest.raises(RecipeError) as caught:
        build_trainer(parse_recipe(text, "r.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "good", "bad", "says"),
    [
        (
            "causal_lm",
            {"text": "a"},
            {"text": None},
            "a string in each row of column `text`, got an empty value (null)",
        ),
        ("causal_lm", {"text": "a"}, {"text": 5}, "a string in each row of column `text`, got 5"),
        (
            "sequence_classification",
            {"text": "a", "label": 0},
            {"text": "b", "label": "x"},
            "a number (like 0 in row 1) in each row of column `label`, got 'x'",
        ),
        (
            "sequence_classification",
            {"text": "a", "label": "x"},
            {"text": "a", "label": None},
            "a string (like 'x' in row 1) in each row of column `label`, got an empty value (null)",
        ),
        (
            "sequence_classification",
            {"text": "a", "label": "x"},
            {"text": None, "label": "x"},
            "a string in each row of column `text`, got an empty value (null)",
        ),
        (
            "token_classification",
            WORDS,
            WORDS | {"tokens": ["a", None]},
            "a list of strings in each row of column `tokens`, got ['a', None]",
        ),
        (
            "token_classification",
            WORDS,
            WORDS | {"labels": [1, 2]},
            "a list of only strings or only numbers in each row of column `labels`, got [1, 2]",
        ),
        (
            "token_classification",
            WORDS,
            WORDS | {"labels": ["x"]},
            "as many values as `tokens` (2) in each row of column `labels`, got ['x']",
        ),
        (
            "image_classification",
            {"image": IMAGE, "label": 1},
            {"image": IMAGE, "label": None},
            "a number (like 1 in row 1) in each row of column `label`, got an empty value (null)",
        ),
        (
            "image_classification",
            {"image": IMAGE, "label": 1},
            {"image": [[0.0, 1.0]], "label": 1},
            "(as in row 1) in each row of column `image`, got [[0.0, 1.0]]",
        ),
        (
            "regression",
            {"features": [1.0, 2.0], "target": 1.0},
            {"features": [1.0, None], "target": 1.0},
            "a list of 2 numbers (as in row 1) in each row of column `features`, got [1.0, None]",
        ),
        (
            "regression",
            {"features": [1.0, 2.0], "target": 1.0},
            {"features": [1.0, 2.0, 3.0], "target": 1.0},
            "2 numbers (as in row 1) in each row of column `features`, got [1.0, 2.0, 3.0]",
        ),
        (
            "regression",
            {"features": [1.0], "target": 1.0},
            {"features": [1.0], "target": "high"},
            "a finite number in each row of column `target`, got 'high'",
        ),
        (
            "supervised_tuning",
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": None},
            "a string (as in row 1) in each row of column `completion`, got an empty value (null)",
        ),
        (
            "supervised_tuning",
            {"prompt": ASKED, "completion": ANSWER},
            {"prompt": "a", "completion": ANSWER},
            "role and content (as in row 1) in each row of column `prompt`, got 'a'",
        ),
        (
            "supervised_tuning",
            {"messages": ASKED + ANSWER},
            {"messages": None},
            (
                "a list of messages with role and content (user and assistant in turn) in each row "
                "of column `messages`, got an empty value (null)"
            ),
        ),
        (
            "preference_tuning",
            {"chosen": "a", "rejected": "b"},
            {"chosen": "a", "rejected": 5},
            "a string (as in row 1) in each row of column `rejected`, got 5",
        ),
    ],
)
def test_a_wrong_value_is_named(tmp_path, task, good, bad, says):
    """The error names the column, the expected value, the value that was found, and the row."""
    message = refusal_of(tmp_path, task, [good, good, bad, good, good, good])

    assert re.fullmatch(r"r\.yaml:\d+: data: must have .*", message)
    assert f"{says} in row 3 (counted from 1), at {tmp_path}" in message
    assert message.endswith(".jsonl:3")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("task", "config", "rows", "says"),
    [
        (
            "sequence_classification",
            {"num_labels": 3},
            [{"text": "a", "label": n} for n in (0, 1, 0, 5, 4, 3)],
            r"at most 3 classes, as many as the model \(here \[0, 1, 5\]\), .*, got 4 in row 5 ",
        ),
        (
            "token_classification",
            {"id2label": {"0": "x", "1": "y"}},
            [WORDS, WORDS | {"labels": ["y", "z"]}],
            r"at most 2 classes, as many as the model \(here \['x', 'y'\]\), .* got 'z' in row 2 ",
        ),
        (
            "token_classification",
            {},
            [{"tokens": [], "labels": []}, WORDS, WORDS | {"labels": [1, 2]}],
            r"classes of one type, as in earlier rows \(\['x', 'y'\]\), .*, got 1 in row 3 ",
        ),
        (
            "sequence_classification",
            {},
            [{"text": "a", "label": "x"}] * 3,
            r"at least two classes, got \['x'\]",
        ),
    ],
)
def test_classes_that_a_model_cannot_have(tmp_path, task, config, rows, says):
    """The error names the first row with a class too many, and the number of classes."""
    message = refusal_of(tmp_path, task, rows, config=config)

    assert re.match(rf"r\.yaml:\d+: data: must have {says}", message), message


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([3], ".jsonl:3"),
        ([3, 5], ".jsonl:3; nor does row 5 fit"),
        ([2, 4, 6], ".jsonl:2; nor do 2 other rows fit: 4, 6"),
        (
            range(1, 15),
            ".jsonl:1; nor do 13 other rows fit: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more",
        ),
    ],
)
def test_all_wrong_rows_are_named(tmp_path, bad, says):
    """One error names them, the first with its value, so that they can be mended at once."""
    rows = [{"text": 5 if number in bad else "a"} for number in range(1, 15)]

    assert refusal_of(tmp_path, "causal_lm", rows).endswith(says)


def test_the_classes_of_held_out_rows_count(tmp_path):
    """Held-out rows and training rows together must not have more classes than the model."""
    rows = [{"text": "a", "label": n} for n in (0, 1)]
    held_out = [{"text": "a", "label": n} for n in (1, 2)]
    task, config = "sequence_classification", {"num_labels": 2}

    message = refusal_of(tmp_path, task, rows, held_out, config)
    assert "got 2 in row 2 (counted from 1) of the held-out rows" in message


@pytest.mark.parametrize(
    ("task", "row", "bad"),
    [
        ("sequence_classification", {"text": "a", "label": "y"}, {"text": "a", "label": "z"}),
        ("token_classification", WORDS, WORDS | {"labels": ["y", "z"]}),
    ],
)
def test_a_class_without_training_rows(tmp_path, task, row, bad):
    """A class that only held-out rows have is an error, unless the model has a number of them."""
    rows = [WORDS] if task == "token_classification" else [{"text": "a", "label": "x"}, row]
    column = "labels" if task == "token_classification" else "label"
    wanted = f"a class of the training rows, ['x', 'y'], in each row of column `{column}`"

    message = refusal_of(tmp_path, task, rows, [row, bad])
    assert f"must have {wanted}, got 'z' in row 2 (counted from 1) of the held-out" in message
    assert message.endswith("held_out.jsonl:2")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refusal_of(tmp_path, task, rows, [row, bad], {"num_labels": 3})


def test_listed_classes_stay():
    """A type that lists classes lists them for all rows, and in the same order in each part."""

    def part(values, *names):
        features = Features({"label": ClassLabel(names=list(names))})
        return Dataset.from_dict({"label": values}, features=features)

    classes = ClassCheck("label", None)
    classes.check(part([0, 1], "x", "y", "z"), {})
    classes.check(part([2], "x", "y", "z"), {}, is_closed=True)
    with pytest.raises(DataError, match=r"\['x', 'y', 'z'\], in held-out rows, got \['z', 'y'"):
        classes.check(part([2], "z", "y", "x"), {}, is_closed=True)


def test_a_class_that_the_type_does_not_list():
    """A row without a class, which has the number -1 by convention, is named."""
    features = Features({"label": ClassLabel(names=["x", "y"])})
    rows = Dataset.from_dict({"label": [0, 1, -1]}, features=features)

    ClassCheck("label", 2).check(rows.select([0, 1]), {})
    with pytest.raises(DataError, match=r"a class in \[0, 2\) .* got -1 in row 3"):
        ClassCheck("label", None).check(rows, {})
    with pytest.raises(DataError, match="at most 1 classes, as many as the model, got the type"):
        ClassCheck("label", 1).check(rows, {})


def test_images_are_compared_without_decoding_them(tmp_path):
    """Size and mode are read from the header, so that a damaged image of the size passes."""
    files = []
    for number, size in enumerate([(4, 2), (4, 2), (2, 4)]):
        files.append(str(tmp_path / f"{number}.png"))
        PIL.Image.new("RGB", size).save(files[-1])
    (tmp_path / "1.png").write_bytes((tmp_path / "0.png").read_bytes()[:-20])
    rows = Dataset.from_dict({"image": files}, features=Features({"image": Image()}))

    check_rows(rows.select([0, 1]), {"image": IMAGES}, {})
    with pytest.raises(DataError, match=r"4 x 2 pixels, mode RGB \(as in row 1\) .* in row 3"):
        check_rows(rows, {"image": IMAGES}, {})


def test_the_name_is_that_of_the_data(tmp_path):
    """The error has a renamed column's name in the file, and says that the row is held out."""
    good = {"review": "a"}
    rows, columns = [good] * 3, {"columns": {"text": "review"}}
    message = refusal_of(tmp_path, "causal_lm", rows, [good, {"review": None}], **columns)

    assert "of column `review`, got an empty value (null) in row 2" in message
    assert "of the held-out rows" in message


def test_a_first_row_that_is_wrong(tmp_path):
    """If the first row has a wrong type, the error names the first row."""
    rows = [{"features": 1.0, "target": 1.0}] * 3

    message = refusal_of(tmp_path, "regression", rows)
    assert "a list of numbers in each row of column `features`, got 1.0 in row 1" in message


def test_bytes_that_are_no_text(tmp_path):
    """A line that is not UTF-8 is an error that names the line."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "b"}\n')
    text = recipe_text(task="causal_lm", model=None, data=None)
    text += f"model: {json.dumps({'config': SMALL_LLAMA})}\n"
    text += f"data: {{type: json_lines, path: {file}}}\n"

    with pytest.raises(
        RecipeError,
        match=r"data\.path: must hold UTF-8 text, got the byte 0xe9 at .*rows.jsonl:2; ",
    ):
        build_trainer(parse_recipe(text, "r.yaml"))


def test_whole_numbers_are_numbers():
    """Integers, floats, class labels and rows in NumPy format are accepted."""
    numbers = Dataset.from_dict({"features": [[1.0, 2.0]] * 2, "target": [1, 2]})
    columns = {"features": NUMBERS, "target": NUMBER}
    check_rows(numbers.with_format("numpy"), columns, {})
    features = Features({"text": Value("large_string"), "label": ClassLabel(names=["x", "y"])})
    labelled = Dataset.from_dict({"text": ["a"], "label": [1]}, features=features)
    check_rows(labelled, {"text": TEXT, "label": LABEL}, {})
    check_rows(Dataset.from_dict({"text": []}), {"text": TEXT}, {})


def test_rows_that_are_left_out_may_be_wrong():
    """If rows are selected, only the selected rows are checked."""
    table = Dataset.from_dict({"text": ["a", None, "b"]})
    check_rows(table.select([0, 2]), {"text": TEXT}, {})

    with pytest.raises(DataError, match="row 2"):
        check_rows(table, {"text": TEXT}, {})
