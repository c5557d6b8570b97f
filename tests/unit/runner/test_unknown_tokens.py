"""A run says that a tokenizer does not know a part of its rows."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mfwrap.runner.run import build_trainer
from support.recipe_data import recipe_of
from support.recipe_texts import SMALL_LLAMA

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ("the", "cat", "sat", "user", "assistant")


@pytest.fixture
def warnings_of(tmp_path):
    """Return a function that returns the warnings of a run with a tokenizer of a few words."""

    def run(task, rows, marks=(), **model):
        known = {word: n for n, word in enumerate(["<unk>", "<pad>", "</s>", *WORDS])}
        words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))  # noqa: S106  (a token, not a password)
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
        tokenizer.add_tokens([*marks], special_tokens=True)
        tokenizer.save_pretrained(tmp_path / "words")
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        section = {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0}
        model |= {"config": SMALL_LLAMA, "tokenizer": str(tmp_path / "words")}
        said = []
        build_trainer(recipe_of(task, section, model=model), say=said.append)
        return [line for line in said if "<unk>" in line]

    return run


CHATS = [
    {
        "messages": [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": "sat"},
        ]
    }
] * 4


def test_marks_of_a_chat_template(warnings_of):
    """The marks that the tokenizer does not know are named, and are not once it has them."""
    (said,) = warnings_of("supervised_tuning", CHATS, chat_template="chatml")

    assert (
        "% of the tokens of the training rows are '<unk>', because the tokenizer does not" in said
    )
    assert "know <|im_start|> of the chat template" in said
    marks = ["<|im_start|>"]
    assert warnings_of("supervised_tuning", CHATS, marks, chat_template="chatml") == []


def test_words_that_are_unknown(warnings_of):
    """Without a template, the share alone is told, and a rare unknown word is not."""
    rows = [{"prompt": "the cat ", "completion": "sat there"}] * 4
    (said,) = warnings_of("supervised_tuning", rows)
    assert said.startswith("warning: 20.0% of the tokens of the training rows are '<unk>', which")

    rows = [{"prompt": "the cat " * 9, "completion": "sat"}] * 20
    rows[0] = {"prompt": "a cat ", "completion": "sat"}
    assert warnings_of("supervised_tuning", rows) == []
