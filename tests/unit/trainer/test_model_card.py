"""MFTrainer adds the settings of the step to the cards of the stock Trainer and TRL."""

import pytest
import trl
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import Trainer

from mfwrap import StepConfig
from mfwrap.callbacks import EMACallback
from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.trainer import MFTrainer, MFTrainerMixin
from support.hub import TOKEN, client_of, serving
from support.small_llama import small_llama
from support.trainer_runs import new_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL

OF_AVERAGES = "The last results are those of averaged weights"


def card_of(folder) -> ModelCard:
    """Return the card in a folder."""
    return ModelCard.load(folder / "README.md")


def trained(kind, folder, extras=None, **arguments):
    """Return a trainer after two updates with an evaluation."""
    evaluates = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = new_trainer(kind, folder, extras=extras, **evaluates | arguments)
    trainer.train()
    return trainer


def test_the_stock_card_is_extended(tmp_path):
    """The stock card stays as it is; a tag and the settings of the step are added, each once."""
    stock = trained(Trainer, tmp_path / "stock")
    step = StepConfig(local_norm=True)
    ours = trained(MFTrainer, tmp_path / "ours", {"step": step}, hub_token=TOKEN)
    for trainer in (stock, ours, ours):
        trainer.create_model_card(model_name="name", tags="mine")
    cards = [card_of(tmp_path / name) for name in ("stock", "ours")]
    kept, _, added = cards[1].text.partition("\n\n## Training with mfwrap\n\n")

    assert kept == cards[0].text.rstrip()
    assert added.count("`MFTrainer` made 2 updates") == 1
    assert added.endswith("defaults:\n\n- local_norm: True\n")
    assert cards[1].data.tags == [*cards[0].data.tags, "mfwrap"]
    own, of_stock = (card.data.to_dict() | {"tags": None} for card in cards)
    assert own == of_stock
    assert TOKEN not in str(cards[1])


def test_saving_a_model_writes_no_card(tmp_path):
    """`save_model` leaves the card in the folder alone, as in the stock Trainer."""
    trainer = new_trainer(MFTrainer, tmp_path / "run")
    trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "README.md").exists()

    (tmp_path / "model" / "README.md").write_text("# My model\n")
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "README.md").read_text() == "# My model\n"


@pytest.mark.parametrize("loads_best", [False, True])
def test_results_of_weights_that_the_model_does_not_have(tmp_path, loads_best):
    """A card says whether the last results are of averages that the model does not end with."""
    trainer = trained(
        MFTrainer,
        tmp_path,
        callbacks=[EMACallback(0.5)],
        load_best_model_at_end=loads_best,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.create_model_card()
    assert (OF_AVERAGES in card_of(tmp_path).text) == (not loads_best)

    trainer.evaluate()
    trainer.create_model_card()
    assert OF_AVERAGES not in card_of(tmp_path).text


def test_trl_s_card_is_kept(tmp_path):
    """The card of TRL's trainers keeps its text and tags."""

    class OurSFT(MFTrainerMixin, trl.SFTTrainer):
        """TRL's fine-tuning with MindFormers' step."""

    folders = [tmp_path / "stock", tmp_path / "ours"]
    for kind, folder in zip((trl.SFTTrainer, OurSFT), folders, strict=True):
        args = trl.SFTConfig(str(folder), use_cpu=True, bf16=False, report_to="none", max_steps=1)
        rows = [{"prompt": "1 and 1", "completion": " is 2"}] * 8
        trainer = kind(
            model=small_llama(),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=byte_tokenizer(),
        )
        trainer.create_model_card(model_name="name")
    stock, ours = map(card_of, folders)

    assert ours.text.startswith(stock.text.rstrip())
    assert "## Training with mfwrap" in ours.text
    assert sorted(ours.data.tags) == sorted([*stock.data.tags, "mfwrap"])


def test_the_card_that_is_pushed(tmp_path):
    """The repository gets the extended card."""
    with serving() as hub, client_of(hub.url):
        trainer = trained(
            MFTrainer, tmp_path, push_to_hub=True, hub_model_id="user/run", hub_strategy="end"
        )
        trainer.push_to_hub()
        card = ModelCard(hub.files["README.md"].decode())

    assert "## Training with mfwrap" in card.text
    assert "mfwrap" in card.data.tags
