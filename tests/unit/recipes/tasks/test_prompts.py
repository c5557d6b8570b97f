"""Tasks in which the model answers prompts: the teacher, and what the Trainer gets."""

import json

import pytest
import torch

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
from mfwrap.runner import RecipeError
from mfwrap.runner.preview import preview
from mfwrap.runner.rehearsal import rehearse
from support.hub import client_of, serving
from support.recipe_data import LANGUAGE, recipe_of, trainer_of
from support.recipe_texts import SMALL_LLAMA

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")

TEACHER = {"config": SMALL_LLAMA | {"hidden_size": 32}, "tokenizer": "bytes"}
SHORT = {"max_completion_length": 4, "per_device_train_batch_size": 4, "logging_steps": 1}


def taught(data, teacher=None, **keywords):
    """Return a recipe with a teacher."""
    section = json.dumps(TEACHER if teacher is None else teacher)
    return "distillation", data, f"teacher={section}", SHORT | keywords


RAW = "no chat template is applied to prompts that are texts; lists of messages would get it"


@pytest.fixture
def prompts(json_lines):
    """Return the section ``data`` of a file with prompts."""
    return json_lines(
        [{"prompt": f"{n} and {n}?", "site": "web", "completion": "a"} for n in range(16)]
    )


@pytest.mark.slow
def test_a_model_learns_from_its_teacher(prompts):
    """The divergence from the teacher falls; the teacher stays as it is, and evaluates."""
    task, data, teacher, training = taught(prompts, max_steps=30, learning_rate=1e-2)
    trainer = trainer_of(task, data, teacher, **training)
    before = [weight.clone() for weight in trainer.teacher_model.parameters()]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(map(torch.equal, before, trainer.teacher_model.parameters()))
    assert not trainer.teacher_model.training


def test_answers_need_an_end(prompts, tmp_path):
    """A tokenizer without an end token cannot say when an answer is over."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    model = LANGUAGE | {"tokenizer": str(tmp_path)}
    task, data, teacher, training = taught(prompts)
    with pytest.raises(RecipeError, match=r"model\.tokenizer: must have .* an end token"):
        trainer_of(task, data, teacher, model=model, **training)


def test_a_teacher_has_the_same_tokens(prompts):
    """Another number of tokens is one sentence."""
    other = {"config": SMALL_LLAMA | {"vocab_size": 300}, "tokenizer": "bytes"}
    task, data, teacher, training = taught(prompts, other)
    with pytest.raises(
        RecipeError, match=r"teacher\.config: expected a model with 261 tokens, .*300"
    ):
        trainer_of(task, data, teacher, **training)


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ("teacher.path=runs/no/model", r"teacher\.path: must be an existing folder, or a name on "),
        ("teacher={pth: a}", r"teacher\.pth: unknown key; did you mean 'path'"),
        ("teacher=null", r"teacher: required by the task distillation, but missing"),
    ],
)
def test_wrong_teachers(prompts, teacher, says):
    """A missing teacher or folder is found when the recipe is read."""
    with pytest.raises(RecipeError, match=says):
        recipe_of("distillation", prompts, teacher)


def test_a_teacher_on_the_hub(prompts):
    """It is not loaded to try the first step."""
    recipe = recipe_of("distillation", prompts, "teacher.path=org/name")

    with serving() as hub, client_of(hub.url):
        assert rehearse(recipe).startswith("`teacher.path` names a model on the hub")
        hub.refuses = lambda _: True
        with pytest.raises(RecipeError, match=r"teacher\.path: must name what .* does not answer"):
            rehearse(recipe)


def test_prompts_are_shown(prompts, json_lines):
    """The preview has the tokens of each prompt, and what TRL passes to a reward."""
    reward = "reward.type=think_format_reward"
    lines = preview(recipe_of("reward_tuning", prompts, reward, num_generations=2), 1)

    assert lines[:3] == ["16 rows (8 to train on, 8 held out)", RAW, ""]
    assert lines[3].startswith("row 1: prompt ")
    assert lines[5:] == ["  for the reward   site: 'web'", ""]
    turn = [{"role": "user", "content": "Is it?"}]
    data = json_lines([{"prompt": turn}] * 4, "chat.jsonl")
    lines = preview(recipe_of("distillation", data, f"teacher={json.dumps(TEACHER)}"), 1)
    assert lines[2:] == ["row 1: prompt 8 tokens", "  prompt           <|user|>Is it?<|reply|>", ""]


def test_rewards_of_the_first_step(prompts):
    """The rehearsal says what the answers of its step got, for example nothing at all."""
    said = []
    # No answer of four tokens has forty words.
    reward = "reward={type: get_repetition_penalty_reward, ngram_size: 40}"
    recipe = recipe_of("reward_tuning", prompts, reward, **SHORT, num_generations=2)
    assert rehearse(recipe, said.append) is None

    says = "mean reward of the answers of the step, of up to 4 tokens: "
    alike = ", the same for all, which teaches nothing"
    assert said == [RAW, f"{says}repetition_penalty_reward 0 (standard deviation 0{alike})"]


def test_prompts_have_no_targets(prompts):
    """A loss by row needs targets."""
    data = prompts | {"row_losses": True}
    with pytest.raises(RecipeError, match=r"data\.row_losses: must be left out, because the rows"):
        recipe_of("distillation", data, f"teacher={json.dumps(TEACHER)}", model=LANGUAGE)
