"""A wrong turn of a conversation is an error that names the turn, its column and its row."""

import pytest
from datasets import Dataset

from mfwrap.recipes.data.columns import check_rows
from mfwrap.recipes.data.conversations import (
    ANSWER,
    ANY_ANSWER,
    MESSAGES,
    OPTIONAL_TEXT,
    PROMPT,
    PROMPTS,
    SHAREGPT,
    SHAREGPT_PROMPT,
    TOOLS,
    as_messages,
)
from mfwrap.recipes.data.source import DataError
from mfwrap.runner import RecipeError
from mfwrap.runner.run import checked_rows
from support.recipe_data import recipe_of, trainer_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

ASKED = PROMPTS[0]["prompt"]
"""What a model is to answer."""


def turns(*words, keys=("role", "content")):
    """Return turns of the form ``"user: What?"``."""
    return [dict(zip(keys, word.split(": "), strict=True)) for word in words]


def sharegpt(*words):
    """Return turns with ShareGPT's keys."""
    return turns(*words, keys=("from", "value"))


GOOD = turns("system: s", "user: a", "assistant: b", "user: c")
CALLED = [
    *turns("user: a"),
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    *turns("tool: 1", "tool: 2", "assistant: b"),
]


@pytest.mark.parametrize(
    ("kind", "value", "got"),
    [
        (MESSAGES, GOOD, None),
        (MESSAGES, CALLED, None),
        (SHAREGPT, sharegpt("human: a", "gpt: b"), None),
        (SHAREGPT, sharegpt("Human: a", "GPT: b"), None),
        (SHAREGPT, sharegpt("system: s", "user: a", "assistant: b"), None),
        (SHAREGPT, GOOD, None),
        (SHAREGPT_PROMPT, sharegpt("human: a"), None),
        (PROMPT, turns("system: s", "user: a"), None),
        (PROMPT, "a", None),
        (PROMPT, " ", None),
        (ASKED, "a", None),
        (ASKED, turns("user: a", "assistant: "), None),
        (ASKED, turns("user: ", "assistant: b"), None),
        (ASKED, turns("system: s"), None),
        (ASKED, [{"role": "user", "content": [{"type": "image", "text": None}]}], None),
        (ANSWER, turns("assistant: b"), None),
        (ANSWER, turns("assistant: b")[0], None),
        (ANY_ANSWER, GOOD, None),
        (MESSAGES, [], "a list without turns"),
        (MESSAGES, None, "an empty value (null)"),
        (MESSAGES, "user: a", "'user: a'"),
        (MESSAGES, ["a"], "['a']"),
        (
            MESSAGES,
            turns("user: a", "bot: b"),
            "the role 'bot' in turn 2 (known: assistant, developer, system, tool, user)",
        ),
        (
            MESSAGES,
            turns("human: a", "gpt: b"),
            "the role 'human' in turn 1 (known: assistant, developer, system, tool, user)",
        ),
        (
            SHAREGPT,
            sharegpt("human: a", "chatbot: b"),
            "the role 'chatbot' in turn 2 (known: assistant, developer, gpt, human, system, tool, ",
        ),
        (MESSAGES, [{"content": "a"}], "the role an empty value (null) in turn 1 (known: "),
        (
            MESSAGES,
            [*turns("user: a"), {"role": "assistant", "content": None}],
            "an empty value (null) as the content of turn 2",
        ),
        (SHAREGPT, [{"from": "human", "value": 5}], "5 as the content of turn 1"),
        (
            MESSAGES,
            turns("assistant: b", "user: a"),
            "'assistant' in turn 1, where a turn of the user comes first (put the missing turn ",
        ),
        (
            SHAREGPT,
            sharegpt("system: s", "gpt: b"),
            "'gpt' in turn 2, where a turn of the user comes first",
        ),
        (
            ANSWER,
            turns("user: a", "assistant: b"),
            "'user' in turn 1, where a turn of the assistant comes first",
        ),
        (
            SHAREGPT,
            sharegpt("human: a", "human: c", "gpt: b"),
            "two turns of 'human' in succession (turns 1 and 2; join them, or put the",
        ),
        (
            MESSAGES,
            turns("user: a", "assistant: b", "assistant: c"),
            "two turns of 'assistant' in succession (turns 2 and 3; join them, or put the",
        ),
        (MESSAGES, turns("user: a"), "no turn of the assistant"),
        (ASKED, turns("system: s", "user:  "), "a last turn without text, {'role': 'user', "),
        (ASKED, turns("user: a", "assistant: b", "user: "), "a last turn without text, "),
        (ASKED, turns("user: ")[0], "a last turn without text, "),
        (
            ASKED,
            [{"role": "user", "content": [{"type": "text", "text": "\n"}]}],
            "a last turn without text, ",
        ),
        (ASKED, [{"role": "user", "content": []}], "a last turn without text, "),
        (ASKED, turns("system: "), "only turns without text"),
        (ASKED, [], "a list without turns"),
        (TOOLS, None, None),
        (TOOLS, "[]", None),
        (TOOLS, "no JSON", "'no JSON'"),
        (TOOLS, "{}", "'{}'"),
        (OPTIONAL_TEXT, None, None),
        (OPTIONAL_TEXT, "a", None),
    ],
)
def test_faults(kind, value, got):
    """A value without a fault fits; the fault of another value is named."""
    _, fits = kind.expect(value)

    assert fits(value) == (got is None)
    if got is not None:
        assert (kind.fault(value) or repr(value)).startswith(got)


def test_the_error_names_column_row_and_line(json_lines):
    """The error of a recipe has the fault, the column, the row, and the line of the file."""
    good = {"conversations": sharegpt("human: a", "gpt: b")}
    section = json_lines([good, good, {"conversations": sharegpt("gpt: b", "human: a")}])
    says = (
        r"^r:\d+: data: must have a list of turns with from and value \(user and assistant in "
        r"turn\) in each row of column `conversations`, got 'gpt' in turn 1, where a turn of the "
        r"user comes first \(put the missing turn before it, or leave it out\) in row 3 \(counted "
        r"from 1\), at rows\.jsonl:3$"
    )
    with pytest.raises(RecipeError, match=says):
        trainer_of("supervised_tuning", section)


@pytest.mark.parametrize(
    ("task", "section"),
    [
        ("reward_tuning", "reward={type: think_format_reward}"),
        ("distillation", "teacher={config: {model_type: llama}}"),
    ],
)
@pytest.mark.parametrize("prompt", ["", " \n"])
def test_a_blank_prompt_is_refused(json_lines, task, section, prompt):
    """A model that answers prompts itself gets no empty one; the error has its line."""
    data = json_lines([{"prompt": "a"}, {"prompt": prompt}])
    says = (
        r"data: must have a string \(as in row 1\) that is not blank in each row of column "
        r"`prompt`, got '.*' in row 2 \(counted from 1\), at rows\.jsonl:2$"
    )
    with pytest.raises(RecipeError, match=says):
        checked_rows(recipe_of(task, data, section))


def test_rows_differ_from_the_first():
    """A column has texts, or messages, as its first row."""
    rows = Dataset.from_dict({"prompt": ["a", None]})
    with pytest.raises(DataError, match=r"a string \(as in row 1\) .*, got an empty value"):
        check_rows(rows, {"prompt": PROMPT}, {})


def test_messages():
    """Turns of each form become messages; turns with a role are unchanged."""
    expected = turns("user: a", "assistant: b")

    assert as_messages(sharegpt("human: a", "gpt: b"), "user") == expected
    assert as_messages(expected, "user") == expected
    assert as_messages("a", "user") == expected[:1]
    assert as_messages(sharegpt("gpt: b")[0], "assistant") == expected[1:]
