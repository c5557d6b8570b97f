"""Numbers outside of their ranges are errors that state the range."""

import pytest

from mfwrap.runner import RecipeError
from support.recipe_data import recipe_of
from support.recipe_texts import message


@pytest.mark.filterwarnings("ignore")  # those that TRL emits
@pytest.mark.parametrize(
    ("task", "sections"),
    [("reward_tuning", ["reward={type: think_format_reward}"]), ("preference_tuning", [])],
)
def test_beta(tmp_path, task, sections):
    """A negative weight of the distance from the reference is refused."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    data = {"path": str(tmp_path / "rows.jsonl")}
    recipe_of(task, data, *sections, beta=0.5)
    with pytest.raises(RecipeError, match=r"training\.beta: expected a number >= 0, got -1"):
        recipe_of(task, data, *sections, beta=-1)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("per_device_train_batch_size", 0, "expected a number >= 1, got 0"),
        ("adam_beta1", 1, "expected a number < 1, got 1"),
        ("max_steps", 10**13, "expected a number <= 1000000000000, got 10000000000000"),
        ("label_smoothing_factor", ".nan", "expected a number that is not nan, got nan"),
    ],
)
def test_a_number_out_of_range(key, value, says):
    """The error names the key, its range and the number."""
    assert message(f"training.{key}={value}") == f"--set training.{key}: {says}"


@pytest.mark.filterwarnings("ignore")  # those that TRL emits
@pytest.mark.parametrize("key", ["max_completion_length", "num_iterations"])
def test_answers_and_their_updates_are_positive(tmp_path, key):
    """A training that samples answers is refused before its first step."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    data, reward = {"path": str(tmp_path / "rows.jsonl")}, "reward={type: think_format_reward}"
    with pytest.raises(RecipeError, match=rf"training\.{key}: expected a number >= 1, got 0"):
        recipe_of("reward_tuning", data, reward, **{key: 0})
