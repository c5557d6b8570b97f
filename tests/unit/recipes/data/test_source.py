"""What a recipe's data become: rows from every source, and what the model is to predict of them."""

import asyncio.base_events
import inspect
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict

from mfwrap.recipe import RecipeError, parse_recipe
from mfwrap.recipe.run import build_trainer
from support.recipe_texts import SMALL_LLAMA, recipe_text

# What TRL and datasets warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

LANGUAGE = {"config": SMALL_LLAMA, "tokenizer": "bytes"}
ENDS = "<|end|>"


def recipe_of(task, data, *overrides, model=None, **training):
    """Return a small recipe of a task with a section ``data``."""
    text = recipe_text(task=task, model=None, data=None, training=training)
    sections = {"model": model or LANGUAGE, "data": data}
    lines = [f"{name}: {json.dumps(section)}\n" for name, section in sections.items()]
    return parse_recipe(text + "".join(lines), "r", overrides)


def trainer_of(*arguments, **keywords):
    """Return the Trainer of such a recipe."""
    return build_trainer(recipe_of(*arguments, **keywords))[0]


@pytest.fixture
def json_lines(tmp_path, monkeypatch):
    """Return what writes rows to a file and returns the section of them."""
    monkeypatch.chdir(tmp_path)

    def write(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
        return {"type": "json_lines", "path": name, "eval_fraction": 0.5}

    return write


def targets(trainer) -> list[str]:
    """Return the texts of what is to be predicted, row by row of the first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    decode = trainer.processing_class.decode
    labels = batch["labels"].tolist()
    return [decode([token for token in row if token != -100]) for row in labels]


def test_prompts_are_masked(json_lines):
    """Of a prompt and a completion the completion alone is to be predicted."""
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {n + n}"} for n in range(8)]
    trainer = trainer_of("supervised_tuning", json_lines(rows), max_length=32)

    assert set(targets(trainer)) <= {f" {n + n}{ENDS}" for n in range(8)}


def test_without_a_mask_prompts_are_predicted_too(json_lines):
    """``completion_only_loss: false`` is heeded."""
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {n + n}"} for n in range(8)]
    section = json_lines(rows)
    trainer = trainer_of("supervised_tuning", section, max_length=32, completion_only_loss=False)

    assert all(" and " in text for text in targets(trainer))


def test_the_assistants_words_alone(json_lines):
    """Conversations go through the chat template, which marks what the assistant says."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": f"{n}+{n}?"},
                {"role": "assistant", "content": f"It is {n + n}."},
            ]
        }
        for n in range(8)
    ]
    section = json_lines(rows)
    trainer = trainer_of("supervised_tuning", section, max_length=64, assistant_only_loss=True)
    inputs = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])

    assert inputs.startswith("<|system|>Add.<|reply|><|user|>")
    assert set(targets(trainer)) <= {f"It is {n + n}.{ENDS}" for n in range(8)}


def test_trl_packs(json_lines):
    """``training.packing`` puts texts behind each other."""
    rows = [{"text": f"text number {n}"} for n in range(40)]
    section = json_lines(rows)
    strategy = {"packing": True, "packing_strategy": "wrapped", "max_length": 48}
    packed = trainer_of("supervised_tuning", section, **strategy)
    plain = trainer_of("supervised_tuning", section, max_length=48)
    lengths = [len(row["input_ids"]) for row in packed.train_dataset]

    assert set(lengths[:-1]) == {48}
    assert sum(lengths) == sum(len(row["input_ids"]) for row in plain.train_dataset)


@pytest.mark.parametrize("packing", [False, True])
def test_causal_lm_packs(json_lines, packing):
    """``data.packing`` cuts the concatenation of all texts; without it, each text."""
    texts = ["a" * 20, "b" * 50, "c" * 7, "d" * 33]
    section = json_lines([{"text": text} for text in texts]) | {
        "eval_fraction": 0,
        "sequence_length": 16,
        "packing": packing,
    }
    rows = trainer_of("causal_lm", section).train_dataset["input_ids"]
    lengths = [len(row) for row in rows]

    if packing:
        # Each text ends with a mark; what is left over is dropped.
        assert lengths == [16] * (sum(len(text) + 1 for text in texts) // 16)
    else:
        assert lengths == [16, 5, 16, 16, 16, 3, 8, 16, 16, 2]


def test_an_adapter_alone_is_trained(json_lines):
    """With ``peft`` the weights of the model are frozen."""
    rows = [{"prompt": "a", "completion": "b"}] * 8
    trainer = trainer_of(
        "supervised_tuning", json_lines(rows), "peft={type: lora, r: 2, target_modules: [q_proj]}"
    )
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]

    assert trained
    assert all("lora_" in name for name in trained)


def test_preferences_begin_from_the_reference(json_lines):
    """The reference of preference tuning has the model's weights, and keeps them."""
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8
    trainer = trainer_of("preference_tuning", json_lines(rows), max_length=16, beta=0.1)
    pairs = zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True)

    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert all(theirs is not ours for ours, theirs in pairs)
    assert not trainer.ref_model.training


SMALL_TYPES = {
    "bert": {"max_position_embeddings": 32},
    "roberta": {"max_position_embeddings": 34, "pad_token_id": 1},
    "distilbert": {"max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", SMALL_TYPES)
def test_sequences_fit_the_positions(json_lines, kind):
    """Longer ones than a model has positions are refused; by default they are cut to these."""
    section = json_lines([{"text": "a" * 100, "label": n % 2} for n in range(4)])
    config = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    arguments = {"model": {"config": {"model_type": kind} | config | SMALL_TYPES[kind]}}
    says = (
        r"data\.sequence_length: must be <= 32, .*max_position_embeddings 3\d\), got 33 \(r:\d+\)"
    )
    with pytest.raises(RecipeError, match=says):
        recipe_of("sequence_classification", section | {"sequence_length": 33}, **arguments)

    recipe_of("sequence_classification", section | {"sequence_length": 32}, **arguments)
    trainer = trainer_of("sequence_classification", section, **arguments)
    assert {len(row["input_ids"]) for row in trainer.train_dataset} == {32}
    batch = next(iter(trainer.get_train_dataloader()))
    assert torch.isfinite(trainer.model(**batch).loss)


def test_rotary_positions_go_on(json_lines):
    """A Llama has no table of positions: its sequences may be longer than it says."""
    section = json_lines([{"text": "a" * 100}] * 4) | {"sequence_length": 90}
    trainer = trainer_of("causal_lm", section)

    assert max(map(len, trainer.train_dataset["input_ids"])) == 90
    batch = next(iter(trainer.get_train_dataloader()))
    assert torch.isfinite(trainer.model(**batch).loss)


def test_the_positions_of_a_checkpoint(json_lines, tmp_path):
    """They are known when it is loaded, and the error is the recipe's all the same."""
    section = json_lines([{"text": "abc"}] * 4)
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    trainer = trainer_of("causal_lm", section, model={"config": config, "tokenizer": "bytes"})
    trainer.save_model(str(tmp_path / "m"))
    model = {"path": str(tmp_path / "m")}

    says = r"data\.sequence_length: must be <= 24, .* \(r:\d+\)"
    with pytest.raises(RecipeError, match=says):
        trainer_of("causal_lm", section | {"sequence_length": 25}, model=model)


def test_text_files(tmp_path, monkeypatch):
    """A row is a line, or with ``rows_are: files`` a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.txt").write_text("four\n")
    section = {"type": "text", "path": "a.txt", "eval_path": "b.txt"}
    lines = recipe_of("causal_lm", section).data.rows()
    files = recipe_of("causal_lm", section | {"rows_are": "files"}).data.rows()

    assert lines.train["text"][:] == ["one", "two", "three"]
    assert lines.evaluation["text"][:] == ["four"]
    assert files.train["text"][:] == ["one\ntwo\nthree\n"]


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("path", b'{"text": "b"'),
        ("path", b"5"),
        ("eval_path", b'{"text": "b"}}'),
    ],
)
def test_a_bad_line_is_named(tmp_path, capfd, key, bad):
    """A line that is no JSON object is named: key, file, number. The library says nothing."""
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("path", "eval_path")}
    rows = [b'{"text": "a"}', b"", b'{"text": "c"}']
    for name, file in files.items():
        lines = [*rows[:2], bad, rows[2]] if name == key else rows
        Path(file).write_bytes(b"\n".join(lines) + b"\n")
    recipe = recipe_of("causal_lm", {"type": "json_lines", **files})

    says = rf"data\.{key}: must hold one JSON object per line, got line 3 of '.*/{key}\.jsonl'"
    with pytest.raises(RecipeError, match=says):
        build_trainer(recipe)
    assert "JSON" not in capfd.readouterr().err


def test_rows_that_are_not_of_one_form(tmp_path, monkeypatch):
    """What else the library refuses is a recipe's error, with what it says of the reason."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    Path("other.jsonl").write_text('{"text": "a", "more": 1}\n')
    section = {"type": "json_lines", "path": ["rows.jsonl", "other.jsonl"]}

    with pytest.raises(
        RecipeError, match=r"data\.path: must hold rows with the same columns.*more"
    ):
        build_trainer(recipe_of("causal_lm", section))


def test_datasets_of_a_folder(tmp_path):
    """What ``save_to_disk`` has written is read, by split, with columns of the task's names."""
    parts = {
        name: Dataset.from_dict({"body": [f"{name} {n}" for n in range(4)]})
        for name in ("train", "validation")
    }
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    section = {
        "type": "datasets",
        "path": str(tmp_path / "saved"),
        "eval_split": "validation",
        "columns": {"text": "body"},
        "max_train_samples": 2,
    }
    rows = recipe_of("causal_lm", section).data.rows()

    assert rows.train["text"][:] == ["train 0", "train 1"]
    assert rows.evaluation["text"][:] == [f"validation {n}" for n in range(4)]


def test_docstrings_of_packages():
    """Each docstring is there once, with its package."""
    section = {"type": "package_docstrings", "most_of_a_package": 5, "eval_fraction": 0}
    data = recipe_of("sequence_classification", section, model={"config": {"model_type": "bert"}})
    rows = data.data.rows().train
    found = dict(zip(rows["text"], rows["label"], strict=True))

    assert len(found) == len(rows)
    assert list(found.values()).count("asyncio") == 5
    assert found[inspect.cleandoc(asyncio.base_events.__doc__)] == "asyncio"


def test_a_checkpoint_that_a_package_carries(tmp_path, monkeypatch):
    """``package:name/folder`` is found without importing the package."""
    folder = tmp_path / "carries_a_checkpoint" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    trainer_of("causal_lm", {"type": "python_topics"}).save_model(str(folder))
    monkeypatch.syspath_prepend(tmp_path)
    model = {"path": "package:carries_a_checkpoint/model"}
    trainer = trainer_of("causal_lm", {"type": "python_topics"}, model=model)

    assert trainer.model.config.hidden_size == SMALL_LLAMA["hidden_size"]
    assert len(trainer.processing_class) == 261


@pytest.mark.parametrize("name", ["package:no_such_package/m", "package:json/none", "package:../x"])
def test_a_package_without_it(name):
    """An error names the key."""
    model = {"path": name}
    with pytest.raises(RecipeError, match=r"model\.path: must be a folder of an installed"):
        recipe_of("causal_lm", {"type": "python_topics"}, model=model)
