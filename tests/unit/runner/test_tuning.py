"""A run says what its rows are, and trains on the answers only, or says why it cannot."""

import json
import re

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from mfwrap.cli import cli
from mfwrap.runner import RecipeError, run_recipe
from mfwrap.runner.preview import preview
from mfwrap.runner.rehearsal import rehearse
from mfwrap.runner.run import build_trainer, checked_rows
from mfwrap.runner.tuning import rows_line, tuning_of
from support.recipe_data import LANGUAGE, learned, recipe_of, save_tokenizer

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

TURNS = [
    {"from": "human", "value": "a?"},
    {"from": "gpt", "value": "b"},
    {"from": "human", "value": "c?"},
    {"from": "gpt", "value": "d"},
]
CHATS = [{"id": n, "conversations": TURNS} for n in range(1200)]
MESSAGES = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
UNUSED = "(columns not used: id)"
TWO_SYSTEMS = "not used: system of 3 rows, whose turns begin with one"
PAIR = {"chosen": "a", "rejected": "b"}
BOTH = " with a chosen and a rejected answer; both answers count in the loss"
PLAIN = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
"""A template that does not mark the answers."""


@pytest.fixture
def section(tmp_path):
    """Return a function that writes rows to a file, and returns the section ``data``."""

    def write(rows, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return {"path": str(path), "eval_fraction": 0, **keys}

    return write


RAW = (
    "no chat template is applied to prompts that are texts; data.columns={instruction: prompt, "
    "output: completion} would apply it"
)


def line_of(recipe):
    """Return what is said about the rows of a recipe."""
    tables = []
    rows = checked_rows(recipe, tables.append)
    return tuning_of(recipe, rows, tables).line


@pytest.mark.parametrize(
    ("task", "row", "training", "line"),
    [
        (
            "supervised_tuning",
            CHATS[0],
            {},
            f"ShareGPT conversations {UNUSED}; the assistant's turns count in the loss",
        ),
        (
            "supervised_tuning",
            CHATS[0],
            {"assistant_only_loss": False},
            f"ShareGPT conversations {UNUSED}; all tokens count in the loss",
        ),
        (
            "supervised_tuning",
            MESSAGES[0],
            {},
            "chat messages; the assistant's turns count in the loss",
        ),
        (
            "supervised_tuning",
            {"prompt": "a", "completion": "b"},
            {},
            f"prompts and completions; the completions count in the loss; {RAW}",
        ),
        (
            "supervised_tuning",
            {"prompt": "a", "completion": "b"},
            {"completion_only_loss": False},
            f"prompts and completions; all tokens count in the loss; {RAW}",
        ),
        (
            "supervised_tuning",
            {"instruction": "a", "output": "b"},
            {},
            "Alpaca instructions; the outputs count in the loss",
        ),
        ("supervised_tuning", {"text": "a"}, {}, "texts; all tokens count in the loss"),
        (
            "preference_tuning",
            PAIR | {"instruction": "a"},
            {},
            f"Alpaca instructions{BOTH}",
        ),
    ],
)
def test_lines(section, task, row, training, line):
    """The line says how many rows of which form there are, and what of them is learned."""
    recipe = recipe_of(task, section([row] * 3), max_length=64, **training)

    assert line_of(recipe) == f"3 rows of {line}"
    tables = []
    rows = checked_rows(recipe, tables.append)
    assert rows_line(recipe, rows, tables) == f"3 rows of {line}".partition(";")[0]


def test_prompts_that_get_no_chat_template(section):
    """The line names the user's columns; nothing is said without a template, or of messages."""

    def said(task, row, *overrides, **keys):
        recipe = recipe_of(task, section([row] * 3, **keys), *overrides, max_length=64)
        return line_of(recipe)

    asked = {"question": "a", "answer": "b"}
    plain = said("supervised_tuning", asked, columns={"prompt": "question", "completion": "answer"})
    assert plain.endswith("; data.columns={instruction: question, output: answer} would apply it")
    templated = said(
        "supervised_tuning", asked, columns={"instruction": "question", "output": "answer"}
    )
    assert "template" not in templated
    pairs = said("preference_tuning", PAIR | {"prompt": "a"})
    assert pairs.endswith("; data.columns={instruction: prompt} would apply it")


def test_rows_that_are_held_out_or_left_out_are_counted(section, tmp_path):
    """The number is that of all rows that were read; without a limit, their split is said."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(CHATS[0]))
    path = {"eval_path": str(held_out)}

    def said(**keys):
        return line_of(recipe_of("supervised_tuning", section(CHATS, **keys))).partition(" of ")[0]

    assert said(eval_fraction=0.1) == "1,200 rows (1,080 to train on, 120 held out)"
    for limit in ({"max_train_samples": 10}, {"max_eval_samples": 10}):
        assert said(eval_fraction=0.5, **limit) == "1,200 rows"
    assert said(**path) == "1,201 rows (1,200 to train on, 1 held out)"
    assert said(eval_fraction=0) == "1,200 rows"


@pytest.mark.parametrize(
    ("task", "full", "empty"),
    [
        ("supervised_tuning", {"instruction": "a", "output": "b"}, {"output": " "}),
        ("supervised_tuning", {"prompt": "a", "completion": "b"}, {"completion": ""}),
        ("supervised_tuning", CHATS[0], {"conversations": [*TURNS[:3], TURNS[3] | {"value": ""}]}),
        (
            "supervised_tuning",
            CHATS[0],
            {"conversations": [TURNS[0], TURNS[1] | {"value": ""}, *TURNS[2:]]},
        ),
        ("preference_tuning", {"prompt": "a", **PAIR}, {"rejected": ""}),
    ],
)
def test_empty_answers_are_counted(section, task, full, empty):
    """The line says how many answers have no text, and names the first one's line of the file.

    Of a conversation, each answer counts.
    """
    recipe = recipe_of(task, section([full, full | empty, full, full | empty]), max_length=64)

    says = r", 2 with an empty answer \(the first at \S+:2\); "
    assert re.search(says, line_of(recipe))
    recipe = recipe_of(task, section([full | empty] * 4, eval_fraction=0.5), max_length=64)
    assert "4 rows (2 to train on, 2 held out) of " in line_of(recipe)
    assert ", 4 with an empty answer (the first at " in line_of(recipe)


def test_what_only_held_out_rows_have(section, tmp_path):
    """Empty answers and keys of turns that are not used are told of a held-out file, too."""
    file = tmp_path / "held_out.jsonl"
    weighted = {"conversations": [TURNS[0], TURNS[1] | {"value": "", "weight": 0}]}
    file.write_text("\n".join(map(json.dumps, [{"conversations": TURNS}, weighted])))
    data = section([{"conversations": TURNS}] * 3, eval_path=str(file))

    line = line_of(recipe_of("supervised_tuning", data, max_length=64))
    assert line.startswith(
        "5 rows (3 to train on, 2 held out) of ShareGPT conversations (not used: 'weight' of "
        f"turns), 1 with an empty answer (the first at {file}:2); "
    )


def test_empty_answers_of_rows_that_are_left_out(section):
    """They count among all rows that were read, also where only a few are kept for a trial."""
    rows = section([{"prompt": "a", "completion": ""}] * 8, eval_fraction=0.5)
    said = []
    rehearse(recipe_of("supervised_tuning", rows, max_length=64), said.append)
    recipe = recipe_of("supervised_tuning", {**rows, "max_train_samples": 3}, max_length=64)

    for line in (said[-1], line_of(recipe)):
        assert line.startswith("8 rows of ")
        assert ", 8 with an empty answer (the first at " in line


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"conversations": [TURNS[0] | {"weight": 1}, TURNS[1] | {"weight": 0}]},
            "ShareGPT conversations (not used: 'weight' of turns)",
        ),
        (
            {"messages": [MESSAGES[0]["messages"][0], MESSAGES[0]["messages"][1] | {"train": 0}]},
            "chat messages (not used: 'train' of turns)",
        ),
        (
            {
                "conversations": [{"from": "system", "value": "Add."}, *TURNS],
                "system": "Multiply.",
                "id": 1,
            },
            f"ShareGPT conversations {UNUSED[:-1]}; {TWO_SYSTEMS})",
        ),
        (
            {
                "conversations": [{"from": "system", "value": "Add."}, *TURNS],
                "system": "Add.",
            },
            "ShareGPT conversations",
        ),
    ],
)
def test_what_is_not_used_of_turns(section, row, said):
    """Nothing of the data is dropped without a word."""
    recipe = recipe_of("supervised_tuning", section([row] * 3), max_length=64)
    assert line_of(recipe) == f"3 rows of {said}; the assistant's turns count in the loss"


def test_held_out_rows_of_another_form(section, tmp_path):
    """Held-out rows must have the form of the training rows."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "a", "completion": "b"}))
    data = section(CHATS[:3], eval_path=str(held_out))
    says = r"expected data with the columns \['conversations'\], got \['completion', 'prompt'\]"
    with pytest.raises(RecipeError, match=says):
        checked_rows(recipe_of("supervised_tuning", data))


def test_a_stream_has_no_number(section):
    """How many rows a stream has is not known beforehand."""
    file = section(CHATS[:3])["path"]
    data = {"type": "datasets", "path": "json", "data_files": file, "streaming": True}
    recipe = recipe_of("supervised_tuning", data, max_steps=1)

    assert line_of(recipe).startswith("streamed rows of ShareGPT conversations (columns not used")


def test_a_task_with_one_form():
    """Nothing is said about the rows of a task that takes only one form."""
    recipe = recipe_of("causal_lm", {"type": "python_topics"})

    assert tuning_of(recipe, checked_rows(recipe), []) is None


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ["b<|end|>", "d<|end|>"]), (False, 1), (True, 2)]
)
def test_the_recipe_decides(section, given, expected):
    """An explicit setting is kept; by default only the assistant's turns are learned."""
    training = {} if given is None else {"assistant_only_loss": given}
    recipe = recipe_of("supervised_tuning", section(CHATS[:2]), max_length=64, **training)
    before = recipe.arguments.assistant_only_loss
    trainer, _ = build_trainer(recipe)
    parts = learned(trainer.processing_class, trainer.train_dataset[0])

    assert parts == expected or len(parts) == expected
    assert recipe.arguments.assistant_only_loss is before


def test_a_template_without_marks(section, tmp_path):
    """If TRL cannot tell the answers, the error says what to set; with that, the run starts."""
    model = LANGUAGE | {"tokenizer": save_tokenizer(tmp_path / "base", template=PLAIN)}
    says = (
        r"^r:\d+: training\.assistant_only_loss: cannot be true, .*: the tokenizer.* mark "
        r"the turns of the assistant .*; set model\.chat_template to chatml or "
    )
    with pytest.raises(RecipeError, match=says):
        line_of(recipe_of("supervised_tuning", section(CHATS[:2]), model=model))
    every = recipe_of(
        "supervised_tuning", section(CHATS[:2]), model=model, assistant_only_loss=False
    )
    named = recipe_of(
        "supervised_tuning", section(CHATS[:2]), model=model | {"chat_template": "chatml"}
    )

    assert line_of(every).endswith("all tokens count in the loss")
    assert line_of(named).endswith("the assistant's turns count in the loss")


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("supervised_tuning", CHATS[0]),
        ("supervised_tuning", {"prompt": "a", "completion": MESSAGES[0]["messages"][1:]}),
        ("preference_tuning", dict.fromkeys(["chosen", "rejected"], MESSAGES[0]["messages"])),
    ],
)
def test_a_tokenizer_without_a_template(section, tmp_path, task, row):
    """The error names the key to set, before the model is loaded."""
    model = LANGUAGE | {"tokenizer": save_tokenizer(tmp_path / "base")}
    says = (
        r"^r:\d+: model\.chat_template: expected a chat template, because the data are "
        r"conversations and the tokenizer has none; set it to chatml, the name of a template of TRL"
    )
    with pytest.raises(RecipeError, match=says):
        build_trainer(recipe_of(task, section([row] * 2), model=model))


def test_prompts_without_a_template(section, tmp_path):
    """So does that of a task whose model answers prompts itself; chatml is then their template."""
    rows = section([{"prompt": [{"role": "user", "content": "a"}]}] * 2)
    model = LANGUAGE | {"tokenizer": save_tokenizer(tmp_path / "base")}
    reward = "reward={type: get_repetition_penalty_reward, ngram_size: 2, max_penalty: -1}"

    def shown(model):
        recipe = recipe_of("reward_tuning", rows, reward, model=model, num_generations=2)
        return "".join(preview(recipe, 1))

    with pytest.raises(RecipeError, match=r"model\.chat_template: expected a chat template"):
        shown(model)
    assert "<|im_start|>user" in shown(model | {"chat_template": "chatml"})


def test_the_template_path_of_trl(section, tmp_path):
    """TRL's own key for a template is understood, too."""
    model = LANGUAGE | {"tokenizer": save_tokenizer(tmp_path / "base")}
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN)
    recipe = recipe_of(
        "supervised_tuning",
        section(CHATS[:2]),
        model=model,
        chat_template_path=str(file),
        assistant_only_loss=False,
        max_length=64,
    )
    trainer, _ = build_trainer(recipe)
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])

    assert text == "a?<|end|>b<|end|>c?<|end|>d<|end|>"


def test_a_run_says_what_its_rows_are(section, tmp_path):
    """A run says the line at its start, and saves the chat template with the model."""
    base = save_tokenizer(tmp_path / "base", "<|im_start|>", "<|im_end|>")
    recipe = recipe_of(
        "supervised_tuning",
        section(CHATS[:4]),
        model=LANGUAGE | {"tokenizer": base, "chat_template": "qwen2_5"},
        max_length=200,
        max_steps=1,
        per_device_train_batch_size=2,
        output_dir=str(tmp_path / "run"),
    )
    said = []
    run_recipe(recipe, say=said.append)
    folder = tmp_path / "run" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    line = f"4 rows of ShareGPT conversations {UNUSED}; the assistant's turns count in the loss"
    assert said == [line]
    text = tokenizer.apply_chat_template(MESSAGES[0]["messages"], tokenize=False)
    assert text.endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n")
    assert tokenizer.eos_token_id == end
    ends = model.generation_config.eos_token_id
    assert end in (ends if isinstance(ends, list) else [ends])


def test_the_commands_say_it(section, tmp_path):
    """`data` begins with the line, `validate` prints it before its verdict."""
    recipe = recipe_of("supervised_tuning", section(CHATS), max_length=64)
    line = "1,200 rows of ShareGPT conversations (columns not used: id); the assistant's turns"
    line = f"{line} count in the loss"
    assert preview(recipe, 1) == [
        line,
        "",
        "sequence 1: 12 tokens, 4 of them count in the loss",
        "  not in the loss  <|user|>a?<|reply|>",
        "  in the loss      b<|end|>",
        "  not in the loss  <|user|>c?<|reply|>",
        "  in the loss      d<|end|>",
        "",
        "as one batch: input_ids (1, 12), labels (1, 12), attention_mask (1, 12)",
    ]
    sets = [f"data.path={tmp_path / 'rows.jsonl'}", "model.config.num_hidden_layers=1"]
    words = [word for one in sets for word in ("--set", one)]
    result = CliRunner().invoke(cli, ["validate", "supervised_tuning", *words])

    assert result.stdout.splitlines() == [f"supervised_tuning: {line}", "supervised_tuning: valid"]
