"""Anomalies of successive steps are one episode."""

import json

import pytest

from mfwrap.callbacks.culprit.anomaly_log import Anomaly, BadRow
from mfwrap.callbacks.culprit.causes.rate import large_in_a_row
from mfwrap.callbacks.culprit.episodes import Episodes
from mfwrap.callbacks.culprit.judges.course import LossCourse
from mfwrap.callbacks.shared.step_values import StepNumbers, StepValues, numbers_of
from mfwrap.records.episodes import episodes_of


def anomaly(step: int, kind: str = "loss_spike", **fields) -> Anomaly:
    """Return an anomaly of a step."""
    return Anomaly(**{"step": step, "kind": kind, "ranks": (0,), "layer": None, **fields})


def numbers(step: int, loss: float = 1.0, global_norm: float = 1.0) -> StepNumbers:
    """Return the numbers of a step."""
    return numbers_of(step, StepValues(loss=loss, global_norm=global_norm))


def begun(*anomalies: Anomaly, is_shared: bool = False) -> list[int]:
    """Return the steps at which episodes begin."""
    episodes = Episodes(10, LossCourse())
    return [one.step for one in anomalies if episodes.add(one, 6.0, is_shared=is_shared)[0]]


@pytest.mark.parametrize(
    ("usual", "losses", "explains"),
    [(2.0, [80.0], True), (2.0, [25.0], False), (2.0, [80.0, 9.0], False), (2.0, [], False)],
)
def test_a_row_that_explains_a_spike(usual, losses, explains):
    """It is far above the first losses, too; a hard row of a run that has learned is not."""
    rows = tuple(BadRow(rank=0, micro_batch=0, row=n, loss=loss) for n, loss in enumerate(losses))
    episodes = Episodes(10, course(3.0))
    episodes.add(anomaly(20, cause="data", usual_loss=usual, samples=rows), 6.0, is_shared=False)

    assert episodes.explain(20) is explains


def test_bad_steps_in_a_row_are_one_episode():
    """Whatever their kinds."""
    kinds = ("learning_rate_spike", "spike", "loss_not_finite", "loss_not_finite", "loss_spike")
    steps = [anomaly(20 + n, kind) for n, kind in enumerate(kinds)]
    assert begun(*steps) == [20]


@pytest.mark.parametrize(
    ("kind", "gap", "is_one"),
    [
        ("loss_spike", 3, True),
        ("loss_spike", 4, False),
        ("loss_not_finite", 1, True),
        ("loss_not_finite", 2, False),
        ("state_spike", 10, True),
        ("state_spike", 11, False),
        ("attention_logits", 10, True),
    ],
)
def test_how_far_an_episode_reaches(kind, gap, is_one):
    """Finite consequences may come a little later; a sample, as late as its interval."""
    assert begun(anomaly(20), anomaly(20 + gap, kind)) == ([20] if is_one else [20, 20 + gap])


@pytest.mark.parametrize(("loss", "begins"), [(6.0, [20]), (2.1, [20, 23])])
def test_an_overflow_after_a_spike(loss, begins):
    """It is a consequence if the loss has stayed high, and a fault of its own after good steps."""
    episodes, found = Episodes(10, LossCourse()), []
    for step in range(20, 24):
        kind = {20: "loss_spike", 23: "loss_not_finite"}.get(step)
        now = numbers(step, 6.0 if step == 20 else loss)
        if kind is None:
            episodes.pass_over(now)
        elif episodes.add(anomaly(step, kind, usual_loss=2.0), now.loss, is_shared=False)[0]:
            found.append(step)
    assert found == begins


def test_an_overflow_is_over_after_a_good_step():
    """What is non-finite is skipped, and leaves no weights that raise the loss later."""
    steps = [anomaly(20 + gap, "gradient_not_finite") for gap in (0, 1, 3)]
    assert begun(*steps) == [20, 23]


def test_a_lone_loss_does_not_go_on_with_an_overflow_of_all_ranks():
    """The main process writes the overflow, but another rank may have the loss."""
    episodes = Episodes(10, LossCourse())
    assert episodes.add(anomaly(1, "gradient_not_finite"), 6.0, is_shared=True)[0]
    assert episodes.add(anomaly(2, "loss_not_finite"), 6.0, is_shared=False)[0]


def test_the_end_has_the_number_of_steps():
    """A good step some steps later, or another episode, ends an episode of several steps."""
    episodes = Episodes(10, LossCourse())
    for step in (20, 21, 23):
        episodes.add(anomaly(step, skipped=step != 23), 6.0, is_shared=False)
    ends = [episodes.pass_over(numbers(step)) for step in range(24, 30)]
    (end,) = [each for each in ends if each is not None]

    assert ends.index(end) == 3
    assert end.as_record() == {
        "step": 20,
        "kind": "loss_spike",
        "last_step": 23,
        "num_steps": 3,
        "num_skipped": 2,
    }
    assert str(end) == (
        "the episode of step 20 ended at step 23 after 3 bad steps, 2 updates skipped"
    )
    assert episodes.end() is None


def test_an_episode_of_one_step_has_no_end():
    """Its record is whole."""
    episodes = Episodes(10, LossCourse())
    episodes.add(anomaly(20), 6.0, is_shared=False)
    assert episodes.add(anomaly(40), 6.0, is_shared=False) == (True, None)
    assert episodes.end() is None


def test_a_cause_that_is_found_later_completes_the_record():
    """A sample of the weights may name the cause of a rise of the loss."""
    episodes = Episodes(10, LossCourse())
    episodes.add(anomaly(20), 6.0, is_shared=False)
    later = anomaly(30, "state_spike", cause="weight_changed", explanation="it changed", name="w")
    episodes.add(later, 6.0, is_shared=False)
    episodes.add(anomaly(31, cause="data"), 6.0, is_shared=False)
    end = episodes.end()

    assert end.refined == {"cause": "weight_changed", "explanation": "it changed", "name": "w"}
    assert end.as_record()["cause"] == "weight_changed"
    # The sample finds what has changed in the steps before it.
    assert (end.last_step, end.num_steps) == (31, 2)
    assert "after 2 bad steps; it changed" in str(end)


def test_a_sample_alone_is_no_bad_step_of_an_episode():
    """It completes the record, and the episode still waits for its consequences."""
    episodes = Episodes(10, LossCourse())
    episodes.add(anomaly(20), 6.0, is_shared=False)
    later = anomaly(30, "state_spike", cause="weight_changed", explanation="it changed")
    episodes.add(later, 6.0, is_shared=False)
    ends = [episodes.pass_over(numbers(step)) for step in range(31, 50)]
    (end,) = [each for each in ends if each is not None]
    assert (end.last_step, end.num_steps, ends.index(end)) == (20, 1, 10)
    assert end.refined["cause"] == "weight_changed"
    grown = Episodes(10, LossCourse())
    for step in (20, 30, 40):
        grown.add(anomaly(step, "state_spike"), 6.0, is_shared=False)
    assert grown.end().num_steps == 3


def test_the_end_tells_how_far_something_has_grown():
    """The first record has only the beginning."""
    episodes = Episodes(10, LossCourse())
    for step, logit in ((45, 141), (50, 400), (55, 2000)):
        known = {"cause": "attention_logits", "explanation": f"the logit grew to {logit}"}
        episodes.add(anomaly(step, "attention_logits", **known), 6.0, is_shared=False)
    end = episodes.end()
    assert end.as_record()["latest"] == "the logit grew to 2000"
    assert str(end).endswith("; the logit grew to 2000")


def test_an_episode_is_told_again_only_if_it_has_grown():
    """A consequence that is seen after the end, and tells nothing new, is no other end."""
    episodes = Episodes(10)
    for step in (2, 3, 4):
        episodes.add(anomaly(step, "spike"), 1.0, is_shared=True)
    ended = [episodes.pass_over(numbers(step)) for step in range(5, 10)]
    assert [one is not None for one in ended].count(True) == 1

    episodes.add(anomaly(10, "state_spike"), 1.0, is_shared=True)
    assert episodes.end() is None
    episodes.add(anomaly(12, "attention_logits"), 1.0, is_shared=True)
    assert episodes.end() is not None


def test_an_episode_goes_on_after_a_resume():
    """The state goes through JSON."""
    first, later = Episodes(10, LossCourse()), Episodes(10, LossCourse())
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert not later.goes_on(1, "loss_spike", is_shared=False)
    first.add(anomaly(20), 6.0, is_shared=False)
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert later.add(anomaly(21), 6.0, is_shared=False) == (False, None)
    assert later.end().num_steps == 2


def test_an_episode_of_what_is_watched_every_few_steps_waits_for_the_next_look():
    """So it has one end, not one for each step in which logits are watched."""
    episodes = Episodes(10, LossCourse())
    ends = []
    for step in range(20, 60):
        if step in {20, 25, 30}:
            ends.append(episodes.add(anomaly(step, "attention_logits"), 6.0, is_shared=False)[1])
        else:
            ends.append(episodes.pass_over(numbers(step)))
    (end,) = [each for each in ends if each is not None]
    assert (end.last_step, ends.index(end)) == (30, 21)


@pytest.mark.parametrize("kind", ["loss_spike", "spike"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_level_that_stays_high_belongs_to_the_episode(kind, is_resumed):
    """Until loss or norm has come down half way; what is usual follows after three steps."""
    episodes = Episodes(10, LossCourse())
    known = {"usual_loss": 2.0, "losses": (6.0,), "usual_global_norm": 2.0, "global_norm": 8.0}
    # Half way is 4, for a norm by its logarithm.
    levels = [6.0, 5.5, 5.0, 5.0, 4.1, 3.9, 4.5, 3.9, 2.0, 2.0, 2.0, 5.0]
    ends = []
    for step, value in enumerate(levels, start=20):
        if step < 23:
            episodes.add(anomaly(step, kind, **known), 6.0, is_shared=False)
            continue
        if is_resumed:
            saved = json.dumps(episodes.state_dict())
            episodes = Episodes(10, LossCourse())
            episodes.load_state_dict(json.loads(saved))
        seen = {"loss": value} if kind == "loss_spike" else {"global_norm": value}
        ends.append(episodes.pass_over(numbers(step, **seen)))
    (end,) = [each for each in ends if each is not None]
    assert (end.step, end.last_step, end.num_steps) == (20, 26, 6)


def test_a_level_that_stays_becomes_usual():
    """An episode does not last for the rest of a run whose loss never comes back."""
    episodes = Episodes(10, LossCourse())
    episodes.add(anomaly(20, usual_loss=2.0), 6.0, is_shared=False)
    ends = [episodes.pass_over(numbers(step, loss=5.0)) for step in range(21, 200)]
    (end,) = [each for each in ends if each is not None]
    assert (end.last_step, end.num_steps) == (84, 65)


def test_an_anomaly_at_a_level_that_stays_high_is_an_episode_of_its_own():
    """A fault that comes while the loss has not come back yet must not be hidden."""
    episodes = Episodes(10, LossCourse())
    episodes.add(anomaly(20, usual_loss=2.0), 6.0, is_shared=False)
    for step in range(21, 30):
        assert episodes.pass_over(numbers(step, loss=5.0)) is None
    begins, ended = episodes.add(anomaly(30, "loss_not_finite"), 6.0, is_shared=False)
    assert begins
    assert (ended.last_step, ended.num_steps) == (29, 10)


def course(*losses: float) -> LossCourse:
    """Return the course of a run that has begun with these losses."""
    begun = LossCourse()
    for loss in losses:
        begun.add(loss)
    return begun


def ended(*losses: float, first: Anomaly, is_over: bool = True):
    """Return the episode of an anomaly at step 20, after steps with these losses."""
    episodes = Episodes(10, LossCourse())
    episodes.add(first, 6.0, is_shared=False)
    ends = [episodes.pass_over(numbers(21 + place, loss)) for place, loss in enumerate(losses)]
    return next(filter(None, ends), None) or episodes.end()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_loss_that_does_not_come_back_has_diverged(is_resumed):
    """The last five losses tell. If they are worse than at first, it is the cause if none is."""
    episodes = Episodes(10, course(3.0))
    episodes.add(anomaly(20, usual_loss=2.0), 6.0, is_shared=False)
    for step in range(21, 24):
        assert episodes.pass_over(numbers(step, loss=5.0)) is None
    if is_resumed:
        state = json.loads(json.dumps(episodes.state_dict()))
        episodes = Episodes(10, course(3.0))
        episodes.load_state_dict(state)
    assert episodes.pass_over(numbers(24, loss=43.0)) is None
    end = episodes.end()

    record = end.as_record()
    assert (record["cause"], record["last_step"], record["num_steps"]) == ("diverged", 24, 5)
    assert record["diverged"] == "the loss had not come back by then: about 5, after 2"
    assert record["diverged"] in str(end)


@pytest.mark.parametrize(
    ("losses", "has_diverged"),
    [
        ([5.0] * 3, False),
        ([5.0] * 4, True),
        ([5.0] * 9 + [3.9] * 3, False),
        ([3.0, 3.0, 5.0], False),
    ],
)
def test_a_loss_that_comes_back_half_way(losses, has_diverged):
    """It has not diverged, whatever it did before."""
    end = ended(*losses, first=anomaly(20, usual_loss=2.0))
    assert end is None or end.has_diverged is has_diverged
    assert (end is not None) or not has_diverged


def test_a_known_cause_stays_the_cause_of_a_divergence():
    """The record says both."""
    end = ended(*[5.0] * 8, first=anomaly(20, usual_loss=2.0, cause="learning_rate"))
    assert "cause" not in end.as_record()
    assert end.as_record()["diverged"].startswith("the loss had not come back")


@pytest.mark.parametrize(("cause", "said"), [("unknown", "diverged"), ("loss", None)])
def test_a_loss_that_has_run_away_downwards_has_diverged(cause, said):
    """The end of an episode says so, and names it as the cause if none is known."""
    losses = LossCourse()
    episodes = Episodes(10, losses)
    for step in range(1, 100):
        losses.add(-(float(step) ** 4))
    episodes.add(anomaly(100, "loss_drop", cause=cause), -1e8, is_shared=False)
    episodes.pass_over(numbers(101, loss=-1e8))
    episodes.add(anomaly(102, "loss_drop"), -1e8, is_shared=False)
    end = episodes.end()

    assert end.as_record().get("cause") == said
    assert end.as_record()["diverged"] == "the loss has run away to -8.853e+07, after -81 at first"
    assert end.as_record()["diverged"] in str(end)


def test_the_steps_of_a_shift_before_it_was_found_count():
    """A shift is found at its third step."""
    shift = anomaly(20, "loss_shift", usual_loss=2.0, since=18)
    assert ended(5.0, 5.0, first=shift).has_diverged
    assert not ended(5.0, first=shift).has_diverged


@pytest.mark.parametrize(
    ("kind", "usual", "has_diverged"),
    [("spike", 2.0, True), ("spike", 5.0, False), ("gradient_not_finite", 2.0, False)],
)
def test_a_spike_of_the_norm_with_a_loss_that_stays(kind, usual, has_diverged):
    """The loss of a finite anomaly is followed if it is clearly above the usual one."""
    end = ended(*[5.5] * 8, first=anomaly(20, kind, usual_loss=usual, usual_global_norm=0.1))
    assert (end is not None and end.has_diverged) is has_diverged


@pytest.mark.parametrize(("loss", "has_diverged"), [(2.3, False), (2.5, True)])
def test_a_loss_that_stays_little_higher(loss, has_diverged):
    """It has left its course, and that is no divergence."""
    episodes = Episodes(10, LossCourse())
    shift = anomaly(20, "loss_shift", usual_loss=2.0, since=18)
    episodes.add(shift, loss, is_shared=False)
    for step in range(21, 29):
        assert episodes.pass_over(numbers(step, loss)) is None

    assert episodes.end().has_diverged is has_diverged


@pytest.mark.parametrize(
    ("cause", "explains"), [("setting", True), ("unknown", False), ("data", False)]
)
def test_what_a_known_cause_explains(cause, explains):
    """The steps of its episode, and the few in which usual numbers seem unusual."""
    episodes = Episodes(10, LossCourse())
    assert not episodes.explain(19)
    episodes.add(anomaly(20, cause=cause), 6.0, is_shared=False)

    assert [episodes.explain(step) for step in (20, 25)] == [explains] * 2
    assert not episodes.explain(26)


@pytest.mark.parametrize("first_losses", [(), (6.0,)])
def test_a_loss_that_is_no_worse_than_at_first(first_losses):
    """It has not come back, and that is no cause."""
    episodes = Episodes(10, course(*first_losses))
    episodes.add(anomaly(20, usual_loss=2.0), 6.0, is_shared=False)
    for step in range(21, 29):
        assert episodes.pass_over(numbers(step, loss=5.0)) is None
    record = episodes.end().as_record()

    assert "cause" not in record
    assert record["diverged"].startswith("the loss had not come back")


@pytest.mark.parametrize(("kind", "is_told"), [("expert_load", False), ("state_spike", True)])
def test_a_consequence_is_no_cause(kind, is_told):
    """What grows for many steps after a fault of an unknown cause does not explain it."""
    episodes = Episodes(10, LossCourse())
    episodes.add(anomaly(20, usual_loss=2.0), 6.0, is_shared=False)
    episodes.add(anomaly(23, kind, cause="router"), 6.0, is_shared=False)

    assert (episodes.last.cause == "router") is is_told


def test_the_level_of_a_shift_is_its_middle_loss():
    """The loss of the step in which it is found may be far above the others, which stay, too."""
    losses = LossCourse()
    rises = [4.67, 7.78, 8.34, 10.1, 8.44, 8.12, 18.7]
    kinds = [losses.add(loss, update=(0.2, 1.0)) for loss in rises]
    assert kinds[-1] == "loss_shift"
    episodes = Episodes(10, losses)

    episodes.add(anomaly(7, "loss_shift", usual_loss=4.67, since=2), 18.7, is_shared=False)
    for step in range(8, 16):
        assert episodes.pass_over(numbers(step, 8.5)) is None

    assert "the loss had not come back by then: about 8.5, after 4.67" in str(episodes.end())


def after_half_way(loss: float, num_steps: int) -> tuple[Episodes, list]:
    """Return episodes after a loss that fell half way, and then had a value; and what they told."""
    episodes, told = Episodes(10, course(3.0)), []
    losses = [5.0] * 5 + [3.5] * 4 + [loss] * num_steps
    episodes.add(anomaly(20, usual_loss=2.0, cause="learning_rate"), 6.0, is_shared=False)
    for step, one in enumerate(losses, 21):
        for end in (episodes.watch(numbers(step, one)), episodes.pass_over(numbers(step, one))):
            told += [] if end is None else [(end.last_step, end.run_away)]
    return episodes, told


@pytest.mark.parametrize(("loss", "said"), [(2.5, "2.5, after 2"), (2.4, None)])
def test_a_loss_that_comes_half_way_back_and_no_further(loss, said):
    """The end of the episode is told at once, and after 64 steps that the loss stays away."""
    episodes, told = after_half_way(loss, 80)

    away = [] if said is None else [(25, f"the loss has not come back since: about {said}")]
    assert told == [(25, ""), *away]
    assert episodes.diverged_step == (None if said is None else 20)
    assert episodes.close() == []


@pytest.mark.parametrize(("loss", "step"), [(3.2, 20), (2.9, None), (2.4, None)])
def test_a_loss_far_above_the_usual_one_after_an_episode_is_over(loss, step):
    """What comes soon after is its consequence, although it may still come back."""
    episodes, told = after_half_way(loss, 6)

    assert told == [(25, "")]
    assert episodes.diverged_step == step


@pytest.mark.parametrize(("loss", "is_told"), [(2.5, True), (2.4, False)])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_training_that_ends_with_a_loss_half_way_back(loss, is_told, is_resumed):
    """It does so for good, also if another episode has begun since, and after a resume."""
    episodes, _ = after_half_way(loss, 8)
    episodes.add(anomaly(39, "update_spike"), loss, is_shared=False)
    if is_resumed:
        state = json.loads(json.dumps(episodes.state_dict()))
        episodes = Episodes(10, course(3.0))
        episodes.load_state_dict(state)

    assert [one.as_record()["step"] for one in episodes.close()] == ([20] if is_told else [])
    assert episodes.close() == []


def test_a_loss_that_is_back_after_a_divergence():
    """Later anomalies are not its consequences, and the record says when it was back."""
    episodes, _ = after_half_way(4.5, 70)
    assert episodes.diverged_step == 20
    told = [episodes.watch(numbers(200 + n, 2.1)) for n in range(3)]
    assert episodes.diverged_step is None
    assert episodes.astray is None
    assert told[:2] == [None, None]
    assert told[2].as_record()["back"] == 202
    assert str(told[2]).endswith("the loss was near its former level again at step 202")


def test_a_divergence_that_goes_on_again_is_told_once():
    """A consequence that is found later neither repeats nor withdraws that the loss stays away."""
    episodes, told = after_half_way(2.5, 80)
    assert len(told) == 2
    episodes.add(anomaly(30, "attention_logits"), 2.5, is_shared=False)

    closed = episodes.close()
    assert [one.as_record()["diverged"] for one in closed] in ([], [told[1][1]])
    assert episodes.diverged_step is not None or not closed


@pytest.mark.parametrize(
    ("cause", "step"), [("learning_rate", 20), ("unknown", None), ("data", None), ("loss", None)]
)
def test_a_divergence_that_goes_on(cause, step):
    """It is known before its end, and only if it lies in the weights."""
    episodes = Episodes(10, course(3.0))
    episodes.add(anomaly(20, usual_loss=2.0, cause=cause), 6.0, is_shared=False)
    assert episodes.diverged_step is None
    for number in range(21, 26):
        episodes.pass_over(numbers(number, loss=5.0))

    assert episodes.diverged_step == step


@pytest.mark.parametrize(
    ("cause", "step", "rate", "found"),
    [
        ("learning_rate", 30, 0.6, 3),
        ("learning_rate", 30, 0.4, None),
        ("learning_rate", 70, 1.0, None),
        ("learning_rate", 30, float("nan"), None),
        ("data", 30, 1.0, None),
    ],
)
def test_a_rate_that_is_still_as_high(cause, step, rate, found):
    """It is to blame for a while, unless it has been lowered."""
    episodes = Episodes(10, LossCourse())
    assert episodes.step_of_rate(step, rate) is None
    bad = anomaly(3, "update_spike", cause=cause, learning_rate=1.0)
    episodes.add(bad, 6.0, is_shared=False)

    assert episodes.step_of_rate(step, rate) == found


@pytest.mark.parametrize(
    ("cause", "at", "num_steps", "loss", "is_told"),
    [
        ("learning_rate", 3, 40, 5.45, True),
        ("learning_rate", 3, 40, 5.0, False),
        ("data", 3, 40, 5.45, False),
        ("learning_rate", 30, 40, 5.45, False),
        ("learning_rate", 3, 15, 5.45, False),
    ],
)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_loss_that_falls_no_lower(cause, at, num_steps, loss, is_told, is_resumed):
    """Weights that the first updates have ruined give losses like those at first."""
    losses = LossCourse()
    episodes = Episodes(10, losses)
    for value in [5.5] * (at - 1) + [30.0] * 3:
        losses.add(value)
    bad = anomaly(at, "update_spike", usual_loss=5.5, cause=cause)
    episodes.add(bad, 6.0, is_shared=False)
    for step in range(at + 1, at + num_steps):
        losses.add(loss)
        episodes.watch(numbers(step, loss))
        episodes.pass_over(numbers(step, loss))
    if is_resumed:
        state = json.loads(json.dumps(episodes.state_dict()))
        episodes = Episodes(10, losses)
        episodes.load_state_dict(state)
        episodes.watch(numbers(at + num_steps, loss))

    said = [one.as_record()["diverged"] for one in episodes.close()]
    expected = ["the loss is no lower at the end than before: about 5.45, after 5.5"]
    assert said == (expected if is_told else [])
    assert episodes.close() == []


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_loss_that_rises_from_step_to_step(is_resumed):
    """After an early episode of the rate, none is unusual after the one before; it is told once."""
    losses, told = LossCourse(), []
    episodes = Episodes(10, losses)
    for value in (6.2, 6.2):
        losses.add(value)
    bad = anomaly(3, "update_spike", usual_loss=6.2, cause="learning_rate")
    episodes.add(bad, 6.3, is_shared=False)
    for step in range(4, 60):
        loss = 6.2 + step - 3 if step < 45 else 3.0
        losses.add(loss)
        if is_resumed:
            state = json.loads(json.dumps(episodes.state_dict()))
            episodes = Episodes(10, losses)
            episodes.load_state_dict(state)
        for end in (episodes.watch(numbers(step, loss)), episodes.pass_over(numbers(step, loss))):
            told += [] if end is None else [(step, end.run_away, end.back_at)]

    away = "the loss has not come back since: about 24.2, after 6.2"
    assert told == [(23, away, None), (47, away, 47)]
    assert episodes.close() == []


def test_a_loss_that_comes_back_and_is_no_lower_at_the_end():
    """The last record takes back that it was back."""
    losses, records = LossCourse(), []
    episodes = Episodes(10, losses)
    losses.add(6.2)
    bad = anomaly(3, "update_spike", usual_loss=6.2, cause="learning_rate")
    episodes.add(bad, 6.3, is_shared=False)
    records.append(bad.as_record())
    for step in range(4, 60):
        loss = 20.0 if step < 45 else 6.1
        losses.add(loss)
        for end in (episodes.watch(numbers(step, loss)), episodes.pass_over(numbers(step, loss))):
            records += [] if end is None else [end.as_record()]
    (came_back,) = episodes_of([(0, records)])
    records += [one.as_record() for one in episodes.close()]
    (at_the_end,) = episodes_of([(0, records)])

    assert came_back.records[0]["back"] == 47
    assert not came_back.has_diverged
    assert at_the_end.has_diverged
    assert at_the_end.records[0]["diverged"] == (
        "the loss is no lower at the end than before: about 6.1, after 6.2"
    )


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize(
    ("step", "loss", "told"),
    [(8, 5.6, "5.6, after 5.5"), (8, 5.0, None), (30, 5.6, None), (8, 9.0, "9, after 5.5")],
)
def test_large_updates_show_in_the_loss_or_not_at_all(step, loss, told, is_resumed):
    """A suspected episode is told with its cause, if the loss has not fallen after it."""
    losses = LossCourse()
    episodes = Episodes(10, losses)
    for _ in range(step):
        losses.add(5.5)
    episodes.suspect(step, large_in_a_row(0.3))
    if is_resumed:
        state = json.loads(json.dumps(episodes.state_dict()))
        episodes = Episodes(10, losses)
        episodes.load_state_dict(state)
    ends = []
    for number in range(step + 1, step + 30):
        losses.add(loss)
        ends.append(episodes.watch(numbers(number, loss)))
        ends.append(episodes.pass_over(numbers(number, loss)))
    found = [one.as_record() for one in [*ends, *episodes.close()] if one is not None]

    assert [one["step"] for one in found] == ([] if told is None else [step])
    for one in found:
        assert one["cause"] == "learning_rate"
        assert one["diverged"].endswith(told)
        assert one["explanation"].startswith("each of 8 updates in a row changed the weights by")


@pytest.mark.parametrize(("learned", "is_told"), [(4.0, False), (5.4, True)])
def test_a_run_that_has_learned_since_its_large_updates(learned, is_told):
    """They are not to blame for a loss that rises much later."""
    losses = LossCourse()
    episodes = Episodes(10, losses)
    for _ in range(8):
        losses.add(5.5)
    episodes.suspect(8, large_in_a_row(0.3))
    found = []
    for step in range(9, 70):
        loss = learned if step < 50 else 3000.0
        losses.add(loss)
        found += [episodes.watch(numbers(step, loss)), episodes.pass_over(numbers(step, loss))]
    found = [one for one in [*found, *episodes.close()] if one is not None]

    assert bool(found) == is_told
