"""A run that resumes with other data, or with another base model, says so, and only then."""

import json
import os

import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoConfig, AutoModelForSequenceClassification

from mfwrap.runner import parse_recipe, run_recipe
from mfwrap.runner.inputs import changed_inputs, input_facts
from mfwrap.runner.run import checked_rows
from support.ranks.recipes import resumed
from support.recipe_texts import BERT, VIT, recipe_text

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [{"features": [float(n), n % 3.0], "target": n % 7.0} for n in range(40)]
SAVED = {"save_strategy": "steps", "save_steps": 3}


def write(file, rows):
    """Write rows as JSON Lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text_of(folder, **sections):
    """Return the text of a recipe with data in files of the folder that the tests run in."""
    sections = {"data": {"type": "json_lines", "path": "rows.jsonl"}} | sections
    # A section replaces that of the recipe, whose keys are of another source and model.
    others = dict.fromkeys(sections)
    settings = recipe_text(**others, training=SAVED | {"output_dir": str(folder)})
    return settings + yaml.safe_dump(sections)


def said(text, **options):
    """Run a recipe, and return its warnings."""
    lines = []
    run_recipe(parse_recipe(text, "r.yaml"), say=lines.append, **options)
    return [line for line in lines if line.startswith("warning: ")]


def warning(names, folder):
    """Return the line that names what has changed."""
    return f"warning: {names} changed since {folder} was started; the run continues with it"


@pytest.mark.parametrize(
    ("change", "is_said"),
    [
        (lambda rows: rows, False),
        (lambda rows: rows[:-1], True),
        (lambda rows: rows[::-1], True),
        (lambda rows: [*rows, rows[0]], True),
        (lambda rows: [rows[0] | {"target": 9.0}, *rows[1:]], True),
    ],
    ids=["nothing", "fewer", "reversed", "more", "another value"],
)
def test_other_rows(tmp_path, monkeypatch, change, is_said):
    """Other rows are told once, with their file; a file that was only copied is not."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    folder = tmp_path / "run"
    assert said(text_of(folder)) == []

    write(tmp_path / "rows.jsonl", change(ROWS))
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    expected = [warning("data.path rows.jsonl", folder)] if is_said else []
    assert said(text_of(folder), resume=str(folder / "checkpoint-3")) == expected
    # The run has been started again with these rows.
    assert said(text_of(folder), resume=str(folder / "checkpoint-3")) == []


def test_held_out_rows_of_their_own(tmp_path, monkeypatch):
    """Each of both files is named if its own rows have changed."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "held"):
        write(tmp_path / f"{name}.jsonl", ROWS)
    data = {"type": "json_lines", "path": "rows.jsonl", "eval_path": "held.jsonl"}
    text, folder = text_of(tmp_path / "run", data=data), tmp_path / "run"
    said(text)

    write(tmp_path / "held.jsonl", ROWS[1:])
    resume = {"resume": str(folder / "checkpoint-3")}
    assert said(text, **resume) == [warning("data.eval_path held.jsonl", folder)]
    write(tmp_path / "rows.jsonl", ROWS[1:])
    assert said(text, **resume) == [warning("data.path rows.jsonl", folder)]


def test_a_run_of_another_folder_or_version(tmp_path, monkeypatch):
    """A run can be moved with its data; one that has no record of its data resumes silently."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    said(text_of(tmp_path / "run"))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("run", "rows.jsonl"):
        (tmp_path / name).rename(moved / name)
    monkeypatch.chdir(moved)
    resume = {"resume": str(moved / "run" / "checkpoint-3")}
    assert said(text_of(moved / "run"), **resume) == []

    facts = json.loads((moved / "run" / "run.json").read_text())
    del facts["inputs"]
    (moved / "run" / "run.json").write_text(json.dumps(facts))
    write(moved / "rows.jsonl", ROWS[1:])
    assert said(text_of(moved / "run"), **resume) == []


def test_the_place_of_images_does_not_count(tmp_path):
    """The folders in which images lie are those of a machine; names, order and classes count."""

    def facts(place, names):
        for index, name in enumerate(names):
            folder = tmp_path / place / "xy"[index % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4), index).save(folder / name)
        data = {"path": str(tmp_path / place)}
        text = recipe_text(task="image_classification", model=VIT, data=None)
        recipe = parse_recipe(text, "r.yaml", [f"data={json.dumps(data)}"])
        return input_facts(recipe, checked_rows(recipe), torch.nn.Module())

    names = [f"{number}.png" for number in range(6)]
    first = facts("a", names)
    assert set(first) == {"train", "held_out"}
    assert facts("b", names) == first
    assert facts("c", [*names[:-1], "other.png"]) != first


@pytest.mark.parametrize("has_head", [True, False])
def test_another_base_model(tmp_path, monkeypatch, has_head):
    """A checkpoint of an adapter does not have its base model, so another one is told."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [{"text": f"{n} {n % 3}", "label": n % 2} for n in range(40)])
    config = AutoConfig.for_model(**BERT["config"], num_labels=2 if has_head else 5)
    folder = tmp_path / "run"
    sections = {
        "task": "sequence_classification",
        "model": {"path": "base", "tokenizer": "bytes"},
        "peft": {"type": "lora", "r": 2, "target_modules": ["query"]},
        "data": {"type": "json_lines", "path": "rows.jsonl", "sequence_length": 16},
    }
    text = text_of(folder, **sections)
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_config(config)
    base.save_pretrained("base")
    said(text)
    resume = {"resume": str(folder / "checkpoint-3")}
    changes = [line for line in said(text, **resume) if "changed" in line]
    assert changes == []

    AutoModelForSequenceClassification.from_config(config).save_pretrained("base")
    changes = [line for line in said(text, **resume) if "changed" in line]
    assert changes == [warning("model.path base", folder)]


def test_one_rank_says_it(tmp_path, two_ranks):
    """Only rank 0 says so."""
    write(tmp_path / "rows.jsonl", ROWS)
    data = {"type": "json_lines", "path": str(tmp_path / "rows.jsonl")}
    text = text_of(tmp_path / "run", data=data)
    two_ranks.run(resumed, text, "")
    write(tmp_path / "rows.jsonl", ROWS[::-1])

    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    first, second = two_ranks.run(resumed, text, checkpoint)
    assert warning(f"data.path {tmp_path / 'rows.jsonl'}", tmp_path / "run") in first
    assert second == []


def test_damaged_facts(tmp_path):
    """A file that cannot be read is no reason to refuse the run; its owner says what is wrong."""
    (tmp_path / "run.json").write_text("{")
    recipe = parse_recipe(recipe_text(), "r.yaml")
    assert changed_inputs(recipe, tmp_path, {"train": {"rows": 1}}) == []
