"""Each finding is told in a plain sentence."""

import pytest

from mfwrap.comparison.comparison import Comparison, Setting, Steps
from mfwrap.comparison.differences import Difference, Row
from mfwrap.comparison.sentences import sentences


def told(*differences, causes=(), **others):
    """Return the sentences about a comparison of two runs of nine steps."""
    fields = {
        "names": ("a", "b"),
        "tolerance": 0.0,
        "steps": (1, 2, 3),
        "recorded": (Steps(1, 9), Steps(1, 9)),
        "num_ranks": (1, 1),
        "compared": ("random numbers", "data", "loss", "gradient", "weight"),
        "last_equal": {},
        "first_of_any_size": None,
        "first_later": {},
        "settings": (),
    }
    values = fields | {"differences": differences, "causes": causes} | others
    return list(sentences(Comparison(**values)))


def test_equal():
    """Equal runs are equal in the steps that both recorded."""
    assert told() == ["a and b do not differ in the 3 steps from 1 to 3 that both recorded."]
    assert "do not differ by more than 0.001 in step 4" in told(tolerance=1e-3, steps=(4,))[0]
    lengths = told(recorded=(Steps(1, 3), Steps(1, 9)))
    assert lengths[-1] == "a has records of steps 1 to 3, b of steps 1 to 9."


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            Difference(step=3, kind="loss", name="loss", values=(0.5, 0.25), ranks=(1,)),
            "the loss differs on rank 1 (0.5 in a, 0.25 in b).",
        ),
        (
            Difference(step=3, kind="gradient", name="w", num_compared=6, relative=0.02),
            "the gradients differ: w alone, of 6 (relative difference about 0.02).",
        ),
        (
            Difference(step=3, kind="gradient", name="w", num_differing=2, num_compared=6),
            "the gradients differ: 2 of 6, first w.",
        ),
        (
            Difference(step=3, kind="weight", num_differing=6, num_compared=6),
            "the weights differ: all 6.",
        ),
    ],
)
def test_first_difference(found, expected):
    """The first sentence has the step, and what differs first."""
    assert told(found)[0] == f"a and b: step 3 is the first step that differs. There, {expected}"


def test_starts():
    """Initial weights, and weights at a resume, are told as such."""
    initial = Difference(step=0, kind="weight", num_differing=2, num_compared=2, at_start=True)
    resumed = Difference(step=5, kind="weight", name="w", num_compared=2, at_start=True)

    assert told(initial) == ["a and b: the initial weights differ: all 2."]
    expected = "a and b: after step 5, where a training started, the weights differ: w alone, of 2."
    assert told(resumed) == [expected]
    assert told(resumed, compared=("loss",), first_later={"weight": 6}) == [expected]


def test_causes():
    """What differed before is told with its first step, its values or its rows."""
    causes = (
        Difference(step=1, kind="random numbers", name="host"),
        Difference(step=2, kind="data", name="x", rows=tuple(Row(0, 0, r) for r in range(7))),
        Difference(step=3, kind="learning rate", values=(0.125, 0.25)),
        Difference(step=3, kind="loss scale", values=(2.0, 4.0)),
    )
    lines = told(Difference(step=3, kind="loss", name="loss"), causes=causes)

    assert lines[1] == "The random numbers differ from the start of step 1 on."
    assert lines[2].startswith("The data differ from step 2 on: x; row 0 of micro-batch 0 of rank")
    assert lines[2].endswith(" and 2 more.")
    assert lines[3] == "The learning rate differs from step 3 on: 0.125 and 0.25."
    assert lines[4] == "The loss scale after step 3 differs: 2.0 and 4.0."


def test_rows():
    """Rows are told alone, all together, or by the run that has them."""
    rows = (Row(0, 0, 0), Row(0, 0, 1))
    loss = Difference(step=3, kind="loss", name="loss")
    causes = [
        Difference(step=3, kind="data", name="x", rows=rows, num_rows=3),
        Difference(step=3, kind="data", name="x", rows=rows, num_rows=2),
        Difference(step=3, kind="data", only_in=(rows[:1], ())),
        Difference(step=3, kind="data", only_in=(rows[:1], rows[1:])),
    ]
    begin, row = "The data differ from step 3 on", "of micro-batch 0 of rank 0"

    assert [told(loss, causes=(cause,))[1] for cause in causes] == [
        f"{begin}: x; row 0 {row}, row 1 {row}.",
        f"{begin}: x; all 2 rows.",
        f"{begin}; only in a: row 0 {row}.",
        f"{begin}; only in a: row 0 {row}; only in b: row 1 {row}.",
    ]


def test_tolerance():
    """Within a tolerance, nothing is told to be equal without it."""
    weight = Difference(step=3, kind="weight", name="w", num_compared=2)
    equal = {"gradient": 3, "loss": 3}
    lines = told(weight, last_equal=equal, tolerance=0.01)

    assert "Equal within 0.01 up to step 3: losses and gradients." in lines
    assert any("gradients of the step are equal within 0.01: the update or" in x for x in lines)


def test_conclusions():
    """What follows from the order of a step is said only if the records show it."""
    loss = Difference(step=3, kind="loss", name="loss")
    equal = {"weight": 2, "data": 3, "random numbers": 3}
    assert any(
        "the forward pass or the loss itself" in each for each in told(loss, last_equal=equal)
    )
    assert not any("forward pass" in each for each in told(loss, last_equal={**equal, "data": 2}))
    weight = Difference(step=3, kind="weight", name="w", num_compared=2)
    lines = told(weight, last_equal={"gradient": 3})
    assert "The gradients of the step are equal: the update or something after it differs." in lines


def test_notes():
    """Settings, ranks and missing records are told."""
    lines = told(
        settings=(Setting("seed", (1, None)),),
        num_ranks=(1, 2),
        compared=("loss", "gradient", "weight"),
    )

    assert "Settings that differ: seed (1 and not set)." in lines
    assert any(line.startswith("Numbers of ranks: 1 and 2.") for line in lines)
    assert any("Not recorded in both runs: data." in line for line in lines)


def test_what_is_recorded_only_later():
    """Weights and fingerprints of later steps are not told to be missing."""
    later = {"weight": 10, "data": 5, "random numbers": 5}
    lines = told(Difference(step=3, kind="loss"), compared=("loss",), first_later=later)[1:]

    every = "on; step_interval=1 records each step."
    first, second, third = lines
    assert first == (
        "Not recorded in the compared steps: random numbers and data, which both runs have from "
        f"step 5 {every}"
    )
    assert second.endswith(f": weights, which both runs have from step 10 {every}")
    assert third.startswith("Not recorded in both runs: gradients. TrainingStateMonitor records ")


def test_causes_alone():
    """Runs with equal results that were given something else are not told to be equal."""
    scale = Difference(step=1, kind="loss scale", values=(2.0, 4.0))

    assert told(causes=(scale,))[0] == (
        "a and b have the same results in the 3 steps from 1 to 3 that both recorded, but their "
        "steps were not given the same."
    )
