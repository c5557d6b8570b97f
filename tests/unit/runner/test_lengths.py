"""A run says how many rows `training.max_length` leaves out, and how many it cuts."""

import json
import re

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from mfwrap.runner import RecipeError, run_recipe
from mfwrap.runner.preview import preview
from mfwrap.runner.rehearsal import rehearse
from mfwrap.runner.run import build_trainer
from support.recipe_data import recipe_of
from support.recipe_texts import SMALL_LLAMA

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

COMPLETIONS = (
    "of prompts and completions; the completions count in the loss; no chat template is applied to "
    "prompts that are texts; data.columns={instruction: prompt, output: completion} would apply it"
)
LENGTH = 16
"""Each byte is a token, and the end of an answer is one more."""


def completions(*sizes):
    """Return rows with prompts and completions of these numbers of tokens."""
    return [{"prompt": "p" * one, "completion": "c" * (other - 1)} for one, other in sizes]


ROWS = completions((4, 4), (16, 4), (20, 9), (14, 4), (12, 4), (4, 40), (2, 3))
"""Seven rows, of which two are left out, two are cut, and one fits exactly."""

PAIRS = [
    {"prompt": "p" * one, "chosen": "c" * (two - 1), "rejected": "r" * (three - 1)}
    for one, two, three in ((4, 4, 4), (16, 4, 4), (12, 4, 2), (12, 2, 5), (12, 5, 2))
]
"""Five rows, of which one is left out, two are cut, and one fits exactly."""


@pytest.fixture
def section(tmp_path):
    """Return a function that writes rows to files, and returns the section ``data``."""

    def write(rows, held_out=None, **keys):
        for name, lines in (("rows.jsonl", rows), ("held_out.jsonl", held_out)):
            if lines is not None:
                (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        if held_out is not None:
            keys["eval_path"] = str(tmp_path / "held_out.jsonl")
        return {"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0, **keys}

    return write


def said_about(recipe):
    """Return what a run says about the lengths of its rows."""
    said = []
    build_trainer(recipe, say=said.append)
    return [line for line in said if "max_length" in line]


def test_rows_that_are_left_out_and_cut(section):
    """The numbers are those of the training rows, and those of the held-out rows."""
    recipe = recipe_of("supervised_tuning", section(ROWS, held_out=ROWS[:2]), max_length=LENGTH)

    why = "because no token of an answer would be left"
    assert said_about(recipe) == [
        f"training.max_length=16 leaves out 2 of 7 training rows, {why}, and cuts up to 3 more",
        f"training.max_length=16 leaves out 1 of 2 held-out rows, {why}",
    ]


def test_rows_that_are_only_cut(section):
    """A row that fits exactly cannot be told from a row that was cut."""
    recipe = recipe_of("supervised_tuning", section(ROWS[3:]), max_length=LENGTH)

    assert said_about(recipe) == ["training.max_length=16 cuts up to 3 of 4 training rows"]


@pytest.mark.parametrize(
    "training",
    [
        {"max_length": 45},
        {"max_length": None},
        {"max_length": LENGTH, "packing": True, "packing_strategy": "wrapped"},
    ],
)
def test_nothing_is_said(section, training):
    """Nothing is said if all rows fit, and of packed rows."""
    recipe = recipe_of("supervised_tuning", section(ROWS, held_out=ROWS), **training)

    assert said_about(recipe) == []


def test_held_out_rows_that_are_not_packed(section):
    """Held-out rows may be cut although training rows are packed."""
    training = {"packing": True, "packing_strategy": "wrapped", "eval_packing": False}
    data = section(ROWS, held_out=ROWS[3:])
    recipe = recipe_of("supervised_tuning", data, max_length=LENGTH, **training)

    assert said_about(recipe) == ["training.max_length=16 cuts up to 3 of 4 held-out rows"]


def test_preferences(section):
    """A pair is left out if its prompt leaves no room, and cut if an answer is too long."""
    said = [
        said_about(recipe_of("preference_tuning", section(rows), max_length=LENGTH))
        for rows in (PAIRS, PAIRS[2:])
    ]

    why = "because the prompt alone fills it"
    assert said == [
        [f"training.max_length=16 leaves out 1 of 5 training rows, {why}, and cuts 2 more"],
        ["training.max_length=16 cuts 2 of 3 training rows"],
    ]


def test_no_row_is_left(section):
    """If no answer is left at all, the error names the key."""
    recipe = recipe_of("supervised_tuning", section(ROWS[1:3]), max_length=LENGTH)

    with pytest.raises(RecipeError, match=r"^r:\d+: training\.max_length: expected a length that"):
        build_trainer(recipe)


def test_a_stream(section):
    """How many rows of a stream are cut is not known beforehand."""
    file = section(ROWS)["path"]
    data = {"type": "datasets", "path": "json", "data_files": file, "streaming": True}
    recipe = recipe_of("supervised_tuning", data, max_length=LENGTH, max_steps=1)

    assert said_about(recipe) == []


def test_commands_that_prepare_only_the_first_rows(section):
    """`mfwrap validate` and `mfwrap data` say which rows the line is about."""
    recipe = recipe_of("supervised_tuning", section(ROWS[:2] * 600), max_length=LENGTH, max_steps=1)
    line = (
        "training.max_length=16 leaves out 500 of the first 1,000 training rows, because no token "
        "of an answer would be left"
    )
    said = []
    rehearse(recipe, said.append)

    assert said == [f"1,200 rows {COMPLETIONS}", line]
    assert preview(recipe, 1)[:2] == said


@pytest.mark.parametrize(
    ("length", "rotary", "says"),
    [
        (64, {}, None),
        (65, {}, "warning: training.max_length=65 is more than the 64 positions with which "),
        (65, {"rope_type": "linear", "factor": 2.0}, None),
    ],
)
def test_positions_that_were_not_trained(section, tmp_path, length, rotary, says):
    """A checkpoint with rotary positions has no limit, but its training had one."""
    config = AutoConfig.for_model(**SMALL_LLAMA, vocab_size=261)  # 64 positions
    config.rope_parameters = config.rope_parameters | rotary
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "tokenizer": "bytes"}
    rows = section(ROWS[:4])
    said = said_about(
        recipe_of("supervised_tuning", rows, model=model, max_length=length, packing=False)
    )

    assert [line[: len(says or "")] for line in said] == ([] if says is None else [says])


TABLE = {
    "model_type": "gpt2",
    "n_positions": 32,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 1,
}
"""A model with a table of 32 positions."""
PROMPTS = [{"prompt": "p" * size} for size in (3, 20, 7, 5)]


def answering(task, data, most, model):
    """Return a recipe whose model, or whose teacher, is given."""
    training = {"max_completion_length": most, "max_steps": 1, "eval_strategy": "no"}
    if task == "distillation":
        teacher = f"teacher={json.dumps(model)}"
        return recipe_of(task, data, teacher, per_device_train_batch_size=2, **training)
    reward = "reward={type: get_repetition_penalty_reward, ngram_size: 3}"
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2}
    return recipe_of(task, data, reward, model=model, **sizes, **training)


def said_of_answers(recipe, how):
    """Return what a run, or `mfwrap validate`, says about positions."""
    said = []
    (rehearse if how == "rehearse" else run_recipe)(recipe, say=said.append)
    return [line for line in said if "positions" in line]


@pytest.mark.parametrize("how", ["rehearse", "run"])
@pytest.mark.parametrize(
    ("task", "name"), [("reward_tuning", "model"), ("distillation", "teacher")]
)
def test_answers_beyond_a_table_of_positions(section, tmp_path, monkeypatch, how, task, name):
    """A long prompt and the longest answer must fit, not only those that `validate` tries."""
    monkeypatch.chdir(tmp_path)
    model = {"config": TABLE, "tokenizer": "bytes"}
    says = (
        "training.max_completion_length: expected an integer <= 12, because a prompt has 20 of the "
        f"32 positions of the {name}, got 20"
    )
    with pytest.raises(RecipeError, match=re.escape(says)):
        said_of_answers(answering(task, section(PROMPTS), 20, model), how)
    assert said_of_answers(answering(task, section(PROMPTS), 12, model), how) == []


def test_a_prompt_or_an_answer_beyond_a_table_of_positions(section, tmp_path, monkeypatch):
    """An answer alone is refused as the recipe is read, a prompt alone with its text."""
    monkeypatch.chdir(tmp_path)
    model = {"config": TABLE, "tokenizer": "bytes"}
    says = "training.max_completion_length: expected an integer < 32, the number of positions of "
    with pytest.raises(RecipeError, match=says):
        answering("reward_tuning", section(PROMPTS), 32, model)
    says = (
        "data: must have prompts of fewer tokens than the 32 positions of the teacher, got 32 "
        "tokens in 'pppp"
    )
    long = section([{"prompt": "p"}, {"prompt": "p" * 32}])
    with pytest.raises(RecipeError, match=says):
        said_of_answers(answering("distillation", long, 4, model), "run")


@pytest.mark.parametrize("how", ["rehearse", "run"])
@pytest.mark.parametrize("task", ["reward_tuning", "distillation"])
@pytest.mark.parametrize("most", [44, 45])
def test_answers_at_positions_that_were_not_trained(
    section, tmp_path, monkeypatch, how, task, most
):
    """A checkpoint with rotary positions has no limit, but its training had one."""
    monkeypatch.chdir(tmp_path)
    config = AutoConfig.for_model(**SMALL_LLAMA, vocab_size=261)  # 64 positions
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "tokenizer": "bytes"}
    said = said_of_answers(answering(task, section(PROMPTS), most, model), how)

    says = f"a prompt of 20 tokens with training.max_completion_length={most} is more than the 64 "
    assert [line.startswith(f"warning: {says}") for line in said] == [True] * (most == 45)
