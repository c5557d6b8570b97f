"""Causes that lie in the learning rate, or in the size of updates."""

import pytest

from mfwrap.callbacks.culprit.judges.course import Shift
from mfwrap.callbacks.culprit.judges.growth import Growth
from mfwrap.callbacks.culprit.judges.rates import RateRise
from support.cause_evidence import HIGH_LOSS, cause, of_the_start, trace


def test_a_rate_far_above_the_rates_before():
    """The rate is the cause at its own step, and of what follows in the next few steps."""
    high = {"rate_rise": RateRise(0.001, 0.3, 1)}
    at_once = cause("learning_rate_spike", trace(high))
    later = cause(steps=trace(high, HIGH_LOSS))

    assert at_once.name == later.name == "learning_rate"
    assert "step 13 was 0.3: it has risen in one step to 300 times" in at_once.explanation
    assert "step 12" in later.explanation
    assert cause(steps=trace(high, {}, {}, HIGH_LOSS)).name == "learning_rate"


def test_a_rate_that_has_stayed_high():
    """It explains what nothing measured does, long after its jump."""
    (jump, *_) = trace({"rate_rise": RateRise(0.001, 0.3, 1)})[-1:]
    dead = {"dead": ("h.1.weight",)}

    found = cause("zero_gradient", trace({}), rank=dead, raised=jump._replace(step=2))

    assert found.name == "learning_rate"
    assert found.explanation.startswith("the learning rate of step 2 was 0.3")
    assert cause("zero_gradient", trace({}), rank=dead).name == "dead_layer"
    alike = {"loss": 30.0, "norms": (9.0, 10.0, 11.0)}
    for raised, name in ((None, "loss"), (jump._replace(step=2), "learning_rate")):
        assert cause("spike", trace(HIGH_LOSS), rank=alike, raised=raised).name == name
        low = {"norms": (1e-3,) * 3, "loss": 0.003}
        fallen = cause("vanishing_gradient", trace({}), rank=low, global_norm=1e-3, raised=raised)
        assert fallen.name == name
    assert jump.rate_lasts(0.3)
    assert jump.rate_lasts(0.02)
    assert not jump.rate_lasts(0.001)
    assert not trace({})[-1].rate_lasts(0.3)


def test_a_rate_that_rises_for_several_steps():
    """The sentence says for how many, and the suggestion names the step before the rise."""
    found = cause("learning_rate_spike", trace({"rate_rise": RateRise(0.001, 0.006, 4)}))
    assert found.name == "learning_rate"
    assert "was 0.006: it has risen over 4 steps to 6 times the rates before" in found.explanation
    assert found.suggestion.endswith("from before step 10")


def test_a_negative_rate():
    """The sign is said, at the step itself and of what follows."""
    found = cause("learning_rate_spike", trace({"lowest_rate": -1e-4}))

    assert found.name == "learning_rate"
    assert "the learning rate of step 13 was -0.0001: with a negative rate" in found.explanation
    assert cause(steps=trace({"lowest_rate": -1e-4}, HIGH_LOSS)).name == "learning_rate"


def test_updates_as_large_as_the_weights():
    """Without a jump of the rate, updates that are too large mean a rate that is too high."""
    large = {"update_ratio": 1.9}
    found = cause("update_spike", trace(large, large, large, {"update_ratio": 1.8}))
    assert found.name == "learning_rate"
    assert "the update of step 10, at learning rate 0.001, changed the weights by 1.9 times" in (
        found.explanation
    )
    later = trace(large, large, large, HIGH_LOSS)
    assert cause(steps=later, rank={"earlier_losses": ()}).name == "learning_rate"
    assert cause(steps=later).name == "data", "the weights have the loss of the step before again"
    assert found.suggestion == "lower the learning rate, or warm it up over more steps"
    huge = {"update_ratio": 120.0}
    found = cause("update_spike", trace(huge, huge, huge, huge))
    assert found.suggestion == "lower the learning rate by orders of magnitude"


@pytest.mark.parametrize(("initial", "is_named"), [(0.25, True), (1e-3, False), (None, False)])
def test_the_rate_that_was_set(initial, is_named):
    """In a warm-up, the sentence also has the rate that the user has set."""
    steps = trace(*[{"update_ratio": 1.9}] * 4)
    found = cause("update_spike", steps, rank={"initial_rate": initial})
    said = "at learning rate 0.001, which the schedule makes of 0.25, changed the weights"

    assert (said in found.explanation) is is_named
    assert ("schedule" in found.explanation) is is_named


@pytest.mark.parametrize(
    ("ratio", "begin", "name"),
    [
        (0.15, of_the_start, "learning_rate"),
        (0.15, tuple, "unknown"),
        (0.06, of_the_start, "unknown"),
        (0.001, of_the_start, "unknown"),
    ],
)
def test_updates_that_were_large_all_along(ratio, begin, name):
    """A loss that stays high after the large first updates; doubtful ones are only mentioned."""
    shift = Shift("loss", 9.4, 269.0, num_steps=2)
    steps = begin(trace(*[{"update_ratio": ratio}] * 5, HIGH_LOSS, HIGH_LOSS))
    found = cause("loss_shift", steps, shift=shift, since=steps[-2].step, is_first=False)
    said = f"changed the weights by {ratio:.3g} times their size each" in found.explanation

    assert found.name == name
    assert "the loss has been about 269 for 2 steps" in found.explanation
    assert said is (ratio > 0.01)
    assert bool(found.suggestion) is said


@pytest.mark.parametrize(("growth", "name"), [(1.0, "unknown"), (1.1, "learning_rate")])
def test_many_large_updates_with_which_a_run_has_learned(growth, name):
    """They have not made the loss rise all at once, unless they have grown."""
    shift = Shift("loss", 9.4, 269.0, num_steps=2)
    steps = trace(*[{"update_ratio": 0.15 * growth**n} for n in range(8)], HIGH_LOSS, HIGH_LOSS)
    found = cause("loss_shift", steps, shift=shift, since=steps[-2].step, is_first=False)

    assert found.name == name
    assert "times their size each" in found.explanation


@pytest.mark.parametrize(
    ("initial", "ratio", "name"),
    [(5e-6, 0.06, "learning_rate"), (5e-6, 0.02, "unknown"), (1e-3, 0.06, "unknown")],
)
def test_a_schedule_that_has_raised_the_rate(initial, ratio, name):
    """A rate above that of the start makes updates suspicious that are large, not only huge."""
    shift = Shift("loss", 9.4, 269.0, num_steps=2)
    steps = trace(*[{"update_ratio": ratio}] * 8, HIGH_LOSS, HIGH_LOSS)
    known = {"shift": shift, "since": steps[-2].step, "is_first": False}
    found = cause("loss_shift", steps, rank={"initial_rate": initial}, **known)

    assert found.name == name
    said = "the schedule has raised the learning rate from 5e-06"
    assert (said in found.explanation) is (name == "learning_rate")


@pytest.mark.parametrize(("ratio", "is_said"), [(0.15, True), (0.06, True), (0.02, False)])
def test_a_spike_after_updates_that_were_large_all_along(ratio, is_said):
    """A high loss comes from them, unless they were small enough to be ordinary."""
    steps = trace(*[{"update_ratio": ratio}] * 4, HIGH_LOSS)
    found = cause(steps=steps, rank={"earlier_losses": (), "loss": 6.0})
    assert ("times their size each" in found.explanation) is is_said


@pytest.mark.parametrize("place", [1, 4])
def test_updates_that_a_rise_has_made_large(place):
    """The updates of the steps of the rise, and those that were skipped, say nothing."""
    shift = Shift("loss", 9.4, 269.0, num_steps=3)
    steps = list(trace(*[{}] * 4, *[{"update_ratio": 0.5}] * 3))
    for number in range(place, 4):
        scores = steps[number].scores._replace(update_ratio=0.5)
        steps[number] = steps[number]._replace(applied=False, scores=scores)
    found = cause("loss_shift", tuple(steps), shift=shift, since=steps[-3].step, is_first=False)
    assert "times their size each" not in found.explanation


def test_a_rate_too_high_from_the_start_also_moves_single_weights_far():
    """The first updates were as large as the weights, before any was unusual."""
    large = trace({"update_ratio": 2.0})[-1]._replace(step=1)
    moved = trace({"num_moved": 3.0})[-1]._replace(step=2)
    assert cause("update_spike", (large, moved)).name == "learning_rate"


def test_updates_that_grow_with_the_gradients_were_not_ordinary_before():
    """Half of a weight's size is too much, also if a later update is twelve times as large."""
    halves = trace(*({"update_ratio": ratio} for ratio in (0.5, 0.4, 0.5, 6.0)))
    norms = (5.0, 4.0, 5.0, 60.0)
    steps = tuple(each._replace(global_norm=n) for each, n in zip(halves, norms, strict=True))
    found = cause("update_spike", steps)
    assert found.name == "learning_rate"
    assert "the update of step 13" in found.explanation


def test_updates_that_were_ordinary_at_first_are_no_sign_of_a_high_rate():
    """The second update of a run may be ruined, too."""
    first = trace({})[-1]._replace(step=1)
    ruined = trace({"update_ratio": 700.0, "num_moved": 8})[-1]._replace(step=2)
    assert "learning rate were ordinary" in cause("update_spike", (first, ruined)).explanation


def test_updates_that_grow():
    """The sentence has the numbers; a growth that began before explains nothing else."""
    growth = Growth(0.004, 0.03, 64)
    found = cause("update_growth", trace({}), growth=growth)
    assert found.name == "update_growth"
    assert "from 0.004 to 0.03 of its size in 64 updates" in found.explanation
    assert cause(growth=growth).name == "data"


def test_updates_before_a_loss_above_that_of_the_start():
    """The largest one is named, though later ones are small beside the weights that it has made."""
    shift = Shift("loss", 4.67, 6.96, num_steps=6, update=0.59)
    steps = trace(*[{"update_ratio": 0.02}] * 5, HIGH_LOSS)
    found = cause("loss_shift", steps, shift=shift, since=steps[0].step, is_first=False)

    assert found.name == "learning_rate"
    said = "the loss of the last 6 steps is 6.96 in the middle, and that of the first ones 4.67"
    assert said in found.explanation
    assert "changed the weights by up to 0.59 times their size" in found.explanation
