"""Numbers of a step are compared by kind, within a relative tolerance."""

import math

import pytest

from mfwrap.comparison.numbers import compare_numbers, is_close
from mfwrap.comparison.recorded_run import read_recorded_run
from support.run_folders import write_lines


def compared(tmp_path, first, second, tolerance=0.0):
    """Return the outcome for step 1 of two runs whose records have these numbers."""
    for name, numbers in (("a", first), ("b", second)):
        write_lines(tmp_path / name / "metrics.jsonl", [{"step": 1, **numbers}])
    runs = [read_recorded_run(tmp_path / name) for name in "ab"]
    return compare_numbers(*runs, 1, tolerance)


@pytest.mark.parametrize(
    ("first", "second", "tolerance", "expected"),
    [
        (1.0, 1.0, 0.0, True),
        (math.nan, math.nan, 0.0, True),
        (math.inf, math.inf, 0.0, True),
        (math.nan, 1.0, 1e9, False),
        (math.inf, 1.0, 1e9, False),
        (1.0, 1.1, 0.1, True),
        (1.0, 1.2, 0.1, False),
        (0.0, 1e-30, 0.5, False),
    ],
)
def test_is_close(first, second, tolerance, expected):
    """Two NaNs are equal; a non-finite number is close to nothing else."""
    assert is_close(first, second, tolerance) == is_close(second, first, tolerance) == expected


def test_a_loss_scale_after_an_overflow(tmp_path):
    """A loss scale that differs because one run overflowed is no cause."""
    first = {"loss": 1.0, "overflow": False, "loss_scale": 2.0}
    found = compared(tmp_path, first, {**first, "overflow": True, "loss_scale": 1.0})
    other = compared(tmp_path, first, {**first, "loss_scale": 1.0})

    assert "loss scale" not in found
    assert found["skipped update"].name == "overflow"
    assert other["loss scale"].values == (2.0, 1.0)


def test_local_norms(tmp_path):
    """The gradient that backward reaches first is named, only if the losses are equal."""
    first = {"loss": 1.0, "global_norm": 2.0, "local_norm": {"x": 1.0, "y": 1.0, "z": 1.0}}
    second = {**first, "global_norm": 3.0, "local_norm": {"x": 2.0, "y": 2.0, "z": 1.0}}
    found = compared(tmp_path, first, second)
    after_the_loss = compared(tmp_path, first, {**second, "loss": 2.0})
    total = compared(tmp_path, first, {**first, "global_norm": 3.0})

    assert (found["gradient"].name, found["gradient"].num_differing) == ("y", 2)
    assert after_the_loss["gradient"].name is None
    assert total["gradient"].name == "global_norm"


def test_norms_that_are_zero_but_for_rounding(tmp_path):
    """Within a tolerance, the norm of a tiny gradient may be any tiny number."""
    first = {"loss": 1.0, "local_norm": {"w": 1.0, "bias": 1e-9, "small": 1e-3}}
    other = {"loss": 1.0, "local_norm": {"w": 1.0, "bias": 3e-9, "small": 1e-3}}
    small = {"loss": 1.0, "local_norm": {"w": 1.0, "bias": 1e-9, "small": 2e-3}}

    assert compared(tmp_path, first, other, 1e-3)["gradient"] is None
    assert compared(tmp_path, first, other)["gradient"].name == "bias"
    assert compared(tmp_path, first, small, 1e-3)["gradient"].name == "small"


def test_a_file_of_a_rank_that_does_not_exist(tmp_path):
    """A file whose name has an absurd rank leaves the mean loss out; the comparison ends."""
    write_lines(tmp_path / "b" / f"metrics_rank{10**18}.jsonl", [{"step": 1, "loss": 3.0}])
    found = compared(tmp_path, {"loss": 1.0, "loss_scale": 2.0}, {"loss": 1.0, "loss_scale": 2.0})

    assert found == {"loss scale": None}


def test_different_numbers_of_ranks(tmp_path):
    """The mean loss of all ranks is compared."""
    write_lines(tmp_path / "b" / "metrics_rank1.jsonl", [{"step": 1, "loss": 3.0}])

    assert compared(tmp_path, {"loss": 2.0}, {"loss": 1.0}) == {"loss": None}
    assert compared(tmp_path, {"loss": 1.0}, {"loss": 1.0})["loss"].values == (1.0, 2.0)
