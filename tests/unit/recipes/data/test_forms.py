"""Rows are recognized by their columns, and become rows that TRL knows."""

import pytest

from mfwrap.recipes.data.forms import PREFERENCES, TUNING, form_of
from mfwrap.recipes.data.source import DataError
from mfwrap.runner import RecipeError
from support.recipe_data import trainer_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("messages", "chat messages"),
        ("messages prompt prompt_id", "chat messages"),
        ("conversations id", "ShareGPT conversations"),
        ("instruction input output", "Alpaca instructions"),
        ("instruction input output text", "Alpaca instructions"),
        ("instruction output", "Alpaca instructions"),
        ("prompt completion", "prompts and completions"),
        ("prompt completion messages text", "prompts and completions"),
        ("text id", "texts"),
        ("messages text", "chat messages"),
    ],
)
def test_tuning(columns, name):
    """Columns of public data sets are recognized; of several forms, one takes precedence."""
    assert form_of(TUNING, columns.split()).name == name


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("prompt chosen rejected messages", "prompts with a chosen and a rejected answer"),
        ("chosen rejected", "pairs of a chosen and a rejected conversation"),
        (
            "conversations chosen rejected",
            "ShareGPT conversations with a chosen and a rejected answer",
        ),
        (
            "instruction input chosen rejected",
            "Alpaca instructions with a chosen and a rejected answer",
        ),
    ],
)
def test_preferences(columns, name):
    """Pairs are recognized by what is beside the two answers."""
    assert form_of(PREFERENCES, columns.split()).name == name


@pytest.mark.parametrize(
    ("columns", "named", "name"),
    [
        ("messages conversations", ["messages"], "chat messages"),
        ("messages conversations", ["conversations"], "ShareGPT conversations"),
        ("prompt completion messages", ["messages"], "chat messages"),
        ("prompt completion text", ["text"], "texts"),
        ("prompt completion text", ["other"], "prompts and completions"),
    ],
)
def test_named_columns_choose(columns, named, name):
    """A form whose columns the recipe names comes before all others."""
    assert form_of(TUNING, columns.split(), named).name == name


def test_several_forms():
    """Two conversations in a row are one too many, and the error says how to choose."""
    says = (
        r"^`data` must have the columns of one form of rows, got those of chat messages "
        r"\(messages\) and ShareGPT conversations \(conversations\); name the columns of the one "
        r"to use, as in data\.columns: \{messages: messages\}$"
    )
    with pytest.raises(DataError, match=says):
        form_of(TUNING, ["messages", "conversations"])


def test_the_error_of_a_recipe(json_lines):
    """An unknown set of columns is an error that has the columns of each form, and those found."""
    says = (
        r"^r:\d+: data\.type: expected data with the columns \['completion', 'prompt'\] or "
        r"\['messages'\] or \['conversations'\] or \['instruction', 'output'\] or \['text'\], "
        r"got \['answer', 'question'\] in rows\.jsonl; if they have other names, set data\.columns"
    )
    with pytest.raises(RecipeError, match=says):
        trainer_of("supervised_tuning", json_lines([{"question": "a", "answer": "b"}] * 2))


@pytest.mark.parametrize("found", ["conversation", "Conversations"])
def test_a_column_with_a_similar_name(json_lines, found):
    """The error says how to name it."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    says = rf"set data\.columns, as in \{{conversations: {found}\}}$"
    with pytest.raises(RecipeError, match=says):
        trainer_of("supervised_tuning", json_lines([{found: turns}] * 2))


def test_columns_of_a_form():
    """Optional columns belong to a form if the data have them."""
    form = form_of(TUNING, ["conversations"])

    assert [*form.columns_in(["conversations", "id"])] == ["conversations"]
    assert [*form.columns_in(["conversations", "tools"])] == ["conversations", "tools"]


def test_prompts_that_need_no_conversion():
    """Texts stay as they are; a row that is changed keeps its other columns."""
    form = form_of(TUNING, ["prompt", "completion"])
    row = {"prompt": "a", "completion": "b", "tools": "[]"}
    answer = {"role": "assistant", "content": "b"}

    assert form.convert(row) is row
    assert form.convert(row | {"completion": [answer]}) == {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [answer],
        "tools": "[]",
    }
