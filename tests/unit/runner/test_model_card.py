"""A recipe writes a card with each model, from which the model can be used."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard

from mfwrap.recipes.data.library import DatasetsSource
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.runner import parse_recipe, run_recipe
from mfwrap.runner.model_card import FinishedRun, shared_settings, write_recipe_card
from mfwrap.runner.run import build_trainer
from support.recipe_texts import BERT, SMALL_LLAMA, VIT, recipe_text
from support.versions import needs

# Ignore the warnings of PEFT, TRL and the pipelines of transformers.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = {"per_device_train_batch_size": 4, "max_steps": 2}


def run(folder, *overrides, resume=False, **sections):
    """Run a recipe into a folder, and return the folder."""
    text = recipe_text(**sections)
    recipe = parse_recipe(text, "r.yaml", [*overrides, f"training.output_dir={folder}"])
    run_recipe(recipe, resume=resume)
    return folder


def card_of(folder) -> ModelCard:
    """Return the card in a model's folder."""
    return ModelCard.load(folder / "README.md")


def results_in(card) -> dict[str, float]:
    """Return the results in the front matter of a card."""
    return {one.metric_type: one.metric_value for one in card.data.eval_results}


def code_in(card) -> str:
    """Return the Python code in a card."""
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    return code


@pytest.fixture
def printed_by(monkeypatch, capsys):
    """Return a function that runs code in a model's folder, and returns what it prints."""

    def run_code(code, folder) -> str:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        exec(compile(code, "README.md", "exec"), {})  # noqa: S102  (the card has just been written)
        return capsys.readouterr().out

    return run_code


def test_results_of_raw_and_averaged_weights(tmp_path):
    """Each card has the results of its weights in its front matter, and both in its table."""
    run(tmp_path, ema={"decay": 0.5})
    metrics = json.loads((tmp_path / "result.json").read_text())["metrics"]
    raw, averaged = (card_of(tmp_path / name) for name in ("model", "model_ema"))

    for card, prefix in ((raw, "eval_"), (averaged, "ema_eval_")):
        expected = {name: metrics[f"{prefix}{name}"] for name in ("loss", "mse", "r2")}
        assert results_in(card) == expected
        row = f"| `loss` | {metrics['eval_loss']:.6g} | {metrics['ema_eval_loss']:.6g} |"
        assert row in re.sub(" +", " ", card.text)
    assert raw.data.model_name == "r"
    assert averaged.data.model_name == "r (averaged weights)"
    assert {one.dataset_type for one in raw.data.eval_results} == {"diabetes"}
    assert "scikit-learn's diabetes study" in raw.text
    assert "64 examples to train on and 16 examples held out" in raw.text


def test_the_recipe_in_a_card_trains_the_same_model(tmp_path):
    """The recipe in a card, copied to a file, gives a model with the same weights and card."""
    first = run(tmp_path / "first", "training.learning_rate=3e-3") / "model"
    (block,) = re.findall(r"```yaml\n(.*?)```", card_of(first).text, re.DOTALL)
    assert "output_dir" not in block
    recipe = parse_recipe(block, "r.yaml", [f"training.output_dir={tmp_path / 'again'}"])
    run_recipe(recipe)

    for name in ("model.safetensors", "README.md"):
        assert (tmp_path / "again" / "model" / name).read_bytes() == (first / name).read_bytes()


def test_a_resumed_run_writes_the_same_bytes(tmp_path):
    """A card has nothing that differs between a run and a run that was resumed elsewhere."""
    sections = {"training": {"save_strategy": "steps", "save_steps": 3}, "ema": {"decay": 0.9}}
    whole = run(tmp_path / "whole", **sections)
    parts = run(tmp_path / "parts", **sections)
    run(parts, resume=str(parts / "checkpoint-3"), **sections)

    for name in ("model", "model_ema"):
        cards = [(folder / name / "README.md").read_bytes() for folder in (whole, parts)]
        assert cards[0] == cards[1]


def test_a_card_has_no_folder_of_the_machine(tmp_path):
    """Absolute paths are shortened to their last part."""
    rows = [{"features": [float(n), 1.0], "target": float(n)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"type": "json_lines", "path": str(tmp_path / "rows.jsonl")}
    run(tmp_path / "run", f"data={json.dumps(data)}")
    text = (tmp_path / "run" / "model" / "README.md").read_text()

    assert str(tmp_path) not in text
    assert "`rows.jsonl`" in text
    assert "path: rows.jsonl" in text


def test_a_run_without_evaluation(tmp_path):
    """Without held-out rows, a card has neither results nor a table."""
    run(tmp_path, "data.eval_fraction=0")
    card = card_of(tmp_path / "model")

    assert card.data.eval_results is None
    assert "## Results" not in card.text


CASES = {
    "causal_lm": (SMALL_LLAMA, "docstrings", "text-generation", "generated_text"),
    "sequence_classification": (BERT["config"], "docstrings", "text-classification", "score"),
    "token_classification": (BERT["config"], "python_tokens", "token-classification", "score"),
    "image_classification": (VIT["config"], "digits", "image-classification", ""),
    "regression": (None, "diabetes", "tabular-regression", ""),
}


QUICK, IMAGES = {"causal_lm", "regression"}, "image_classification"
WITHOUT_TORCHVISION = needs("transformers", "5.20", "image processors without Torchvision")


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(
            n, marks=[pytest.mark.slow] * (n not in QUICK) + [WITHOUT_TORCHVISION] * (n == IMAGES)
        )
        for n in CASES
    ],
)
def test_the_code_in_a_card_runs(tmp_path, printed_by, task):
    """The code in a card runs in the folder of the model, and the front matter names the task."""
    config, data, tag, prints = CASES[task]
    sections = {"data": {"type": data, "max_train_samples": 16, "max_eval_samples": 4}}
    if config is not None:
        sections["model"] = {"config": config}
    run(tmp_path, task=task, training=TEXTS, ema={"decay": 0.5}, **sections)
    for name in ("model", "model_ema"):
        card = card_of(tmp_path / name)
        assert card.data.pipeline_tag == tag
        assert {"mfwrap", "generated_from_trainer", task} <= set(card.data.tags)
        assert re.search(prints, printed_by(code_in(card), tmp_path / name))


@WITHOUT_TORCHVISION
def test_how_an_image_is_prepared(tmp_path, printed_by):
    """The card says how pixels are scaled, and its code gets the class of an image."""
    data = {"type": "digits", "max_train_samples": 16, "max_eval_samples": 4}
    run(tmp_path, task="image_classification", model=VIT, data=data, training=TEXTS)
    card = card_of(tmp_path / "model")

    assert (
        "An image must have 8 x 8 pixels. Its pixels, from 0 to 255, are multiplied by 0.00392157 "
        "and then reduced by the mean 0.5 and divided by the deviation 0.5."
    ) in card.text
    assert printed_by(code_in(card), tmp_path / "model").strip() in map(str, range(10))


@pytest.fixture
def card_with(tmp_path):
    """Return a function that writes the card of a language model after no update."""
    sections = {"task": "causal_lm", "model": {"config": SMALL_LLAMA}, "training": TEXTS,
                "data": {"type": "docstrings", "max_train_samples": 16}}  # fmt: skip
    recipe = parse_recipe(recipe_text(**sections), "r.yaml", [f"training.output_dir={tmp_path}"])
    trainer, _ = build_trainer(recipe)

    def card_with(metrics=None, *, chats=False, rows=(), repository=None, name="model", **settings):
        trainer.train_dataset = Dataset.from_list(list(rows))
        trainer.processing_class.chat_template = "{{ messages }}" if chats else None
        if repository:
            trainer.hub_model_id = repository
            settings["arguments"] = dataclasses.replace(recipe.arguments, push_to_hub=True)
        finished = FinishedRun(
            dataclasses.replace(recipe, **settings), trainer, None, metrics or {}
        )
        write_recipe_card(finished, name, tmp_path)
        return card_of(tmp_path)

    return card_with


def test_names_on_the_hub(tmp_path, card_with):
    """Base model and data sets are named; other entries of an earlier front matter are kept."""
    text = "---\nlicense: mit\nbase_model: /home/me\ntags: [a, base_model:adapter:x]\n---\n"
    (tmp_path / "README.md").write_text(text)
    card = card_with(
        {"eval_accuracy": 0.5, "eval_loss": math.nan, "eval_r2": -math.inf, "eval_entropy": 9.0},
        model=ModelSettings(path="org/base"),
        data=DatasetsSource(path="org/data", name="en"),
    )
    found = card.data.to_dict()

    assert found["license"] == "mit"
    assert found["base_model"] == "org/base"
    assert found["datasets"] == ["org/data"]
    tags = ["a", "base_model:adapter:x", "causal_lm", "generated_from_trainer", "mfwrap"]
    assert found["tags"] == tags
    (result,) = found["model-index"][0]["results"]
    data_set = {"name": "org/data", "type": "org/data", "config": "en", "split": "train"}
    assert result["dataset"] == data_set
    assert [one["type"] for one in result["metrics"]] == ["accuracy"]
    assert "| `loss` | nan" in re.sub(" +", " ", card.text)
    assert "[org/base](https://huggingface.co/org/base)" in card.text
    assert "[org/data](https://huggingface.co/datasets/org/data)" in card.text


def test_a_chat_has_messages(card_with):
    """A model that was trained on conversations is asked with messages."""
    base = ModelSettings(path="org/base")

    assert '"role": "user"' not in card_with(model=base).text
    assert '"role": "user"' in card_with(chats=True, model=base).text


@pytest.mark.parametrize(
    ("row", "is_chat"),
    [
        ({"prompt": "3 + 3 = ", "answer": "6"}, False),
        ({"text": "a story"}, False),
        ({"prompt": [{"role": "user", "content": "3 + 3"}]}, True),
        ({"prompt": "not used", "messages": [{"role": "user", "content": "3 + 3"}]}, True),
    ],
)
def test_a_chat_model_that_has_learned_from_texts(card_with, row, is_chat):
    """It is asked with a text, because no chat template was applied."""
    card = card_with(chats=True, model=ModelSettings(path="org/base"), rows=[row])

    assert ('"role": "user"' in card.text) == is_chat


def test_the_place_of_a_model(card_with):
    """A model is loaded from its repository and folder there, or from its own folder."""
    on_disk = card_with(name="model_ema").text
    assert 'from_pretrained(".")' in on_disk
    assert "in the folder of the model" in on_disk

    pushed = card_with(name="model_ema", repository="user/name")
    assert 'from_pretrained("user/name", subfolder="model_ema")' in pushed.text
    assert "in the folder of the model" not in pushed.text
    assert "# name (averaged weights)" in pushed.text
    assert 'from_pretrained("user/name")' in card_with(repository="user/name").text


def test_settings_for_others():
    """Names of folders, and settings of the machine and the output, are left out."""
    given = {
        "training": {"output_dir": "x", "hub_model_id": "user/run", "learning_rate": 0.1},
        "data": {"path": ["/home/me/a.csv", "b.csv"]},
    }

    assert shared_settings(given) == {
        "training": {"learning_rate": 0.1},
        "data": {"path": ["a.csv", "b.csv"]},
    }
    assert json.dumps(given).count("/home/me") == 1  # unchanged
    assert shared_settings({"task": "regression", "training": None})["training"] is None
    assert shared_settings({"task": "regression"}) == {"task": "regression"}


def test_only_models_have_cards(tmp_path):
    """TRL writes no card into the run folder and its checkpoints, and a file of the user stays."""
    (tmp_path / "README.md").write_text("# My run\n")
    saves = {"save_strategy": "steps", "save_steps": 1, "max_length": 256}
    run(tmp_path, task="supervised_tuning", model={"config": SMALL_LLAMA}, training=TEXTS | saves,
        data={"type": "docstrings", "max_train_samples": 16})  # fmt: skip
    cards = {str(file.parent.relative_to(tmp_path)) for file in tmp_path.rglob("README.md")}

    assert (tmp_path / "checkpoint-2").is_dir()
    assert cards == {".", "model"}
    assert (tmp_path / "README.md").read_text() == "# My run\n"


@pytest.fixture
def base(tmp_path):
    """Return a folder with a small language model."""
    run(tmp_path / "first", task="causal_lm", model={"config": SMALL_LLAMA}, training=TEXTS,
        data={"type": "docstrings", "max_train_samples": 16})  # fmt: skip
    return (tmp_path / "first" / "model").rename(tmp_path / "base")


def train_adapter(folder, base, task="causal_lm"):
    """Train an adapter of the model in a folder, and return the adapter's card."""
    data = {"type": "docstrings", "max_train_samples": 16}
    if task == "supervised_tuning":
        data = {"type": "json_lines", "path": str(base.parent / "rows.jsonl")}
        rows = [{"prompt": f"{n} and {n}", "completion": f" is {2 * n}"} for n in range(20)]
        (base.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(
        folder,
        f"model={json.dumps({'path': str(base)})}",
        f"data={json.dumps(data)}",
        task=task,
        training=TEXTS | ({"max_length": 32} if task == "supervised_tuning" else {}),
        peft={"type": "lora", "r": 2, "target_modules": ["q_proj"]},
    )
    return card_of(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", "supervised_tuning"])
def test_the_code_for_an_adapter_runs(tmp_path, printed_by, base, task):
    """The card of an adapter names PEFT and loads the adapter with its base model."""
    folder = tmp_path / task
    card = train_adapter(folder, base, task)

    assert card.data.library_name == "peft"
    assert card.data.base_model is None  # a folder of this machine
    assert str(tmp_path) not in str(card)
    assert {"lora", "mfwrap"} <= set(card.data.tags)
    assert ({"sft", "trl"} <= set(card.data.tags)) is (task == "supervised_tuning")
    assert "\nA LoRA adapter of a `LlamaForCausalLM`: " in card.text
    assert "generated_text" in printed_by(code_in(card), folder / "model")


def test_an_adapter_of_a_relative_path(tmp_path, printed_by, base, monkeypatch):
    """The code finds a base model whose path is relative to the folder of the training.

    If no such path leads from the adapter to its base model, the card says what to replace.
    """
    monkeypatch.chdir(tmp_path)
    relative = train_adapter(Path("runs", "chats"), Path(base.name))
    elsewhere = train_adapter(tmp_path / "run", Path(base.name)).text

    assert "base model was in the folder `base`, where the training was started" in relative.text
    assert 'from_pretrained("../../../base")' in relative.text
    assert "generated_text" in printed_by(code_in(relative), Path("runs", "chats", "model"))
    assert 'replace `"base"` by the path of its folder' in elsewhere
    assert 'from_pretrained("base")' in elsewhere
    assert str(tmp_path) not in elsewhere


@pytest.mark.slow
def test_an_adapter_of_random_weights(tmp_path):
    """The card of an adapter whose base model is not saved says that it cannot be used."""
    run(tmp_path, task="causal_lm", model={"config": SMALL_LLAMA}, training=TEXTS,
        data={"type": "docstrings", "max_train_samples": 16},
        peft={"type": "lora", "r": 2, "target_modules": ["q_proj"]})  # fmt: skip
    text = card_of(tmp_path / "model").text

    assert "cannot be used on its own" in text
    assert "```python" not in text
    assert "Its base model was built with random weights." in text


def test_the_front_matter_is_plain_yaml(tmp_path):
    """The front matter is YAML that any reader understands."""
    text = (run(tmp_path) / "model" / "README.md").read_text()
    found = yaml.safe_load(text.split("---\n")[1])

    assert found["library_name"] == "mfwrap"
    assert found["model-index"][0]["results"][0]["task"] == {"type": "tabular-regression"}
