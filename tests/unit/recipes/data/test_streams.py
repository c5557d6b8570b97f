"""Streamed rows are read in order, checked as they are read, and trained on like other rows."""

import json

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file

from mfwrap.recipes.data.source import DataError
from mfwrap.recipes.data.streams import checked, column_names, held_out_rows, renamed
from mfwrap.runner import RecipeError, run_recipe
from mfwrap.runner.run import checked_rows
from support.recipe_data import recipe_of, trainer_of
from support.recipe_texts import BERT, PERCEPTRON, VIT

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


def stream(number=10):
    """Return a stream of texts, whose columns are not known beforehand."""
    return IterableDataset.from_generator(lambda: ({"body": f"row {n}"} for n in range(number)))


def section(folder, rows, **keys):
    """Write rows to a file, and return the section ``data`` that streams them."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return {
        "type": "datasets",
        "path": "json",
        "data_files": str(file),
        "streaming": True,
        **keys,
    }


def texts(number=12, **columns):
    """Return rows with a text and other columns."""
    return [{"text": f"text {n} " * 9, **columns} for n in range(number)]


def test_columns():
    """Columns are found in the first row and renamed; a missing one is an error."""
    assert column_names(stream()) == ["body"]
    assert next(iter(renamed(stream(), {"text": "body"}))) == {"text": "row 0"}
    with pytest.raises(ValueError, match=r"`columns` must have values among \['body'\], got"):
        renamed(stream(), {"text": "bodi"})
    with pytest.raises(ValueError, match=r"`columns\.text` must be one column, because rows are"):
        renamed(stream(), {"text": ["body"]})


def test_held_out_rows_are_the_first():
    """The first rows are read, or all of them."""
    assert held_out_rows(stream(), 2)["body"][:] == ["row 0", "row 1"]
    assert len(held_out_rows(stream(), None)) == 10


def test_rows_are_checked_as_they_are_read():
    """The check sees rows in blocks, and its error has the number of the row in the stream."""
    seen = []

    def check(rows: Dataset) -> None:
        seen.append(len(rows))
        if "row 130" in rows["body"]:
            msg = "`data` must be good, got bad in row 31 (counted from 1)"
            raise DataError(msg, 31)

    rows = iter(checked(stream(250), check))
    assert next(rows) == {"body": "row 0"}
    assert seen == [100]
    with pytest.raises(DataError, match=r"got bad in row 131 \(counted from 1\)"):
        list(rows)


def test_rows_arrive_in_order(tmp_path):
    """The Trainer gets the rows of a file in their order, after the held-out rows."""
    keys = section(tmp_path, texts(), max_eval_samples=2, max_train_samples=6)
    trainer = trainer_of("causal_lm", keys, max_steps=2, per_device_train_batch_size=3)
    decode = trainer.processing_class.decode
    batches = [decode(ids) for b in trainer.get_train_dataloader() for ids in b["input_ids"]]

    assert [text.partition(" t")[0] for text in batches] == [f"text {n}" for n in range(2, 8)]
    assert [decode(row["input_ids"])[:6] for row in trainer.eval_dataset] == ["text 0", "text 1"]


def test_a_buffer_shuffles(tmp_path):
    """With a buffer, all rows arrive in another order, which the seed decides."""
    orders = []
    for seed in (1, 1, 2):
        keys = section(tmp_path, texts(), shuffle_buffer=8, split_seed=seed)
        rows = checked_rows(recipe_of("causal_lm", keys, max_steps=1)).train
        orders.append([row["text"] for row in rows])

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(row["text"] for row in texts())


@pytest.mark.parametrize(
    ("task", "row", "model", "training"),
    [
        ("causal_lm", {"text": "some text"}, None, {}),
        ("sequence_classification", {"text": "a", "label": 1}, BERT, {}),
        ("token_classification", {"tokens": ["a", "b"], "labels": [0, 1]}, BERT, {}),
        ("image_classification", {"image": [[0.5] * 8] * 8, "label": 1}, VIT, {}),
        ("regression", {"features": [1.0, 2.0], "target": 1.5}, PERCEPTRON, {}),
        ("supervised_tuning", {"prompt": "a", "completion": "b"}, None, {"max_length": 32}),
        (
            "preference_tuning",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            None,
            {"max_length": 32},
        ),
    ],
)
def test_all_tasks(tmp_path, task, row, model, training):
    """Each task trains on a stream; classes are numbers below that of the model."""
    overrides = ["model.config.num_labels=2"] if "label" in row or "labels" in row else []
    keys = section(tmp_path, [row] * 8, max_eval_samples=2)
    training |= {"max_steps": 2, "output_dir": str(tmp_path / "run")}
    result = run_recipe(recipe_of(task, keys, *overrides, model=model, **training))

    assert result.metrics["eval_loss"] > 0


def test_a_resumed_run_is_exact(tmp_path):
    """A run over a shuffled stream that is resumed ends with the same bits."""
    keys = section(tmp_path, texts(40), shuffle_buffer=8)
    training = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    weights = []
    for name in ("whole", "resumed"):
        recipe = recipe_of("causal_lm", keys, output_dir=str(tmp_path / name), **training)
        if name == "resumed":
            (tmp_path / name).mkdir()
            (tmp_path / "whole" / "checkpoint-4").rename(tmp_path / name / "checkpoint-4")
        run_recipe(recipe, resume=name == "resumed")
        weights.append(load_file(tmp_path / name / "model" / "model.safetensors"))

    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_null_ends_the_run(tmp_path):
    """A null in the middle of a stream ends the run with an error that names the row."""
    rows = [*texts(120), {"text": None}]
    keys = section(tmp_path, rows)
    recipe = recipe_of("causal_lm", keys, max_steps=40, output_dir=str(tmp_path / "run"))
    says = r"must have a string .* got an empty value \(null\) in row 121 "
    with pytest.raises(DataError, match=says):
        run_recipe(recipe)


@pytest.mark.parametrize(
    ("keys", "training", "says"),
    [
        ({}, {"max_steps": -1}, r"training\.max_steps: expected a number of updates, because"),
        ({"shuffle_buffer": 1}, {}, r"data\.shuffle_buffer: must be >= 2, got 1"),
        ({"streaming": False, "shuffle_buffer": 9}, {}, "shuffle_buffer: needs `streaming: true`"),
        (
            {"loss_by": "text"},
            {},
            "loss_by: needs rows with an index, which streamed rows",
        ),
        ({"row_losses": True}, {}, "row_losses: needs rows with an index, which streamed rows"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, keys, training, says):
    """A stream has no length, and only a stream has a buffer."""
    with pytest.raises(RecipeError, match=says):
        recipe_of("causal_lm", section(tmp_path, texts(), **keys), **training)


def test_classes_must_be_known(tmp_path):
    """A stream is not read beforehand, so its classes must be known."""
    keys = section(tmp_path, texts(label="good"))
    with pytest.raises(RecipeError, match="data: must say its classes, because a stream is not"):
        trainer_of("sequence_classification", keys, model=BERT, max_steps=1)
