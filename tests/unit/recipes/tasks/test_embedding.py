"""Embeddings are trained on pairs, and evaluated by a search."""

import pytest
from datasets import Dataset

from mfwrap.recipes.data.built_in import DocstringsSource
from mfwrap.recipes.data.source import Rows
from mfwrap.recipes.models.settings import ModelSettings
from mfwrap.recipes.tasks.embedding import build_embedding
from mfwrap.runner import RecipeError
from mfwrap.runner.preview import preview
from mfwrap.runner.rehearsal import rehearse
from mfwrap.runner.run import run_recipe
from support.recipe_data import recipe_of, trainer_of
from support.recipe_texts import BERT

pytest.importorskip("sentence_transformers")

# Ignore the warnings that sentence-transformers and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture
def pairs(json_lines):
    """Return the section ``data`` of a file with pairs."""
    rows = [{"question": f"{word}?", "positive": f"it is {word}"} for word in WORDS * 4]
    return json_lines(rows) | {"columns": {"anchor": "question"}, "sequence_length": 16}


def test_a_run(pairs, tmp_path):
    """A run evaluates, searches, and saves a model that sentence-transformers loads."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  (optional)

    training = {"max_steps": 40, "learning_rate": 1e-2, "output_dir": str(tmp_path / "run")}
    recipe = recipe_of("embedding", pairs, "ema.decay=0.5", model=BERT, **training)
    metrics = run_recipe(recipe).metrics
    folder = tmp_path / "run" / "model"
    loaded = SentenceTransformer(str(folder), device="cpu")
    asked, found = loaded.encode(["six?"]), loaded.encode([f"it is {word}" for word in WORDS])

    assert metrics["eval_cosine_accuracy@1"] > 0.9
    assert {"eval_loss", "ema_eval_loss", "ema_eval_cosine_ndcg@10"} <= metrics.keys()
    assert loaded.similarity(asked, found).argmax().item() == WORDS.index("six")
    card = (folder / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert "SentenceTransformer(" in card
    assert "mfwrap-" not in (folder / "config.json").read_text()  # a temporary folder


def test_the_order_of_the_columns(json_lines):
    """The losses take columns by their order, which is not that of the file."""
    rows = [{"negative": "c", "site": "web", "positive": "b", "anchor": "a"}] * 8
    trainer = trainer_of("embedding", json_lines(rows), model=BERT)

    assert trainer.train_dataset.column_names == ["anchor", "positive", "negative"]


def test_texts_that_are_there_twice():
    """A text counts once in the search, and each of its anchors finds it."""
    rows = Dataset.from_dict({"anchor": ["a", "b", "a"], "positive": ["x", "x", "y"]})
    built = build_embedding(ModelSettings(**BERT), DocstringsSource(), Rows(rows, rows))
    search = built["evaluator"]

    assert search.queries == ["a", "b"]
    assert search.corpus == ["x", "y"]
    assert search.relevant_docs == {"0": {"0", "1"}, "1": {"0"}}


def test_pairs_are_shown(pairs):
    """The preview has the tokens of each text."""
    lines = preview(recipe_of("embedding", pairs | {"eval_fraction": 0}, model=BERT), 1)

    assert lines == [
        "32 rows",
        "",
        "row 1: anchor 4 tokens, positive 9 tokens",
        "  anchor           one?",
        "  positive         it is one",
        "",
    ]


def test_the_first_step_is_tried(pairs):
    """`validate` trains a step with a whole batch."""
    assert rehearse(recipe_of("embedding", pairs, model=BERT)) is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("peft.type=lora", "peft: is not a section of the task embedding"),
        ("data.loss_by=positive", r"data\.loss_by: must be left out, because the rows of the task"),
        ("data.columns=null", r"columns \['anchor', 'negative', 'positive'\] or \['anchor', "),
    ],
)
def test_what_is_refused(pairs, override, says):
    """A setting that the task does not have is one sentence."""
    with pytest.raises(RecipeError, match=says):
        trainer_of("embedding", pairs, override, model=BERT)
