"""Rewards of TRL and of the user's own: what they get, what they return, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from mfwrap.cli import main
from mfwrap.runner import RecipeError, parse_recipe
from mfwrap.runner.preview import preview
from mfwrap.runner.rehearsal import rehearse
from mfwrap.runner.run import build_trainer
from support.recipe_data import LANGUAGE
from support.recipe_texts import recipe_text

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

MODULE = """
def long_ones(completions, site, scale=1.0):
    return [scale * len(text) * (name == "web") for text, name in zip(completions, site)]


class Judge:
    def __init__(self, limit):
        self.limit = limit

    def __call__(self, prompts, completion_ids, **others):
        assert {"site", "trainer_state", "log_metric"} <= set(others)
        return [None if len(ids) > self.limit else 1 for ids in completion_ids]


def capitals(completions):
    return [sum("A" <= one <= "Z" for one in text) for text in completions]


def wrong(completions):
    return 0.5


def too_few(completions):
    return [1.0]


def silent(completions):
    return [None for _ in completions]


def ones(completions):
    return [1.0 for _ in completions]


def infinite(completions):
    return [float("-inf") if number == 1 else 1.0 for number, _ in enumerate(completions)]


def of_messages(completions):
    return [float(len(one[0]["content"])) for one in completions]


def failing(completions):
    return [completions[len(completions)]]


def inverse(completions, site, log_metric=None):
    return [1 / (len(text) - (name == "web")) for text, name in zip(completions, site)]


def by_number(completions):
    return {number: 1.0 for number, _ in enumerate(completions)}


def of_answers(completions, answer):
    return [1.0 for _ in completions]


def of_no_answers(answers, site):
    return [1.0 for _ in answers]


def of_sites(completions, site):
    return [float(name == "web") for name in site]


class OfSites:
    def __call__(self, completions, site):
        return of_sites(completions, site)


def of_completion(completions, completion):
    return [1.0 for _ in completions]


def of_stie(completions, stie):
    return [1.0 for _ in completions]


class OfStie:
    def __init__(self):
        raise RuntimeError("built")

    def __call__(self, completions, stie):
        return of_stie(completions, stie)


def texts(completions):
    return ["1.0" for _ in completions]


async def awaited(completions):
    return [1.0 for _ in completions]


class Awaited:
    async def __call__(self, completions):
        return [1.0 for _ in completions]


def hidden(completions):
    return awaited(completions)
"""
TRAINING = {
    "max_steps": 1,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_completion_length": 4,
    "logging_steps": 1,
}


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Write data and a module; return a function of rewards that returns the text of a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(MODULE)
    rows = [{"prompt": f"{n}?", "site": ["web", "books"][n % 2]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(reward, **training) -> str:
        sections = {"model": LANGUAGE, "data": {"path": "rows.jsonl"}, "reward": reward}
        text = recipe_text(
            task="reward_tuning", model=None, data=None, training=TRAINING | training
        )
        return text + "".join(f"{key}: {json.dumps(one)}\n" for key, one in sections.items())

    return write


RAW = "no chat template is applied to prompts that are texts; lists of messages would get it"


def checked(text, *, allow_code=True):
    """Return a checked recipe beside the module."""
    return parse_recipe(text, "r.yaml", allow_code=allow_code)


def refusal(text) -> str:
    """Return the one line with which a recipe is refused."""
    with pytest.raises(RecipeError) as error:
        build_trainer(checked(text))
    assert "\n" not in str(error.value)
    return str(error.value)


PASSED = {
    "prompts": ["a?", "a?", "b?"],
    "completions": ["", "xy", "xyz"],
    "completion_ids": [[], [1, 2], [1, 2, 3]],
    "site": ["web", "web", "books"],
    "trainer_state": None,
    "log_extra": None,
    "log_metric": None,
}
"""What TRL passes to a reward."""


def test_a_function_gets_what_it_takes(text):
    """A function gets the arguments that it has, from TRL, from the data and from the recipe."""
    (make,) = checked(text({"type": "my_rewards.long_ones", "scale": 2})).make_rewards
    reward = make(["prompt", "site"])

    assert reward(**PASSED) == [0.0, 4.0, 0.0]
    assert reward.__name__ == "long_ones"


def test_a_class_is_built_with_its_arguments(text):
    """An object of a class with ``**others`` gets all arguments; None is no number."""
    (make,) = checked(text({"type": "my_rewards.Judge", "limit": 2})).make_rewards

    assert make(["prompt", "site"])(**PASSED) == [1.0, 1.0, None]


def test_rewards_of_trl(text):
    """A name without a dot is a function of TRL, which may be built with arguments."""
    entries = [
        {"type": "get_soft_overlong_punishment", "max_completion_len": 4, "soft_punish_cache": 2},
        {"type": "think_format_reward"},
    ]
    punishment, form = (make([]) for make in checked(text(entries)).make_rewards)

    assert punishment(completion_ids=[[1] * n for n in (2, 3, 4)]) == [0.0, -0.5, -1.0]
    assert form([[{"content": "<think>a</think>b"}], [{"content": "b"}]]) == [1.0, 0.0]


@pytest.mark.slow
def test_an_own_reward_is_maximized(text):
    """GRPO raises the reward: here, answers get more capital letters."""
    recipe = checked(
        text(
            {"type": "my_rewards.capitals"},
            max_steps=30,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=12,
            learning_rate=5e-2,
            lr_scheduler_type="constant",
            use_cpu=True,
        )
    )
    trainer, _ = build_trainer(recipe)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]

    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ([], "reward: expected at least one reward, got an empty list"),
        ({"scale": 1}, "reward.type: required, but missing; expected one of ['accuracy_reward'"),
        ({"type": "think_format"}, "did you mean 'think_format_reward'?"),
        ({"type": "think_format_reward", "limit": 1}, "reward.limit: unknown key"),
        ([{"type": "get_repetition_penalty_reward", "n": 1}], "reward.0.n: unknown key"),
        ({"type": "my_rewards.long_one"}, "has no 'long_one'; did you mean 'long_ones'?"),
        ({"type": "my_rewards.long_ones", "scael": 1}, "reward.scael: unknown key; did you mean "),
        ({"type": "my_rewards.Judge"}, "reward.limit: required, but missing"),
        (
            {"type": "my_rewards.of_answers"},
            "has the argument 'answer', which is neither set here nor a column of both the ",
        ),
        ({"type": "my_rewards.of_answers"}, "the held-out rows; known: ['completion_ids', "),
        ({"type": "my_rewards.of_stie"}, "the held-out rows; did you mean 'site'?"),
        (
            [{"type": "my_rewards.ones"}, {"type": "my_rewards.awaited"}],
            "reward.1.type: my_rewards.awaited: an async function is not supported; call what is ",
        ),
        ({"type": "my_rewards.Awaited"}, "reward.type: my_rewards.Awaited: an async function is "),
        (
            {"type": "accuracy_reward"},
            "reward.type: accuracy_reward has the argument 'solution', which is neither set",
        ),
        (
            {"type": "my_rewards.of_no_answers"},
            "must have the argument `completions`, the answers of the model, got answers, site",
        ),
        # It takes `completions` already, which is similar.
        ({"type": "accuracy_reward"}, "the held-out rows; known: ['"),
    ],
)
def test_what_is_refused(text, reward, says):
    """An error is one sentence that names the key."""
    assert says in refusal(text(reward))


def test_a_column_that_is_not_passed(text, tmp_path):
    """It is there, so the sentence says how to get it."""
    written = text({"type": "my_rewards.of_completion"})
    rows = [{"prompt": f"{n}?", "completion": "a"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    said = "'completion', a column that TRL does not pass to rewards; rename it, as in data.columns"
    assert said in refusal(written)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ({"type": "my_rewards.of_answers"}, "my_rewards.of_answers has the argument 'answer', "),
        ({"type": "my_rewards.OfSites"}, None),
        ({"type": "my_rewards.OfStie"}, "my_rewards.OfStie has the argument 'stie', which is "),
        ({"type": "accuracy_reward"}, "accuracy_reward has the argument 'solution', which is "),
    ],
)
def test_the_preview_checks_columns(text, reward, says):
    """Showing the data checks what a reward takes, too, without building an object for that."""
    recipe = checked(text(reward))
    if says is None:
        assert preview(recipe, 1)
        return
    with pytest.raises(RecipeError) as error:
        preview(recipe, 1)
    assert says in str(error.value)
    assert str(error.value) == refusal(text(reward))


def test_fewer_prompts_than_a_batch_has(text):
    """TRL would train nothing: a batch needs as many prompts as it has groups of answers."""
    found = refusal(text({"type": "my_rewards.ones"}, per_device_train_batch_size=64))
    number = TRAINING["num_generations"]
    says = f"training.per_device_train_batch_size: expected at most {10 * number} answers in a"
    assert says in found
    assert "the 10 training prompts, got 64; or add prompts" in found


def test_a_column_that_only_the_training_rows_have(text, tmp_path):
    """A reward judges held-out answers, too, so their rows need its columns."""
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a?"}\n{"prompt": "b?"}\n')
    found = text({"type": "my_rewards.long_ones"})
    found = found.replace('"rows.jsonl"', '"rows.jsonl", "eval_path": "held_out.jsonl"')

    says = (
        "has the argument 'site', which is neither set here nor a column of both the training and "
    )
    assert says in refusal(found)


def test_values_that_rows_lack(text, tmp_path):
    """A reward gets None for a value that a row lacks; the run and both commands say so once."""
    rows = [{"prompt": f"{n}?", "site": "web", "other": "a"} for n in range(12)]
    rows[4] = {"prompt": "4?"}
    rows[7] = {"prompt": "7?", "site": None}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rewards = [{"type": "my_rewards.of_sites"}, {"type": "my_rewards.ones"}]
    recipe = checked(text(rewards))
    line = "`site`, which the reward takes, is missing in 2 of 12 rows, first at rows.jsonl:5"
    said = []
    build_trainer(recipe, say=said.append)
    tried = []
    rehearse(recipe, tried.append)

    assert [one for one in said if "missing" in one] == [line]
    assert [one for one in tried if "missing" in one] == [line]
    split = "12 rows (10 to train on, 2 held out)"
    assert preview(recipe, 1)[:4] == [line, split, RAW, ""]


def test_a_column_that_a_class_takes(text, tmp_path):
    """The arguments of its objects are known before there is one; held-out rows are told apart."""
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a?"}\n{"prompt": "b?", "site": "web"}\n')
    found = text({"type": "my_rewards.OfSites"})
    found = found.replace('"rows.jsonl"', '"rows.jsonl", "eval_path": "held_out.jsonl"')
    said = []
    build_trainer(checked(found), say=said.append)

    says = "`site`, which the reward takes, is missing in 1 of 2 held-out rows, first at held_out."
    assert [one.startswith(says) for one in said if "missing" in one] == [True]


@pytest.mark.parametrize("allow_code", [True, False])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], []])
def test_as_many_weights_as_rewards(text, weights, allow_code):
    """The recipe is refused as it is read, also if the code of the rewards may not run."""
    rewards = [{"type": "my_rewards.capitals"}, {"type": "think_format_reward"}]
    says = rf"expected as many weights as rewards \(2\), got {len(weights)}"

    with pytest.raises(RecipeError, match=f"training.reward_weights: {says}"):
        checked(text(rewards, reward_weights=weights), allow_code=allow_code)
    checked(text(rewards, reward_weights=[1.0, 2.0]), allow_code=allow_code)


def test_sections_belong_to_tasks(text):
    """A reward is needed by its task, and by no other one."""
    assert "reward: required by the task reward_tuning, but missing" in refusal(text(None))
    other = text({"type": "think_format_reward"}).replace("reward_tuning", "causal_lm")
    assert "reward: is not a section of the task causal_lm" in refusal(other)


def test_a_reference_needs_a_checkpoint(text):
    """TRL loads the model from before the training again, so random weights have none."""
    found = refusal(text({"type": "think_format_reward"}, beta=0.1))

    assert "training.beta: expected 0, because TRL loads the reference from `model.path`" in found


@pytest.mark.slow
def test_a_reward_that_judges_no_answer(text, tmp_path):
    """The run ends as any other, and its result has no mean of this reward."""
    rewards = [{"type": "my_rewards.capitals"}, {"type": "my_rewards.silent"}]
    (tmp_path / "r.yaml").write_text(text(rewards))
    with pytest.raises(SystemExit) as left:
        main(["train", "r.yaml", "--allow-code"])
    assert not left.value.code
    (file,) = tmp_path.glob("**/result.json")
    metrics = json.loads(file.read_text())["metrics"]

    assert "eval_rewards/capitals/mean" in metrics
    assert None not in metrics.values()
    assert "eval_rewards/silent/mean" not in metrics


@pytest.mark.parametrize(
    ("command", "name", "says"),
    [
        (
            "validate",
            "wrong",
            "TypeError: my_rewards.wrong must return a list of 4 numbers, one for each ",
        ),
        (
            "train",
            "too_few",
            "4 numbers, one for each completion (or None), got 1: [1.0]",
        ),
        ("validate", "texts", "my_rewards.texts must return numbers (or None), got '1.0' for "),
        (
            "validate",
            "hidden",
            "for each completion (or None), got a coroutine; an async function is not supported; ",
        ),
        (
            "validate",
            "infinite",
            "ValueError: my_rewards.infinite must return finite numbers (or None), got -inf for ",
        ),
        ("validate", "by_number", "my_rewards.by_number must return a list of 4 numbers, one for "),
        ("validate", "failing", "my_rewards.py:44: list index out of range"),
        (
            "validate",
            "of_messages",
            "my_rewards.py:40: string indices must be integers, not 'str'; the completions are ",
        ),
        ("train", "of_messages", "plain strings here, because the prompts are texts, so a "),
        ("train", "failing", "my_rewards.py:44: list index out of range"),
    ],
)
def test_errors_of_a_reward(text, tmp_path, capsys, command, name, says):
    """A wrong result names the function; an error in it names file and line."""
    (tmp_path / "r.yaml").write_text(text({"type": f"my_rewards.{name}"}))
    with pytest.raises(SystemExit) as left:
        main([command, "r.yaml", "--allow-code"])
    lines = capsys.readouterr().err.splitlines()

    assert left.value.code == {"validate": 2, "train": 1}[command]
    assert says in lines[-1]


@pytest.mark.parametrize("name", ["infinite", "texts"])
def test_the_answer_of_a_wrong_reward(text, tmp_path, name):
    """The error names the prompt, its row, and the step; a prompt alone may be in several rows."""
    rows = [{"prompt": f"{n}?", "site": site} for site in ("web", "books") for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer, _ = build_trainer(checked(text({"type": f"my_rewards.{name}"})))
    with pytest.raises((TypeError, ValueError)) as raised:
        trainer.train()
    told = re.search(
        r"an answer to '(\d\?)' \(rows\.jsonl:(\d+)\), after step 0$", str(raised.value)
    )

    assert told is not None
    assert rows[int(told[2]) - 1]["prompt"] == told[1]


def test_a_row_is_told_by_all_its_columns(text):
    """A function that does not take them gets the same row as TRL; without one, none is named."""
    (make,) = checked(text({"type": "my_rewards.infinite"})).make_rewards
    given = []
    reward = make(["prompt", "site"], given.append)
    with pytest.raises(ValueError, match=r"got -inf for 'xy', an answer to 'a\?'$"):
        reward(**PASSED)

    assert given == [{"prompt": "a?", "site": "web"}]


def test_the_answer_for_which_a_reward_fails(text):
    """It is told if others do not fail; a fault of the function itself fails for all of them."""
    (make,) = checked(text({"type": "my_rewards.inverse"})).make_rewards
    passed = {
        "prompts": ["a?", "a?", "b?", "b?"],
        "completions": ["xy", "x", "x", "xy"],
        "site": ["web", "books", "web", "books"],
    }
    reward = make(["prompt", "site"], lambda row: f"rows.jsonl:{row['site']}")
    with pytest.raises(ZeroDivisionError) as raised:
        reward(**passed)
    assert raised.value.__notes__ == [
        "raised for 'x', an answer to 'b?' (rows.jsonl:web), but not for each answer"
    ]
    (make,) = checked(text({"type": "my_rewards.failing"})).make_rewards
    with pytest.raises(IndexError) as raised:
        make(["prompt", "site"])(**passed)
    assert not hasattr(raised.value, "__notes__")


def test_a_reward_of_trl_for_messages(text, tmp_path, capsys):
    """A function of TRL that takes messages says what it has got, too."""
    (tmp_path / "r.yaml").write_text(text({"type": "think_format_reward"}))
    with pytest.raises(SystemExit):
        main(["validate", "r.yaml"])

    assert "plain strings here, because the prompts are texts" in capsys.readouterr().err


def test_what_validate_says_of_rewards(text, tmp_path, capsys):
    """It has the mean of each reward; one that judges no answer, and equal ones, are told."""
    rewards = [{"type": "my_rewards.silent"}, {"type": "my_rewards.ones"}]
    (tmp_path / "r.yaml").write_text(text(rewards))
    with pytest.raises(SystemExit):
        main(["validate", "r.yaml", "--allow-code"])

    assert capsys.readouterr().out.splitlines()[:2] == [
        f"r.yaml: {RAW}",
        (
            "r.yaml: mean reward of the answers of the step, of up to 4 tokens: silent judged none "
            "of them, which teaches nothing, ones 1 (standard deviation 0, the same for all, which "
            "teaches nothing)"
        ),
    ]


@pytest.mark.parametrize("value", [0.3, 0.7, -1.3])
def test_rewards_that_are_the_same_for_all(text, tmp_path, capsys, value):
    """They are told as such, whatever they are, and no answer has an advantage."""
    (tmp_path / "my_rewards.py").write_text(
        f"def same(completions, **_):\n    return [{value}] * len(completions)\n"
    )
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size", "num_generations")
    (tmp_path / "r.yaml").write_text(text({"type": "my_rewards.same"}, **dict.fromkeys(sizes, 8)))
    with pytest.raises(SystemExit):
        main(["validate", "r.yaml", "--allow-code"])
    with pytest.raises(SystemExit):
        main(["train", "r.yaml", "--allow-code"])

    assert "the same for all, which teaches nothing" in capsys.readouterr().out
    (file,) = tmp_path.glob("**/metrics.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {one["frac_reward_zero_std"] for one in records if "frac_reward_zero_std" in one} == {1}
    assert {one["global_norm"] < 1e-9 for one in records if "global_norm" in one} == {True}


def test_rewards_that_are_the_same_for_the_answers_to_each_prompt(text, tmp_path, capsys):
    """They differ from prompt to prompt, and teach nothing, either."""
    (tmp_path / "my_rewards.py").write_text(
        "def long(completions, prompts):\n    return [sum(one.encode()) for one in prompts]\n"
    )
    sizes = {"per_device_train_batch_size": 8, "num_generations": 2}
    (tmp_path / "r.yaml").write_text(text({"type": "my_rewards.long"}, **sizes))
    with pytest.raises(SystemExit):
        main(["validate", "r.yaml", "--allow-code"])

    assert "; the answers to each prompt got the same, which teaches" in capsys.readouterr().out


def test_a_reward_that_takes_messages_for_texts(text, tmp_path, capsys):
    """It raises nothing, so what the completions are is said where all rewards are the same."""
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_rewards.py").write_text(
        "def found(completions, **_):\n    return [float('a' in one) for one in completions]\n"
    )
    recipe = text({"type": "my_rewards.found"}).replace(
        '"tokenizer"', '"chat_template": "chatml", "tokenizer"'
    )
    (tmp_path / "r.yaml").write_text(recipe)
    with pytest.raises(SystemExit):
        main(["validate", "r.yaml", "--allow-code"])

    out = capsys.readouterr().out
    assert "which teaches nothing); the completions are lists of messages here, because" in out
    assert 'the text of one is completion[0]["content"]' in out


def test_one_of_two_rewards_that_is_always_the_same(text, tmp_path, capsys):
    """The log and the page name it, though the other one teaches."""
    rewards = [{"type": "my_rewards.ones"}, {"type": "my_rewards.capitals"}]
    (tmp_path / "r.yaml").write_text(text(rewards, max_completion_length=16))
    for words in (["train", "r.yaml", "--allow-code"], ["report", "runs/r"]):
        with pytest.raises(SystemExit):
            main(words)
    page = (tmp_path / "runs" / "r" / "run.html").read_text()

    assert "All answers got the same reward from ones (1), which teaches nothing." in page


def test_a_slip_in_a_key_of_a_function_that_takes_any(text):
    """It is refused, though the function would take it; a key of its own is passed on."""
    module = Path("my_rewards.py")
    module.write_text(
        "def clean(completions, penalty=-0.5, **others):\n    return [penalty] * len(completions)\n"
    )
    assert "unknown key of my_rewards.clean, which takes any; did you mean 'penalty'?" in refusal(
        text({"type": "my_rewards.clean", "penalti": -0.9})
    )
    checked(text({"type": "my_rewards.clean", "limit": 3}))


def test_no_code_runs_without_the_flag(text):
    """The recipe is checked without the reward, which is named."""
    recipe = checked(text([{"type": "my_rewards.long_ones"}]), allow_code=False)

    assert recipe.make_rewards == ()
    assert recipe.unchecked == {("reward", 0, "type"): "my_rewards.long_ones"}
