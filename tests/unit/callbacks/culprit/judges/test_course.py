"""A loss that leaves its course is told from the noise of the run itself."""

import json
import math
import random
import statistics

import pytest

from mfwrap.callbacks.culprit.judges.course import HIGHER, LOSS_LIMIT, LossCourse, NormCourse, Shift


def found(losses, course=None):
    """Return what is found, by step, counted from 1."""
    course = LossCourse() if course is None else course
    kinds = ((step, course.add(loss)) for step, loss in enumerate(losses, 1))
    return [(step, kind) for step, kind in kinds if kind is not None]


def noisy(level, number, *, noise=0.05, seed=0):
    """Return losses about a level, whose noise is a share of it."""
    dice = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    return [level * (1 + noise * dice.gauss(0, 1)) for _ in range(number)]


def falling(number):
    """Return losses that fall from 4 to 2, with noise."""
    return [2 + 2 * math.exp(-step / 30) + each for step, each in enumerate(noisy(0.1, number))]


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_losses(seed):
    """Neither falling nor level losses leave their course, however noisy they are."""
    for noise in (0.01, 0.1, 0.3):
        assert found(noisy(3.0, 300, noise=noise, seed=seed)) == []
    assert found(falling(300)) == []


@pytest.mark.parametrize("level", [1e-6, 0.01, 3.0, 1e4])
def test_a_single_loss(level):
    """It is found at any level, once, and what follows is ordinary."""
    losses = noisy(level, 100)
    losses[60] = 2 * level

    assert found(losses) == [(61, "loss_spike")]


@pytest.mark.parametrize("every", [15, 25, 40])
def test_a_row_that_ruins_the_loss_in_each_epoch(every):
    """It is found each time, however far the times before were; the norm is, too."""
    losses, course = noisy(3.0, 300), NormCourse()
    bad = range(every, 300, every)
    for number, step in enumerate(bad):
        losses[step] = 1e9 * 1.5**number
    beyond = []
    for step, norm in enumerate(losses):
        course.add(norm)
        if course.is_far_beyond:
            beyond.append(step)

    assert [step - 1 for step, _ in found(losses)] == [*bad]
    assert beyond == [*bad]


@pytest.mark.parametrize("bad", [(4, 6, 13, 17, 30, 40), (4, 9, 12, 20, 35), (20, 22, 29, 33, 40)])
def test_a_few_rows_that_ruin_the_loss_early(bad):
    """Two of the first ten losses are no nature of a run."""
    losses = noisy(2.0, 46)
    for step in bad:
        losses[step - 1] *= 1e5

    assert [step for step, _ in found(losses)] == [*bad]


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_row_that_has_ruined_one_of_the_first_losses(first):
    """It is found again: one bad loss counts as one large distance, not as two."""
    losses = noisy(2.3, 20)
    losses[first - 1] = losses[10] = 30.0

    assert (11, "loss_spike") in found(losses)


def test_the_second_loss_of_a_rare_class():
    """Early in a run, it is no ruin beside losses of almost nothing."""
    losses = noisy(1e-4, 30)
    losses[1], losses[11] = 1.2, 1.1

    assert (12, "loss_spike") not in found(losses)


def test_losses_that_are_often_far_away():
    """They are the nature of a run whose norm is almost zero in most steps."""
    course = NormCourse()
    for step, norm in enumerate(noisy(3.0, 300)):
        course.add(norm if step % 4 == 0 else 1e-9 * norm)
        assert step < 64 or not course.is_far_beyond


def test_a_small_loss_after_a_large_one():
    """The first losses of a run do not count for ever."""
    losses = [25 * math.exp(-step / 10) for step in range(100)] + noisy(0.01, 200)

    assert found([*losses, 2.0]) == [(301, "loss_spike")]


@pytest.mark.parametrize(("loss", "is_spike"), [(0.004, False), (0.1, True)])
def test_a_loss_of_almost_nothing(loss, is_spike):
    """Beside what the run began with, a loss that doubles is still almost nothing."""
    losses = [*noisy(1.0, 8), *noisy(1e-3, 100, noise=0.02)]
    assert (found([*losses, loss])[-1:] == [(109, "loss_spike")]) is is_spike


def test_a_loss_that_stays_higher():
    """No step is far off alone. The numbers are those of the steps since then and before."""
    course = LossCourse()
    losses = noisy(3.0, 100, noise=0.02) + noisy(3.4, 3, noise=0.005)

    assert found(losses, course) == [(103, "loss_shift")]
    assert course.shift is not None
    assert course.shift.num_steps == 3
    assert (course.shift.before, course.shift.now) == pytest.approx((3.0, 3.4), rel=0.03)
    assert "for 3 steps, after about 2.9" in str(course.shift)


def test_six_losses_that_are_little_higher():
    """More steps need less."""
    losses = noisy(3.0, 100, noise=0.02) + noisy(3.22, 6, noise=0.005)

    assert found(losses) == [(106, "loss_shift")]


def test_a_run_whose_losses_shift():
    """After a shift, the next one needs twice the deviations, also across a resume."""
    course, later = LossCourse(), LossCourse()
    assert found(noisy(3.0, 60, noise=0.02), course) == []
    assert "loss_shift" in dict(map(reversed, found([3.4] * 3 + [3.0] * 40, course)))
    later.load_state_dict(json.loads(json.dumps(course.state_dict())))

    assert found([3.4] * 3, course) == found([3.4] * 3, later) == []
    assert (3, "loss_shift") in found([8.0] * 3, course)


@pytest.mark.parametrize("seed", range(6))
def test_where_losses_that_rise_step_by_step_began(seed):
    """The steps before a shift was clear count, too; a loss that jumps has none of them."""
    late = {}
    for name, rise in (("rises", 1.05), ("jumps", None)):
        course, losses = LossCourse(), noisy(3.0, 100, noise=0.02, seed=seed)
        for step in range(1, 21):
            losses.append(3.0 * (1.08 if rise is None else rise**step))
        step = next(step for step, loss in enumerate(losses, 1) if course.add(loss) == "loss_shift")
        late[name] = step - course.shift.num_steps - course.shift.num_before + 1 - 101

    assert -1 <= late["rises"] <= 1
    assert -1 <= late["jumps"] <= 0


def test_rewards_that_are_sparse():
    """A loss that is zero in most steps jumps by its nature."""
    dice = random.Random(0)  # noqa: S311  (test data, not cryptography)
    losses = [dice.gauss(0, 1) if dice.random() < 0.1 else 0.0 for _ in range(400)]

    assert len(found(losses)) <= 1


def test_losses_below_zero():
    """They have no logarithm, and are judged by their own deviation."""
    losses = [-each for each in noisy(3.0, 100)]

    assert found(losses) == []
    assert found([*losses, 3.0]) == [(101, "loss_spike")]


def test_what_does_not_count():
    """A skipped step is judged and forgotten, and a loss that is not finite says nothing."""
    course = LossCourse()
    found(noisy(3.0, 50), course)

    assert course.add(9.0, counts=False) == "loss_spike"
    assert course.add(math.nan) is None
    assert course.add(9.0) == "loss_spike"


def test_a_course_goes_on_after_a_resume():
    """Its state is ready for JSON."""
    course, later = LossCourse(), LossCourse()
    losses = noisy(3.0, 100)
    losses[70] = 6.0
    found(losses[:50], course)
    later.load_state_dict(json.loads(json.dumps(course.state_dict())))

    assert found(losses[50:], course) == found(losses[50:], later) == [(21, "loss_spike")]


@pytest.mark.parametrize(("factor", "is_drop"), [(0.7, False), (0.5, True), (1e-5, True)])
def test_a_loss_that_drops_at_once(factor, is_drop):
    """Far below its course by both scores."""
    losses = noisy(3.0, 60)
    assert found([*losses, 3 * factor]) == ([(61, "loss_drop")] if is_drop else [])


def test_a_loss_that_changes_its_sign():
    """It is a drop where no loss has been below zero, and nothing where one has."""
    losses = noisy(3.0, 60)

    assert found([*losses, -3.0]) == [(61, "loss_drop")]
    assert found([-3.0, *losses, -3.0]) == []
    assert found([3.0, 3.1, 3.0, -3.1]) == [(4, "loss_drop")]
    assert found([*noisy(0.01, 60, noise=1.0), -0.01]) == []


def test_a_rise_in_a_run_that_learns():
    """How far the losses fall from step to step is no noise that a rise could hide in."""
    losses = [0.94**step + 0.01 * (-1) ** step for step in range(20)]

    assert found([*losses, 0.9]) == [(21, "loss_spike")]


@pytest.mark.parametrize(("norm_score", "is_spike"), [(4.0, True), (3.0, False), (math.nan, False)])
def test_a_loss_that_rises_with_its_gradients(norm_score, is_spike):
    """Half as far is enough, if the global norm says so, too."""
    course = LossCourse()
    assert found(noisy(3.0, 60), course) == []

    kind = course.add(3.9, norm_score=norm_score)

    assert HIGHER < course.score < LOSS_LIMIT
    assert kind == ("loss_spike" if is_spike else None)


def test_the_score_of_a_norm():
    """Nothing is known at first, less in the first steps, and nothing of a norm that is unknown."""
    course, scores = NormCourse(), []
    for norm in [*noisy(2.0, 20), 8.0, None, 8.0]:
        course.add(norm, counts=norm != 8.0)
        scores.append(course.score)

    assert all(math.isnan(score) for score in [*scores[:3], scores[21]])
    assert max(map(abs, scores[3:20])) < 3
    assert scores[20] == scores[22] > 5


def test_a_rise_after_steep_falls():
    """By how much a loss has fallen says little about rises."""
    losses = [4.0, *noisy(2.8, 59, noise=0.02)]

    assert found([*losses, 3.8]) == [(61, "loss_spike")]


def test_spikes_again_and_again():
    """After two of them, a spike must be far larger than those before."""
    losses = noisy(1.0, 200)
    for place, size in enumerate((2.0, 3.6, 6.5, 11.7, 1e3)):
        losses[30 + 30 * place] += size

    assert found(losses) == [(step, "loss_spike") for step in (31, 61, 151)]


def test_the_first_losses():
    """Two of them say nothing about the next one, three of them a little."""
    assert found([1e-3, 3.0, 3.0]) == []
    assert found([3.0, 3.1, 3.0, 1e6]) == [(4, "loss_spike")]


@pytest.mark.parametrize("factor", [1 / 12, 12.0])
def test_norms_of_another_size(factor):
    """Three of them in a row, in either direction, are a shift."""
    course = NormCourse()
    norms = [*noisy(2.0, 30), *noisy(2.0 * factor, 30, seed=1)]

    shifts = [course.add(norm) for norm in norms]

    found = shifts[32]
    assert not any((*shifts[:32], *shifts[40:]))
    assert (found.of, found.num_steps) == ("global norm", 3)
    assert found.before == pytest.approx(2.0, rel=0.1)
    assert found.now == pytest.approx(2.0 * factor, rel=0.1)


@pytest.mark.parametrize("norms", [[40.0], [40.0, 40.0, 2.0, 40.0], [14.0] * 9, [0.0] * 9])
def test_norms_that_have_not_shifted(norms):
    """Not one or two, not a factor below eight, and not norms of zero, which have no logarithm."""
    course = NormCourse()

    assert not any(course.add(norm) for norm in [*noisy(2.0, 30), *norms, *noisy(2.0, 9)])


@pytest.mark.parametrize("factor", [1.25, 1.4])
def test_norms_that_grow(factor):
    """Each is a little larger than the last, so none is far from the size before."""
    course = NormCourse()
    grown = [2.0 * factor**number for number in range(1, 13)]
    norms = [*noisy(2.0, 29), *(a * b for a, b in zip(grown, noisy(1.0, 12, seed=1), strict=True))]

    shifts = [course.add(norm) for norm in norms]

    windows = [[math.log(norm) for norm in norms[end - 11 : end]] for end in range(11, 42)]
    is_grown = [
        statistics.linear_regression(range(11), logs).slope * 10 >= math.log(8)
        and statistics.correlation(range(11), logs) ** 2 > 0.9
        for logs in windows
    ]
    assert [shift is not None for shift in shifts] == [False] * 10 + is_grown
    assert (shifts[-1].is_growth, shifts[-1].num_steps) == (True, 11)
    assert shifts[-1].before == pytest.approx(grown[1], rel=0.1)
    assert shifts[-1].now == pytest.approx(grown[11], rel=0.1)
    assert "has grown from about" in str(shifts[-1])


def test_norms_that_grow_too_little():
    """By a factor of seven in eleven steps, or without a line."""
    for norms in ([7 ** (number / 10) for number in range(40)], [1.0, 1.0, 30.0] * 20):
        course = NormCourse()

        assert not any(course.add(norm) for norm in norms)


def test_the_norms_of_a_noisy_run():
    """Where norms vary by large factors, a factor of twelve is no shift."""
    dice = random.Random(0)  # noqa: S311  (test data, not cryptography)
    norms = [math.exp(2 * dice.gauss(0, 1)) for _ in range(400)]
    course = NormCourse()

    assert not any(course.add(norm) for norm in [*norms, 12.0, 12.0, 12.0])


def test_a_course_of_norms_goes_on_after_a_resume():
    """Its state is ready for JSON."""
    course, later = NormCourse(), NormCourse()
    for norm in noisy(2.0, 30):
        course.add(norm)
    later.load_state_dict(json.loads(json.dumps(course.state_dict())))

    assert [later.add(0.1) for _ in range(3)][-1] == Shift("global norm", *_of(course), 3)


def _of(course):
    found = [course.add(0.1) for _ in range(3)][-1]
    return found.before, found.now


def test_a_loss_far_above_the_first_ones_is_a_spike():
    """However much they have fallen; a smaller rise after so few losses is none."""
    for later, kind in ((69.0, "loss_spike"), (6.0, None)):
        course = LossCourse()
        for loss in (2.18, 0.51, 0.66, 0.88):
            assert course.add(loss) is None
        assert course.add(later) == kind


def test_a_loss_below_zero_drops_as_well():
    """It has no logarithm; a loss that is a little lower is no drop."""
    for later, kind in ((-40.0, "loss_drop"), (-1.3, None)):
        course = LossCourse()
        for loss in noisy(-1.0, 30):
            assert course.add(loss) is None
        assert course.add(later) == kind


def test_a_loss_of_both_signs_may_be_anything_at_first():
    """Such as that of a policy, which sees each of its first batches twice."""
    losses = [-0.0416, -0.0416, -0.1536, -0.1674, -0.0775, -0.0864, 0.4, 0.38]
    course = LossCourse()
    assert [course.add(loss) for loss in losses] == [None] * 8
    for loss in noisy(-0.1, 20):
        course.add(loss)
    assert course.add(-9.0) == "loss_drop"


def test_a_loss_of_a_policy_that_begins_above_zero():
    """Its first values below zero are ordinary; a wrong sign is none."""
    assert found([0.109, 0.113, 0.104, -0.006, 0.123, -0.055, 0.067, -0.234]) == []
    assert found([0.109, 0.113, 0.104, -0.2, 0.123, -0.055]) == []
    assert found([0.9, 0.8, 0.9, -0.9]) == [(4, "loss_drop")]
    assert found([*noisy(0.1, 20), -0.1]) == [(21, "loss_drop")]


@pytest.mark.parametrize("first", [[0.0] * 20, [3e-9, -2e-9, 0.0, 1e-9] * 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_of_a_policy_whose_rewards_were_all_equal(first, sign):
    """It is zero but for rounding until one of them differs, which is ordinary."""
    for later in (0.03, 0.2):
        assert found([*first, sign * later, 0.0, later]) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_of_a_policy_whose_first_one_was_not_zero(sign):
    """Rounding about zero follows, of one sign or of both, and then one of an ordinary size."""
    about_zero = [0.0, sign * 7e-9, sign * 7e-9, 1e-8]
    assert found([0.0035, *about_zero, 0.0974, -0.0027, 0.132, 0.0879, *about_zero, 0.135]) == []


def test_a_loss_of_a_policy_that_is_far_above_all():
    """It is a spike, however little is known of the run."""
    about_zero = [0.0035, 0.0, -7e-9, 0.2556, -0.0027]
    assert found([*about_zero, 654.7, 0.132]) == [(6, "loss_spike")]
    assert found([*about_zero, 4.7, 0.132]) == []


def test_a_loss_that_was_below_zero_before_may_be_so_again():
    """However long ago, also across a resume."""
    course = LossCourse()
    for loss in [*[-1.0] * 6, *noisy(2.0, 200)]:
        course.add(loss)
    later = LossCourse()
    later.load_state_dict(json.loads(json.dumps(course.state_dict())))
    state = course.state_dict()
    del state["was_zero"]  # one of before
    earlier = LossCourse()
    earlier.load_state_dict(state)

    assert [each.add(-1.5) for each in (course, later)] == [None, None]
    assert earlier.add(-1.5) is not None


@pytest.mark.parametrize("power", [1, 3, "exponential"])
def test_a_loss_that_runs_away_downwards(power):
    """It is a drop once, also across a resume, and however it falls."""
    course, drops = LossCourse(), []
    for step in range(1, 400):
        fall = math.exp(step / 12) if power == "exponential" else (step / 3) ** power
        kind = course.add(1.5 - (1000 * max(fall - 3, 0) if power == 1 else fall))
        if step == 300:
            state = json.loads(json.dumps(course.state_dict()))
            course = LossCourse()
            course.load_state_dict(state)
        if kind == "loss_drop" and course.run_away:
            drops.append(step)

    assert len(drops) == 1
    assert course.run_away.startswith("the loss has run away to -")


@pytest.mark.parametrize("seed", range(10))
def test_losses_that_may_fall_below_zero(seed):
    """A log-likelihood, a reward's loss about zero, an actor's loss, and one spike do not run."""
    dice = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    likelihood = [3 - 53 * (1 - math.exp(-step / 80)) for step in range(400)]
    rewards = [0.01 * dice.gauss(0, 1) for _ in range(400)]
    returns = [-3000 * (1 - math.exp(-step / 100)) for step in range(400)]
    bits = [7000 - 30_000 * (1 - math.exp(-step / 80)) for step in range(400)]
    for losses in (likelihood, rewards, returns, bits):
        course = LossCourse()
        for loss in losses:
            course.add(loss + 0.05 * abs(loss) * dice.gauss(0, 1))
            assert not course.run_away
    course = LossCourse()
    for loss in [*noisy(2.0, 30), -1e9, *noisy(2.0, 30)]:
        course.add(loss)
        assert not course.run_away


@pytest.mark.parametrize("is_known", [True, False])
def test_losses_that_were_alike_are_forgotten_with_one_that_is_explained(is_known):
    """A row that nobody had found before, as at steps 2 and 3, does not hide itself later."""
    losses = noisy(1.5, 40)
    for step in (1, 2, 9, 17):
        losses[step] = 5.4
    course, kinds = LossCourse(), []
    for step, loss in enumerate(losses):
        kinds.append(course.add(loss))
        if loss == 5.4 and step > 2:
            course.forget(others_alike=is_known)

    assert (kinds[17] == "loss_spike") is is_known


def test_a_step_that_was_not_included_has_nothing_to_forget():
    """A skipped update, or a loss or norm that is not finite, leaves the steps before as usual."""
    course, norms = LossCourse(), NormCourse()
    for loss in noisy(1.0, 30):
        course.add(loss)
        norms.add(loss)
    before = course.state_dict(), norms.state_dict()
    for loss, counts in ((5.0, False), (math.nan, True)):
        course.add(loss, counts=counts)
        norms.add(loss, counts=counts)
        course.forget()
        norms.forget()

    assert (course.state_dict(), norms.state_dict()) == before


def test_what_is_forgotten_is_no_noise():
    """A spike after forgotten ones is found, of the loss and of the norm."""
    scores = []
    for forgets in (True, False):
        course, norms = LossCourse(), NormCourse()
        for number, loss in enumerate(noisy(1.0, 60)):
            is_odd = number in {30, 31, 32}
            course.add(10.0 if is_odd else loss)
            norms.add(100.0 if is_odd else loss)
            if forgets and number >= 30:
                course.forget()
                norms.forget()
        norms.add(50.0)
        scores.append((course.add(5.0), norms.score > 8))

    assert scores == [("loss_spike", True), (None, False)]


def split(pairs):
    """Return the losses and the update ratios of a text with ``loss/ratio``."""
    return [tuple(map(float, each.split("/"))) for each in pairs.split()]


ADAM = split("4.67/.59 6.39/.36 9.24/.25 8.09/.2 7.2/.15 6.73/.12 6.61/.1 6.53/.085 6.5/.071")
SGD = split("4.67/.1 7.78/.12 8.34/.13 10.1/.007 8.44/.011 8.12/.008 18.7/.013 8.89/.017")
BUMP = split("5.68/.58 5.92/.4 8.03/.3 12.15/.2 8.42/.2 6.62/.1 7.18/.1 6.16/.1 6.79/.1 5.98/.1")
LOW = split("4.67/.2 5.33/.14 5.69/.11 5.58/.091 5.33/.081 5.36/.073 5.19/.07 5.22/.066 5.41/.062")
NOISY = split(
    "1.331/0 1.346/0.31 1.349/0.59 1.302/0.66 1.38/0.6 1.488/0.5 1.364/0.38 1.385/0.32 "
    "1.548/0.26 1.9/0.22 1.44/0.2 1.633/0.15 1.448/0.12 1.417/0.095 1.295/0.078 1.821/0.065 "
    "1.279/0.055 1.519/0.047 1.59/0.041 1.65/0.035 1.408/0.031 1.284/0.027 1.258/0.024 "
    "1.6/0.021 1.74/0.018 1.32/0.016 1.232/0.014 1.521/0.013 1.685/0.011 1.608/0.01 "
    "1.481/0.009 2.2/0.0081 1.534/0.0072 1.496/0.0065 "
)
"""First steps of four trainings of a pretrained language model, at rates of 30, 10,000, 30 and 10
times the right one; and of a classifier at 100 times, with a warm-up of ten steps."""


def of_first_steps(steps, course, share=1.0):
    """Return what is found in the first steps of a run, by step."""
    kinds = ((n, course.add(loss, update=(share * ratio, 1.0))) for n, (loss, ratio) in steps)
    return [(number, kind) for number, kind in kinds if kind is not None]


@pytest.mark.parametrize(
    ("steps", "step"),
    [(ADAM, 6), (BUMP, 7), (SGD, 7), (NOISY, 28), (LOW, None)],
    ids=["A", "B", "S", "N", "L"],
)
def test_a_loss_above_that_of_the_start(steps, step):
    """It is a shift after large updates, found once; a resume does not change that."""
    steps, course, later = [*enumerate(steps, 1)], LossCourse(), LossCourse()
    expected = [] if step is None else [(step, "loss_shift")]

    assert of_first_steps(steps, LossCourse(), share=0.01) == []
    assert of_first_steps(steps[:5], course) == []
    later.load_state_dict(json.loads(json.dumps(course.state_dict())))
    assert of_first_steps(steps[5:], course) == of_first_steps(steps[5:], later) == expected


def test_a_loss_that_rises_after_it_has_fallen():
    """A run that has learned with its large first updates has another fault than they are."""
    losses = [4.0 - 0.05 * n for n in range(25)] + [30.0] * 8
    steps = [*enumerate(((loss, 0.5) for loss in losses), 1)]
    found_late = of_first_steps(steps, LossCourse())

    assert [step for step, _ in found_late if step < 26] == []
    assert found_late == of_first_steps(steps, LossCourse(), share=1e-6)


def test_a_rate_that_was_lowered_after_large_updates():
    """What the updates before have done is no reason to lower it again."""
    course = LossCourse()
    steps = [(loss, ratio, 1.0 if n < 4 else 0.1) for n, (loss, ratio) in enumerate(ADAM)]

    assert [course.add(loss, update=tuple(update)) for loss, *update in steps] == [None] * len(ADAM)


def test_a_run_that_goes_on_from_an_older_state_is_past_its_first_losses():
    """One low loss after the resume is not what the later ones have risen from."""
    course, later = LossCourse(), LossCourse()
    found(noisy(2.0, 200), course)
    state = course.state_dict()
    del state["first_losses"]
    later.load_state_dict(state)

    steps = [(n, (1.2 if n == 201 else 2.0, 0.12)) for n in range(201, 215)]
    assert "loss_shift" not in dict(of_first_steps(steps, later)).values()


def test_a_loss_above_that_of_the_start_has_no_size_below_zero():
    """The losses of a policy are about zero, so their ratio to the first one says nothing."""
    losses = [1e-3, *(1e-3 * n * (-1) ** n for n in range(1, 60)), *[0.05] * 3]

    assert of_first_steps([*enumerate((loss, 0.6) for loss in losses)], LossCourse()) == []


POLICY = [
    -0.012,
    -0.018,
    -0.013,
    -0.054,
    -0.0045,
    -0.00011,
    -0.043,
    -0.014,
    -0.032,
    -0.00016,
    -7.4e-05,
    -0.02,
    -7.5e-05,
    0.023,
    -0.0041,
    -7.2e-05,
    -0.0038,
    0.025,
    0.031,
    0.011,
    -6e-05,
    -5.4e-05,
    0.0008,
    0.0066,
    -7.4e-05,
    -0.00027,
    -5e-08,
    0.024,
    -8.1e-05,
    -0.0099,
    0.0065,
    -0.0037,
    -5.7e-05,
    2e-08,
    -0.0095,
    -0.00015,
    -0.0037,
    -0.0041,
    -0.00022,
    -8.1e-05,
    -0.019,
    -0.0041,
    -0.028,
    -0.0044,
    -8.1e-05,
    -0.018,
    -0.00022,
    -0.039,
    7.9e-08,
    0.00089,
    7.7e-08,
    -0.0099,
    0.006,
    -0.00015,
    5.4e-08,
    -0.0099,
    -0.028,
    -8.1e-05,
    -7.9e-05,
    -0.027,
]
"""Losses of a policy that is trained on rewards."""


def test_a_loss_about_zero():
    """A policy's loss is almost zero in some steps: the others are no spikes, whatever its sign."""
    assert found(POLICY) == []
