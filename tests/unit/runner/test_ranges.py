"""Numbers outside of their ranges are errors that state the range."""

import pytest

from support.recipe_texts import message


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
