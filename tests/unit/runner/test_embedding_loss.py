"""Losses of sentence-transformers in a recipe."""

import pytest

from mfwrap.runner import RecipeError, parse_recipe
from mfwrap.runner.document import yaml_text
from mfwrap.runner.run import build_trainer
from support.recipe_data import recipe_of, trainer_of
from support.recipe_texts import BERT

pytest.importorskip("sentence_transformers")

# Ignore the warnings that sentence-transformers and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

DATA = {
    "type": "docstrings",
    "columns": {"anchor": "prompt", "positive": "chosen", "negative": "rejected"},
    "max_train_samples": 8,
    "max_eval_samples": 4,
}


@pytest.mark.parametrize(
    ("section", "name", "arguments"),
    [
        (None, "MultipleNegativesRankingLoss", {"scale": 20.0}),
        ("loss.type=TripletLoss", "TripletLoss", {"triplet_margin": 5}),
        ("loss={type: TripletLoss, triplet_margin: 0.5}", "TripletLoss", {"triplet_margin": 0.5}),
    ],
)
def test_a_loss_by_its_name(section, name, arguments):
    """A loss gets the model and the arguments of the recipe."""
    loss = trainer_of("embedding", DATA, *filter(None, [section]), model=BERT).loss

    assert type(loss).__name__ == name
    assert {key: getattr(loss, key) for key in arguments} == arguments


def test_a_loss_of_ones_own(tmp_path):
    """A class beside the recipe gets the model, too."""
    (tmp_path / "my_losses.py").write_text(
        "from sentence_transformers.sentence_transformer.losses import TripletLoss\n"
        "class Half(TripletLoss):\n"
        "    def __init__(self, model, factor: float):\n"
        "        super().__init__(model, triplet_margin=factor / 2)\n"
    )
    data = recipe_of("embedding", DATA, model=BERT).document.data
    text = yaml_text({**data, "loss": {"type": "my_losses.Half", "factor": 3.0}})
    name = str(tmp_path / "r.yaml")
    trainer, _ = build_trainer(parse_recipe(text, name, allow_code=True))

    assert trainer.loss.triplet_margin == 1.5
    unchecked = parse_recipe(text, name).unchecked
    assert unchecked == {("loss", "type"): "my_losses.Half"}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("loss.type=TripletLos", r"loss\.type: expected one of .*; did you mean 'TripletLoss'\?"),
        ("loss={type: TripletLoss, margin: 1}", r"loss\.margin: unknown key; "),
        ("loss.type=MatryoshkaLoss", r"loss\.loss: required, but missing"),
    ],
)
def test_what_is_refused(section, says):
    """An error names the key."""
    with pytest.raises(RecipeError, match=says):
        recipe_of("embedding", DATA, section, model=BERT)
