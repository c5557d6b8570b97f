"""The kind of a step follows from its scores, the most telling one first."""

import json
import math

import pytest

from mfwrap.callbacks.culprit.judges.course import LossCourse
from mfwrap.callbacks.culprit.judges.kinds import StepKinds
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.callbacks.shared.step_values import StepNumbers, StepValues, numbers_of
from support.cause_evidence import ORDINARY


def scores(num_logits: float = 0.0, **step: float) -> StepScores:
    """Return the scores of a step that is ordinary but for these."""
    return ORDINARY._replace(num_logits=num_logits, **step)


def numbers(norm: float | None, loss: float = 1.0) -> StepNumbers:
    """Return the numbers of a step with this global norm."""
    return numbers_of(1, StepValues(loss=loss, global_norm=norm))


def kinds_after(num_steps: int) -> StepKinds:
    """Return kinds that have followed ordinary steps."""
    kinds = StepKinds(2.0, LossCourse())
    for _ in range(num_steps):
        kinds.follow(numbers(1.0), ORDINARY, applied=True)
    return kinds


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        (scores(), []),
        (scores(num_changed=1, num_risen=1), ["local_norm_spike"]),
        (scores(highest_state=20.0, num_bad_states=0), ["state_spike"]),
        (scores(num_bad_states=1), ["state_spike"]),
        (scores(num_risen=1, num_logits=1), ["local_norm_spike", "attention_logits"]),
        (scores(num_risen=2), ["local_norm_spike"]),
        (scores(num_moved=2), ["update_spike"]),
        (scores(lowest_rate=-1e-6), ["learning_rate_spike"]),
        (scores(num_dead=1), ["zero_gradient"]),
        (scores(num_logits=1), ["attention_logits"]),
    ],
)
def test_the_kinds_of_a_step(found, kinds):
    """The most telling one comes first."""
    assert kinds_after(6).own(found) == kinds


def test_a_warm_up_begins_with_rises_of_the_rate():
    """Within the first five steps a rise of the rate is ordinary, also across a resume."""
    later = StepKinds(2.0, LossCourse())
    later.load_state_dict(json.loads(json.dumps(kinds_after(4).state_dict())))
    for kinds in (kinds_after(4), later):
        found, rate = [], 1e-3
        for _ in range(2):
            rate *= 6
            step = scores(learning_rate=rate, ordinary_rate=rate, num_risen=2)
            kinds.follow(numbers(1.0), step, applied=True)
            found.append(kinds.own(step)[0])
            assert kinds.shared(numbers(1.0), step) is None
        assert found == ["local_norm_spike", "learning_rate_spike"]


@pytest.mark.parametrize(
    ("ratios", "is_found"),
    [((1.1, 1.1), True), ((0.9, 0.9), False), ((15.0, 0.6), True), ((math.nan, 3.0), False)],
)
def test_two_updates_as_large_as_the_weights(ratios, is_found):
    """Their geometric mean decides."""
    kinds = StepKinds(2.0, LossCourse())
    for ratio in ratios:
        kinds.follow(numbers(1.0), ORDINARY._replace(update_ratio=ratio), applied=True)
    assert kinds.own(scores()) == (["update_spike"] if is_found else [])


@pytest.mark.parametrize(
    ("ratios", "most"),
    [
        ([0.2] * 20, 20),
        ([0.14] * 20, 0),
        ([0.2] * 5 + [0.1] + [0.2] * 9, 9),
        ([1 / step for step in range(1, 20)], 6),  # weights that begin at zero
    ],
)
def test_large_updates_in_a_row_are_counted(ratios, most):
    """Also across a resume, and they are no anomaly by themselves."""
    kinds, counts = StepKinds(2.0, LossCourse()), []
    for ratio in ratios:
        state = json.loads(json.dumps(kinds.state_dict()))
        kinds = StepKinds(2.0, LossCourse())
        kinds.load_state_dict(state)
        large = scores(update_ratio=ratio)
        kinds.follow(numbers(1.0), large, applied=True)
        counts.append(kinds.num_large)
        assert kinds.own(large) == []
    assert max(counts) == most


@pytest.mark.parametrize(("norm", "is_spike"), [(1.9, False), (2.1, True), (None, False)])
def test_a_spike_is_far_above_the_usual_norm_in_two_ways(norm, is_spike):
    """By its score, and by its ratio to the usual norm."""
    kinds = kinds_after(6)
    found = kinds.shared(numbers(norm), scores(global_norm=9.0))
    assert found == ("spike" if is_spike else None)
    assert kinds.shared(numbers(norm), scores(global_norm=7.0)) is None


@pytest.mark.parametrize(("num_steps", "norm"), [(2, 61.0), (4, 61.0), (5, 2.1)])
def test_a_spike_among_the_first_norms(num_steps, norm):
    """One of them may have been small by chance."""
    far = scores(global_norm=20.0)
    assert kinds_after(num_steps).shared(numbers(norm), far) == "spike"
    assert kinds_after(min(num_steps, 4)).shared(numbers(59.0), far) is None


@pytest.mark.parametrize(
    ("norm", "score", "is_found"),
    [
        (0.009, -9.0, True),
        (0.011, -9.0, False),
        (0.009, -7.0, False),
        (0.0, math.nan, True),
        (None, math.nan, False),
    ],
)
def test_a_vanishing_gradient_is_far_below_the_usual_norm_in_two_ways(norm, score, is_found):
    """By its score, which a norm of zero does not have, and by its ratio to the usual norm."""
    found = kinds_after(5).shared(numbers(norm), scores(global_norm=score))
    assert found == ("vanishing_gradient" if is_found else None)


@pytest.mark.parametrize(("norm", "is_found"), [(0.009, False), (0.0, True)])
def test_the_first_norm_may_be_of_another_size(norm, is_found):
    """Only a norm of zero says something so early."""
    found = kinds_after(2).shared(numbers(norm), scores(global_norm=-9.0 if norm else math.nan))
    assert found == ("vanishing_gradient" if is_found else None)


@pytest.mark.parametrize(
    ("losses", "is_found"), [([], False), ([3.0] * 20, True), ([0.0, 3.0] * 20, False)]
)
def test_a_loss_of_zero_leaves_nothing_to_learn(losses, is_found):
    """Then a gradient of zero is an anomaly only if such a loss is."""
    kinds = StepKinds(2.0, LossCourse())
    for loss in (*losses, 0.0):
        kinds.follow(numbers(1.0, loss), ORDINARY, applied=True)
    empty = numbers_of(1, StepValues(loss=0.0, global_norm=0.0))
    found = kinds.shared(empty, scores(global_norm=math.nan))
    assert found == ("vanishing_gradient" if is_found else None)


def test_batches_from_which_nothing_is_learned_are_found_once():
    """If they come again and again, they are the nature of the training, also across a resume."""
    kinds, found = StepKinds(2.0, LossCourse()), []
    for step in range(200):
        is_empty = step in {10, 30, 70, 130}
        known = scores(global_norm=math.nan) if is_empty else scores()
        found.append(kinds.shared(numbers(0.0 if is_empty else 1.0), known))
        later = StepKinds(2.0, LossCourse())
        later.load_state_dict(json.loads(json.dumps(kinds.state_dict())))
        kinds = later
    assert [step for step, kind in enumerate(found) if kind is not None] == [10, 130]


def test_growth_of_the_updates_is_the_last_kind():
    """It is an early warning."""
    kinds = StepKinds(2.0, LossCourse())
    for number in range(64):
        growing = ORDINARY._replace(update_ratio=0.004 * 1.05**number)
        kinds.follow(numbers(1.0), growing, applied=True)
    assert kinds.growth is not None
    assert kinds.own(scores()) == ["update_growth"]
    assert kinds.own(scores(num_dead=1)) == ["zero_gradient", "update_growth"]


def test_the_course_of_the_loss():
    """A loss that leaves its course is an anomaly of its step."""
    kinds = kinds_after(20)

    kinds.follow(numbers(1.0, 5.0), ORDINARY, applied=True)
    assert kinds.own(scores()) == ["loss_spike"]
    kinds.follow(numbers(1.0), ORDINARY, applied=True)
    assert kinds.own(scores()) == []


def test_gradients_that_nobody_has_reported_as_not_finite():
    """A loop that gives its norm, and does its update whatever it is."""
    kinds = kinds_after(6)

    kinds.follow(numbers(math.nan), ORDINARY, applied=True)
    assert kinds.own(scores(num_moved=8)) == ["gradient_not_finite", "update_spike"]
    kinds.follow(numbers(None), ORDINARY, applied=True)
    assert kinds.own(scores()) == []


def test_the_course_of_the_global_norm():
    """A norm that keeps another size is an anomaly, also across a resume."""
    kinds = StepKinds(2.0, LossCourse())
    kinds.load_state_dict(json.loads(json.dumps(kinds_after(20).state_dict())))

    for _ in range(3):
        kinds.follow(numbers(0.1), ORDINARY, applied=True)
    assert kinds.own(scores()) == ["norm_shift"]
    kinds.follow(numbers(None), ORDINARY, applied=True)
    assert kinds.own(scores()) == []
