"""MFTrainer extends the cards of the stock Trainer, TRL and PEFT, and writes one with a model."""

import json
import math
import re

import pytest
import yaml
from datasets import Dataset
from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from mfwrap import StepConfig
from mfwrap.callbacks import EMACallback
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from mfwrap.trainer.model_card import (
    CardFacts,
    Evaluation,
    evaluation_results,
    front_matter,
    results_table,
    shared_settings,
)
from support.hub import TOKEN, client_of, serving
from support.small_llama import small_llama
from support.trainer_runs import new_trainer, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and PEFT


def card_of(folder) -> ModelCard:
    """Return the card in a folder."""
    return ModelCard.load(folder / "README.md")


def trained(kind, folder, extras=None, **arguments):
    """Return a trainer after two updates with an evaluation."""
    evaluates = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = new_trainer(kind, folder, extras=extras, **evaluates | arguments)
    trainer.train()
    return trainer


def test_a_saved_model_has_a_card(tmp_path):
    """`save_model` writes a card with settings and results; a checkpoint has none."""
    settings = {"save_strategy": "steps", "save_steps": 2, "hub_token": TOKEN}
    trainer = trained(
        MFTrainer, tmp_path / "run", {"step": StepConfig(local_norm=True)}, **settings
    )
    trainer.save_model(str(tmp_path / "model"))
    card = card_of(tmp_path / "model")
    (block,) = [one.partition("```")[0] for one in card.text.split("```yaml\n")[1:]]
    settings = yaml.safe_load(block)

    assert settings["training"]["max_steps"] == 2
    assert settings["step"] == {"local_norm": True}
    assert not {"output_dir", "hub_token", "weight_decay"} & settings["training"].keys()
    assert card.data.library_name == "transformers"
    loss = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one][-1]
    assert [(one.metric_type, one.metric_value) for one in card.data.eval_results] == [
        ("loss", loss)
    ]
    assert "`MFTrainer` made 2 updates" in card.text
    assert TOKEN not in str(card)
    assert not (tmp_path / "run" / "checkpoint-2" / "README.md").exists()


def results_in(card):
    """Return the heading of the table of results, the loss in it, and the loss for the hub."""
    table = re.search(r"\| metric \| (.+?) \|\n.*\n\| `loss` \| (.+?) \|", card.text)
    return table[1], float(table[2]), [one.metric_value for one in card.data.eval_results or []]


@pytest.mark.parametrize("save_steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_results_are_those_of_the_saved_weights(tmp_path, save_steps):
    """Results of averages that were only evaluated are called so, and are not the model's.

    If the averages of the best checkpoint were loaded at the end, its results are the model's, and
    if the model was evaluated after the training, these.
    """
    settings = {"max_steps": 4, "eval_steps": 1, "learning_rate": 0.5}
    settings |= {"save_strategy": "steps", "save_steps": save_steps}
    ends, best = (
        trained(
            MFTrainer,
            tmp_path / name,
            callbacks=[EMACallback(0.5)],
            load_best_model_at_end=is_best,
            **settings,
        )
        for name, is_best in (("ends", False), ("best", True))
    )
    losses = {
        trainer: {
            entry["step"]: entry["eval_loss"]
            for entry in trainer.state.log_history
            if "eval_loss" in entry
        }
        for trainer in (ends, best)
    }
    found, expected = [], []

    def save(trainer, heading, loss):
        trainer.save_model(str(tmp_path / "model"))
        found.append(results_in(card_of(tmp_path / "model")))
        of_model = [loss] if heading == "value" else []
        expected.append((heading, pytest.approx(loss, rel=1e-5), of_model))

    save(ends, "averaged weights", losses[ends][4])
    if save_steps == 1:
        assert best.state.best_global_step < 4
        save(best, "value", losses[best][best.state.best_global_step])
    else:
        # The best step has no checkpoint, so the model keeps its last raw weights.
        assert best.state.best_model_checkpoint is None
        save(best, "averaged weights", losses[best][4])
    (callback,) = (one for one in ends.callback_handler.callbacks if isinstance(one, EMACallback))
    with callback.ema.swap():
        by_hand = ends.evaluate()["eval_loss"]
    save(ends, "averaged weights", by_hand)
    save(ends, "value", ends.evaluate()["eval_loss"])

    assert found == expected
    ends.create_model_card()


def test_a_card_that_was_edited_stays(tmp_path):
    """A card is written again with its model, unless its first line was removed."""
    trainer = trained(MFTrainer, tmp_path / "run")
    folder = tmp_path / "model"
    trainer.save_model(str(folder))
    first = (folder / "README.md").read_text()
    (folder / "README.md").write_text(first.replace("2 updates", "9 updates"))
    trainer.save_model(str(folder))
    assert (folder / "README.md").read_text() == first

    (folder / "README.md").write_text("# My model\n")
    trainer.save_model(str(folder))
    assert (folder / "README.md").read_text() == "# My model\n"


def test_the_stock_card_is_extended(tmp_path):
    """The stock card's text stays, apart from its empty link; usage and settings are added."""
    stock, ours = (trained(kind, tmp_path / kind.__name__) for kind in (Trainer, MFTrainer))
    for trainer in (stock, ours):
        trainer.create_model_card(model_name="name", tags="mine")
    cards = [card_of(tmp_path / kind.__name__) for kind in (Trainer, MFTrainer)]
    text = cards[0].text.replace("is a fine-tuned version of [](https://huggingface.co/)", "was")
    kept, _, added = cards[1].text.partition("\n\n## Use\n")

    assert kept.strip() == text.replace("This model was on", "This model was trained from random "
                                        "weights on").strip()  # fmt: skip
    assert "AutoModelForCausalLM" in added
    assert "## Training with mfwrap" in added
    assert "- mfwrap " in added
    assert set(cards[0].data.tags) | {"mfwrap"} == set(cards[1].data.tags)
    assert cards[1].data.model_name == "name"
    assert cards[1].data.eval_results[0].metric_type == "loss"


def test_trl_s_card_is_kept(tmp_path):
    """The card of TRL's trainers keeps its text and tags, in an order that does not change."""

    class OurSFT(MFTrainerMixin, SFTTrainer):
        """TRL's fine-tuning with MindFormers' step."""

    folders = [tmp_path / "stock", tmp_path / "ours"]
    for kind, folder in zip((SFTTrainer, OurSFT), folders, strict=True):
        args = SFTConfig(str(folder), use_cpu=True, bf16=False, report_to="none", max_steps=1)
        rows = [{"prompt": "1 and 1", "completion": " is 2"}] * 8
        trainer = kind(
            model=small_llama(),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=byte_tokenizer(),
        )
        trainer.create_model_card(model_name="name")
    stock, ours = map(card_of, folders)
    text = stock.text.replace('model="None"', 'model="."').replace(
        "is a fine-tuned version of [None](https://huggingface.co/None)",
        "was trained from random weights",
    )

    assert ours.text.strip().startswith(text.strip())
    assert "## Training with mfwrap" in ours.text
    assert ours.data.tags == sorted({*stock.data.tags, "mfwrap"})


def test_peft_s_card_is_replaced_but_for_its_front_matter(tmp_path):
    """A saved adapter has a card of its own, with PEFT's tags and library."""
    config = LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = new_trainer(
        MFTrainer, tmp_path / "run", model=get_peft_model(tiny_llama(), config), max_steps=1
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    card = card_of(tmp_path / "model")

    assert card.data.library_name == "peft"
    assert {"lora", "mfwrap", "transformers"} <= set(card.data.tags)
    assert "[More Information Needed]" not in card.text


def test_the_card_that_is_pushed(tmp_path):
    """The repository gets the extended card, whose code loads the model from there."""
    with serving() as hub, client_of(hub.url):
        trainer = trained(
            MFTrainer, tmp_path, push_to_hub=True, hub_model_id="user/run", hub_strategy="end"
        )
        trainer.push_to_hub()
        card = ModelCard(hub.files["README.md"].decode())

    assert 'AutoModelForCausalLM.from_pretrained("user/run")' in card.text
    assert card.data.model_name == "run"


def test_a_network_without_a_configuration(tmp_path):
    """A plain module is saved with a card, too, although the stock card cannot be made for it."""

    class Squares(nn.Module):
        """A linear layer with a loss."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x, labels):
            """Return the loss."""
            return {"loss": (self.layer(x) - labels).square().mean()}

    args = TrainingArguments(str(tmp_path / "run"), use_cpu=True, report_to="none", max_steps=1)
    rows = [{"x": [1.0], "labels": [2.0]}] * 8
    trainer = MFTrainer(Squares(), args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    card = card_of(tmp_path / "model")

    assert card.data.library_name == "pytorch"
    assert "A `Squares` with 2 parameters." in card.text


def test_numbers_that_json_does_not_have_are_left_out():
    """NaN and infinity are in the table, but not in the front matter."""
    results = {"loss": math.nan, "r2": -math.inf, "mse": 1.0}
    found = evaluation_results(Evaluation(results=results), "other")

    assert [one.metric_type for one in found] == ["mse"]
    assert "| `loss` | nan |" in results_table({"value": results})


def test_front_matter_of_a_checkpoint_on_the_hub():
    """Base model and data sets are named; what a card said before about them is replaced."""
    card = CardFacts(
        name="name",
        facts={},
        origin="",
        training="",
        base_model="org/base",
        datasets=["org/data"],
        evaluation=Evaluation(dataset="org/data", config="en", results={"accuracy": 0.5}),
    )
    before = ModelCardData(license="mit", base_model="", tags=["a", "base_model:adapter:x"])
    found = front_matter(tiny_llama(), card, before).to_dict()

    assert found["license"] == "mit"
    assert found["base_model"] == "org/base"
    assert found["datasets"] == ["org/data"]
    assert found["metrics"] == ["accuracy"]
    assert found["tags"] == ["a", "base_model:adapter:x", "generated_from_trainer", "mfwrap"]
    data_set = found["model-index"][0]["results"][0]["dataset"]
    assert data_set == {"name": "org/data", "type": "org/data", "config": "en"}


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
