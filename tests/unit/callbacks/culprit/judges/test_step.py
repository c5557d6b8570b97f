"""Judgement of made-up series of a training, whose anomalies are known."""

import json
import math

import pytest
import torch
from torch import Tensor

from mfwrap.callbacks.culprit.judges.step import LIMITS, JudgedStep, StepJudge, StepScores
from mfwrap.callbacks.culprit.judges.updates import Change
from support.host_reads import HostReads

APPLIED = torch.ones((), dtype=torch.bool)
NAMES = ("wte", "h.0", "h.1", "head")
USUAL = torch.tensor([1.0, 2.0, 3.0, 0.5])


def noisy(values: Tensor, seed: int) -> Tensor:
    """Return values that are each up to a few per cent off."""
    generator = torch.Generator().manual_seed(seed)
    return values * (0.05 * torch.randn(values.shape, generator=generator)).exp()


def judged(
    judge: StepJudge,
    step: int,
    *,
    factors: Tensor | float = 1.0,
    update: Tensor | float = 1.0,
    rate: Tensor | float = 1e-3,
    outside: Tensor | None = None,
    applied: Tensor = APPLIED,
    ordinary_update: float = 0.0,
) -> JudgedStep:
    """Judge an ordinary step, changed by factors."""
    norms = noisy(USUAL, step) * factors
    updates = noisy(torch.full((4,), 0.2), 1000 + step) * update * torch.as_tensor(rate).abs().max()
    return judge.judge(
        norms.norm(),
        norms,
        Change(updates, torch.ones(4), outside),
        torch.as_tensor(rate),
        applied,
        ordinary_update=ordinary_update,
    )


def scores(step: JudgedStep) -> StepScores:
    """Return the summary as the host reads it."""
    return StepScores(*step.summary.tolist())


def test_rates_of_several_groups():
    """The highest and the lowest are told, and a negative rate leaves the updates their scores."""
    rates = torch.tensor([1e-3, -2e-3, 5e-4])
    judge = judge_after(10)
    found = scores(judged(judge, 10, rate=rates))

    assert (found.learning_rate, found.lowest_rate) == pytest.approx((1e-3, -2e-3))
    assert not math.isnan(scores(judged(judge_after(10), 10, rate=torch.tensor(-1e-3))).update)


def judge_after(num_steps: int) -> StepJudge:
    """Return a judge that has seen ordinary steps."""
    judge = StepJudge(NAMES, NAMES, "cpu")
    for step in range(num_steps):
        judged(judge, step)
    return judge


@pytest.mark.parametrize(
    ("factor", "num_steps", "is_fallen"),
    [(1e-5, 60, True), (0.2, 60, False), (0.0, 60, False), (1e-5, 6, False)],
)
def test_a_norm_that_falls(factor, num_steps, is_fallen):
    """Far below the usual one, after enough steps; a norm of zero is another kind."""
    factors = torch.tensor([1.0, 1.0, factor, 1.0])
    found = scores(judged(judge_after(num_steps), num_steps, factors=factors))
    assert (found.num_fallen, found.num_risen) == (float(is_fallen), 0)


def test_the_gradient_of_a_scalar_may_vanish():
    """Its sign changes now and then."""
    judge = StepJudge(NAMES, NAMES, "cpu", scalars={"h.1"})
    for step in range(60):
        judged(judge, step)
    for factor in (1e-5, 0.0, 0.0, 0.0):
        found = scores(judged(judge, 60, factors=torch.tensor([1.0, 1.0, factor, 1.0])))
        assert (found.num_fallen, found.num_dead) == (0, 0)


def test_updates_without_a_gradient():
    """What weight decay and momentum do alone is not judged, and is not usual."""
    judge = StepJudge(NAMES, NAMES, "cpu")
    for step in range(30):
        has_gradient = step > 5 and step % 2 == 0
        size = 1.0 if has_gradient else 10.0 ** (step % 3 - 5)
        assert scores(judged(judge, step, factors=float(has_gradient), update=size)).num_moved == 0
    assert scores(judged(judge, 30, update=100.0)).num_moved == 4


def test_an_update_that_is_ordinary_for_the_optimizer():
    """A far larger one than usual is no anomaly up to this size."""
    judge = judge_after(30)
    assert scores(judged(judge, 30, update=100.0, ordinary_update=40.0)).num_moved == 0
    assert scores(judged(judge, 31, update=1000.0, ordinary_update=40.0)).num_moved == 4


def test_updates_that_adam_cannot_make():
    """They are far above what its moments give; without Adam, nothing is known."""
    judge, one = judge_after(30), torch.tensor([1.0, 1.0, 1.0, 1e3])
    step = judged(judge, 30, update=one, ordinary_update=3.5)
    assert step.impossible(1e-3) == {"head": pytest.approx(200, rel=0.2)}
    assert step.impossible(math.nan) == {}
    assert judged(judge_after(30), 30, update=one).impossible(1e-3) == {}


def anomalies(found: StepScores) -> set[str]:
    """Return what a summary finds."""
    names = {name for name, limit in LIMITS.items() if getattr(found, name) > limit}
    return names | ({"dead"} if found.num_dead else set())


def test_ordinary_steps_are_no_anomalies():
    """Nothing is found in 300 noisy steps, from the first one on."""
    judge = StepJudge(NAMES, NAMES, "cpu")
    assert [step for step in range(300) if anomalies(scores(judged(judge, step)))] == []


def test_a_rise_is_found_from_the_second_step_on_if_it_is_large():
    """The prior is wide, so the first steps need a larger rise than later ones."""
    for num_steps, factor in ((1, 200.0), (5, 50.0), (100, 8.0)):
        found = scores(judged(judge_after(num_steps), 5000, factors=factor))
        assert "global_norm" in anomalies(found)
        assert "global_norm" not in anomalies(
            scores(judged(judge_after(num_steps), 5000, factors=factor / 10))
        )


def test_each_series_is_judged_by_itself():
    """A risen group or update is found where it is, and nowhere else."""
    one = torch.tensor([1.0, 1.0, 1.0, 100.0])
    step = judged(judge_after(50), 5000, factors=one)
    assert anomalies(scores(step)) == {"local_norm", "global_norm"}
    assert step.local_norm_scores.argmax() == 3
    assert scores(step).num_risen == 1
    torch.testing.assert_close(step.usual_norm, USUAL, rtol=0.2, atol=0)

    step = judged(judge_after(50), 5000, update=one)
    assert anomalies(scores(step)) == {"update"}
    assert step.update_scores.argmax() == 3
    assert scores(step).num_moved == 1


def test_a_norm_far_below_the_global_norm_is_not_judged():
    """Ratios of rounding errors are no anomaly."""
    judge = StepJudge(("weight", "bias"), (), "cpu")
    for step in range(50):
        norms = torch.tensor([1.0, 1e-10 if step < 40 else 1e-6])
        measured = noisy(norms, step)
        found = judge.judge(measured.norm(), measured, None, None, APPLIED)
        assert anomalies(scores(found)) == set()


def test_the_rate_does_not_make_an_update_an_anomaly():
    """Updates are judged per unit of the rate, so a restart of a schedule is ordinary."""
    assert anomalies(scores(judged(judge_after(50), 5000, rate=1.0))) == set()


def ratios_of(*changes: tuple[list[float], list[float]]) -> list[float]:
    """Return the middle ratio of each step; takes updates, and the weights before them."""
    judge = StepJudge((), ("a.A", "b.A", "a.B", "b.B"), "cpu")
    steps = [Change(torch.tensor(update), torch.tensor(weight), None) for update, weight in changes]
    return [scores(judge.judge(None, None, one, None, APPLIED)).update_ratio for one in steps]


@pytest.mark.parametrize("rate", [1e-4, 5.0])
def test_updates_of_weights_that_began_at_zero(rate):
    """Those of LoRA's B count by the size of A, in the first step and later."""
    first, later = [0.0, 0.0, rate, rate], [rate] * 4
    found = ratios_of((first, [0.05, 0.05, 0.0, 0.0]), (later, [0.05, 0.05, rate, rate]))

    assert found == pytest.approx([0.0, rate / 0.05])


def test_weights_that_began_at_zero_are_known_after_a_resume():
    """Then they have a size, which is that of a few updates."""
    names = ("a.A", "b.A", "a.B", "b.B")
    judge, again = (StepJudge((), names, "cpu") for _ in range(2))
    first = Change(torch.full((4,), 5.0), torch.tensor([0.05, 0.05, 0.0, 0.0]), None)
    judge.judge(None, None, first, None, APPLIED)
    again.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    later = Change(torch.full((4,), 5.0), torch.tensor([0.05, 0.05, 5.0, 5.0]), None)
    found = [scores(one.judge(None, None, later, None, APPLIED)) for one in (judge, again)]

    assert found[0].update_ratio == found[1].update_ratio == pytest.approx(100.0)


def test_updates_of_a_network_that_began_at_zero():
    """Nothing is known of the first one, and later ones count by the weights themselves."""
    first, second = ratios_of(([1.0] * 4, [0.0] * 4), ([1.0] * 4, [1.0, 1.0, 1.0, 2.0]))

    assert math.isnan(first)
    assert second == 1.0


def test_updates_add_up_until_they_begin_anew():
    """An update that makes a weight non-finite is infinite; later ones add nothing to it."""
    judge = StepJudge(("w",), ("a", "b"), "cpu")
    change = Change(torch.tensor([0.5, math.nan]), torch.tensor([1.0, 1.0]), None)
    later = Change(torch.tensor([0.5, math.nan]), torch.tensor([1.5, math.nan]), None)
    for each in (change, later):
        found = judge.judge(None, None, each, None, APPLIED)
    found = judge.judge(None, None, later, None, ~APPLIED)
    assert found.travelled() == {"a": 1.0, "b": math.inf}
    judge.begin_travel()
    found = judge.judge(None, None, later, None, APPLIED)
    assert found.travelled() == {"a": 0.5, "b": 0.0}


def test_weights_that_change_between_steps_are_found_unless_they_often_do():
    """The first change after a few quiet steps is found; a loop that clips weights is not."""
    none, one = torch.zeros(4), torch.tensor([0.0, 0.1, 0.0, 0.0])
    judge = StepJudge(NAMES, NAMES, "cpu")
    steps = [judged(judge, n, outside=one if n >= 6 else none) for n in range(10)]
    found = [scores(step).num_changed for step in steps]
    clipping = StepJudge(NAMES, NAMES, "cpu")
    often = [scores(judged(clipping, n, outside=one)).num_changed for n in range(10)]

    assert found == [0] * 6 + [1] + [0] * 3
    assert steps[6].changed() == ("h.0",)
    assert often == [0] * 10
    assert math.isnan(scores(judged(judge, 20)).num_changed)


@pytest.mark.parametrize(("num_steps", "is_found"), [(3, False), (20, True)])
def test_a_norm_among_the_first_ones(num_steps, is_found):
    """It may have been small by chance, so only a far larger one is found."""
    one = torch.tensor([1.0, 40.0, 1.0, 1.0])
    assert (scores(judged(judge_after(num_steps), 5000, factors=one)).num_risen > 0) is is_found
    far = torch.tensor([1.0, 1e6, 1.0, 1.0])
    assert scores(judged(judge_after(num_steps), 5000, factors=far)).num_risen > 0


def test_a_zero_norm_is_found_at_its_third_step():
    """A group that had gradients is dead at the third step without, and reported once."""
    dead = torch.tensor([1.0, 0.0, 1.0, 1.0])
    judge = judge_after(10)
    found = [anomalies(scores(judged(judge, 5000 + step, factors=dead))) for step in range(5)]
    assert found == [set(), set(), {"dead"}, set(), set()]

    judge = StepJudge(("h.0.experts.3.w1",) * 4, NAMES, "cpu")
    judged(judge, 0)
    found = [anomalies(scores(judged(judge, 5000 + step, factors=dead))) for step in range(3)]
    assert found == [set()] * 3, "an expert without tokens is not dead"


def test_a_zero_norm_among_the_first_ones():
    """Little is known of the group, so it is dead only after a while."""
    dead = torch.tensor([1.0, 0.0, 1.0, 1.0])
    judge = judge_after(2)
    found = [anomalies(scores(judged(judge, 5000 + step, factors=dead))) for step in range(14)]
    assert [step for step, each in enumerate(found, 1) if each] == [11]


def test_gradients_that_are_zero_at_times_are_usual():
    """A group is dead only after more than twice as many steps as it has ever waited, and alone."""
    resting = torch.tensor([1.0, 0.0, 1.0, 1.0])
    judge = judge_after(10)
    judged(judge, 10, factors=resting)
    judged(judge, 11)
    again = StepJudge(NAMES, NAMES, "cpu")
    again.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    for one in (judge, again):
        found = [anomalies(scores(judged(one, 5000 + n, factors=resting))) for n in range(8)]
        assert found == [set()] * 5 + [{"dead"}, set(), set()]

    judge = judge_after(10)
    assert all(
        "dead" not in anomalies(scores(judged(judge, n, factors=0.0 if n % 10 else 1.0)))
        for n in range(100)
    )


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_layers_that_are_left_out_at_random(share):
    """Their waits are those of the run, also the first one of each layer."""
    judge = judge_after(10)
    for step in range(10, 300):
        dice = torch.Generator().manual_seed(step)
        factors = (torch.rand(4, generator=dice) > share).float()
        factors[3] = 1.0
        assert "dead" not in anomalies(scores(judged(judge, step, factors=factors)))

    dead = torch.tensor([0.0, 1.0, 1.0, 1.0])
    found = [anomalies(scores(judged(judge, 300 + step, factors=dead))) for step in range(40)]
    assert {"dead"} in found


def test_a_group_that_never_had_a_gradient_is_not_dead():
    """Weights may begin at zero, and their gradients with them."""
    zero = torch.tensor([1.0, 0.0, 1.0, 1.0])
    judge = StepJudge(NAMES, NAMES, "cpu")
    assert not any(anomalies(scores(judged(judge, step, factors=zero))) for step in range(9))


def test_nan_and_skipped_steps_change_nothing_of_what_is_usual():
    """A judge that has seen them continues as if they had not been."""
    one, other = judge_after(20), judge_after(20)
    judged(other, 5000, factors=math.inf, update=math.nan)
    judged(other, 5001, factors=50.0, applied=~APPLIED)
    torch.testing.assert_close(
        judged(one, 5002).summary, judged(other, 5002).summary, equal_nan=True
    )


def test_unknown_numbers_have_no_scores():
    """A loop may report a loss alone."""
    judge = StepJudge((), (), "cpu")
    for _ in range(30):
        found = judge.judge(None, None, None, None, APPLIED)
        assert anomalies(scores(found)) == set()
    assert found.names == found.weights == ()


def test_a_loaded_state_continues_bitwise_and_follows_names():
    """The state goes through JSON; a series that it lacks starts empty."""
    one = judge_after(20)
    judged(one, 20, factors=torch.tensor([0.0, 1.0, 1.0, 1.0]))
    state = json.loads(json.dumps(one.state_dict()))
    other = StepJudge(NAMES, NAMES, "cpu")
    other.load_state_dict(state)
    renamed = StepJudge((*NAMES[:3], "new"), NAMES, "cpu")
    renamed.load_state_dict(state)

    none = torch.zeros(4)
    expected, step = judged(one, 5000, outside=none), judged(other, 5000, outside=none)
    assert torch.equal(expected.summary, step.summary)
    step = judged(renamed, 5000)
    assert torch.equal(expected.local_norm_scores[:3], step.local_norm_scores[:3])
    assert step.local_norm_scores[3].isnan()


def test_judging_reads_nothing_on_the_host():
    """No operation waits for the device."""
    judge = judge_after(3)
    one = torch.ones(())
    with HostReads() as reads:
        judge.judge(one, USUAL, Change(USUAL, USUAL, USUAL), one, APPLIED)
    assert reads.reads == []


@pytest.mark.parametrize("global_norm", [True, False])
def test_what_is_forgotten(global_norm):
    """A step that one rank alone finds odd leaves what all ranks know of the global norm."""
    kept, judge = judge_after(20), judge_after(20)
    for one in (kept, judge):
        for step in range(20, 23):
            judged(one, step, factors=50.0)
            if one is judge:
                judge.forget(global_norm=global_norm)
    before, after = (scores(judged(one, 23, factors=60.0)) for one in (kept, judge))

    assert after.local_norm != before.local_norm
    assert (after.global_norm != before.global_norm) is global_norm
