"""Judges of a run go on after a resume, on one rank and on several."""

import contextlib
import gc
import json
import math
import weakref

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.judges.judges import Judges
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.compatibility.graphs import capturing
from support.ranks.monitors import judged_norms, save_usual_norms


def test_a_sample_of_the_state_is_taken_at_its_interval():
    """Between samples the scores of the state are unknown."""
    judges = Judges(nn.Linear(2, 2), 3)
    found = [
        StepScores(*judges.end_step(step, torch.ones(()), None, None).summary.tolist())
        for step in range(1, 7)
    ]
    assert [math.isnan(each.num_bad_states) for each in found] == [True, True, False] * 2


def test_a_frozen_weight_that_changes():
    """It is a change from outside, of a weight that has no updates."""
    network = nn.Linear(2, 2)
    network.bias.requires_grad_(requires_grad=False)
    judges, found = Judges(network, 10), []
    for step in range(1, 9):
        judges.begin_step(step)
        network.weight.data += 0.1
        if step == 6:
            network.bias.data += 1
        found.append(judges.end_step(step, torch.ones(()), None, None))

    assert [each.changed() for each in found] == [("bias",) if n == 6 else () for n in range(1, 9)]
    scores = StepScores(*found[5].summary.tolist())
    assert (found[5].weights, scores.num_changed) == (("weight",), 1)
    assert scores.update_ratio > 0


def test_weights_that_are_frozen_or_unfrozen():
    """Neither is a change from outside, and the judge knows which weights have updates."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    judges, found = Judges(network, 2), []
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(1, 13):
        network[1].requires_grad_(requires_grad=step not in range(4, 9))
        judges.begin_step(step, optimizer)
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(judges.end_step(step, torch.ones(()), None, None, optimizer))

    # The weights to compare are chosen again after every second step.
    assert [len(each.weights) for each in found] == [4] * 4 + [2] * 6 + [4] * 2
    assert not any(each.changed() for each in found)


def test_a_frozen_weight_that_changes_before_the_update():
    """With an optimizer that the judge follows, too, the change is named in its own step alone."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].requires_grad_(requires_grad=False)
    judges, found = Judges(network, 10), []
    optimizer = torch.optim.SGD(network[1].parameters(), lr=0.1)
    for step in range(1, 9):
        judges.begin_step(step, optimizer)
        if step == 6:
            network[0].bias.data.fill_(3.0)
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(judges.end_step(step, torch.ones(()), None, None, optimizer))

    assert [each.changed() for each in found] == [()] * 5 + [("0.bias",)] + [()] * 2


def test_a_teacher_that_code_changes_in_each_step():
    """Its weights are named only if no others have changed."""
    network = nn.ModuleDict({"teacher": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    network.requires_grad_(requires_grad=False)
    network["student"] = nn.Linear(2, 2)
    judges, found = Judges(network, 10), []
    for step in range(1, 9):
        judges.begin_step(step)
        network["teacher"].weight.data += 0.1
        if step == 6:
            network["other"].bias.data.fill_(math.nan)
        found.append(judges.end_step(step, torch.ones(()), None, None))

    assert found[5].changed() == ("other.bias",)
    assert found[6].changed() == ("teacher.weight",)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(3, 3).to(torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.int8),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.full((3,), -math.inf),
        torch.ones(2, 3, 4).transpose(0, 1)[:, :1],
    ],
)
def test_a_frozen_weight_of_any_kind(weight):
    """What cannot be sampled has not changed."""
    network = nn.Linear(2, 2)
    network.register_parameter("odd", nn.Parameter(weight, requires_grad=False))
    judges, found = Judges(network, 2), []
    for step in range(1, 9):
        judges.begin_step(step)
        network.weight.data += 0.1
        found.append(judges.end_step(step, torch.ones(()), None, None))

    assert not any(each.changed() for each in found)


def test_watched_forwards_are_judged():
    """Scores of forwards are known in the steps that are watched, and are part of the state."""
    judges, later, found = Judges(None, 10), Judges(None, 10), []
    for step in range(1, 32):
        if step % 2:
            judges.forward.add({"attn": torch.tensor([1.5**step])}, {})
        judgement = judges.end_step(step, torch.ones(()), None, None)
        found.append(StepScores(*judgement.summary.tolist()).num_logits)
    assert all(math.isnan(each) for each in found[1::2])
    assert (found[0], found[-1]) == (0, 1)
    assert judgement.forward is not None
    assert [each.module for each in judgement.forward.rises()] == ["attn"]
    later.load_state_dict(json.loads(json.dumps(judges.state_dict())))
    assert later.forward.state_dict() == judges.forward.state_dict()


def test_the_optimizer_state_is_known_after_the_first_step():
    """A change before the first sample is found."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    judges = Judges(network, 10)
    for step in (1, 2):
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        judges.end_step(step, torch.ones(()), None, None, optimizer)
    optimizer.state[network.weight]["exp_avg"].mul_(1e5)
    found = judges.states.risen(3, optimizer)[0]
    assert (found.kind, found.name) == ("exp_avg", "weight")


def test_updates_are_measured_unless_several_may_have_passed():
    """A loop that only logs has made an unknown number of updates."""
    network = nn.Linear(2, 2)
    judges = Judges(network, 10)
    network.weight.data.add_(1.0)
    logged = judges.end_step(1, torch.ones(()), None, None, measures_updates=False)
    measured = judges.end_step(2, torch.ones(()), None, None)
    assert (logged.change, logged.moved(), logged.travelled()) == (None, (), {})
    assert measured.change.update.tolist() == [1.0, 0.0]


def test_updates_add_up_from_one_sample_to_the_next():
    """They include the update of the step in which the sample is taken."""
    network = nn.Linear(2, 2)
    judges = Judges(network, 3)
    travelled = []
    for step in range(1, 6):
        network.weight.data.add_(1.0)
        judged = judges.end_step(step, torch.ones(()), None, None)
        travelled.append(judged.travelled()["weight"])
    assert travelled == [1.0, 1.0, 2.0, 1.0, 2.0]


def test_evidence_is_the_same_after_a_resume():
    """What has risen since the last sample, and by how much the updates explain it."""

    def evidence_of(resumes_at):
        network = nn.Linear(2, 2)
        with torch.no_grad():
            network.weight.fill_(0.5)
            network.bias.fill_(0.5)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.2)
        judges = Judges(network, 5)
        for step in range(1, 9):
            if step == resumes_at:
                saved = json.dumps(judges.state_dict())
                judges = Judges(network, 5, step - 1)
                judges.load_state_dict(json.loads(saved))
            judges.begin_step(step)
            network(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            if step == 7:
                network.bias.data.mul_(100)
            travelled = judges.end_step(step, torch.ones(()), None, None, optimizer).travelled()
        return judges.states.risen(8, optimizer), travelled

    expected = evidence_of(None)
    assert [one.name for one in expected[0] if one.kind == "weight"] == ["bias"]
    for step in (2, 5, 6, 8):
        assert evidence_of(step) == expected


def test_a_change_before_the_step_is_no_update():
    """After `begin_step`, what has changed since the last step is told from the update."""
    network = nn.Linear(2, 2)
    judges = Judges(network, 10)
    network.weight.data.add_(1.0)
    judges.begin_step(1)
    judged = judges.end_step(1, torch.ones(()), None, None)
    assert (judged.change.update.tolist(), judged.change.outside.tolist()) == ([0, 0], [1, 0])
    assert judged.changed() == ("weight",)


def test_what_a_loop_does_around_the_update_is_no_update():
    """The update is what ``optimizer.step`` does, until the judges are closed."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    judges = Judges(network, 10)

    def step(number, before, update, after):
        judges.begin_step(number, optimizer)
        network.weight.data.add_(before)
        network.weight.grad = torch.full((2, 2), -update)
        optimizer.step()
        network.weight.data.add_(after)
        change = judges.end_step(number, torch.ones(()), None, None).change
        return change.update[0].item(), change.outside[0].item()

    assert step(1, 0.25, 1.0, 2.0) == pytest.approx((1.0, 0.25))
    assert step(2, 0.5, 1.0, 0.0) == pytest.approx((1.0, 2.5))
    judges.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_captured_update_measures_nothing():
    """The graph would hold it."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    judges = Judges(network, 10)
    judges.begin_step(1, optimizer)
    network.weight.grad = torch.ones(2, 2)
    with capturing(contextlib.nullcontext(), torch.device("cpu")):
        optimizer.step()
    network.weight.data.add_(1.0)

    change = judges.end_step(1, torch.ones(()), None, None).change
    assert change.update[0].item() == pytest.approx(0.0, abs=1e-6)


def test_an_optimizer_does_not_keep_the_judges_alive():
    """A monitor that nobody has closed measures nothing any more."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    judges = Judges(network, 10)
    judges.begin_step(1, optimizer)
    reference = weakref.ref(judges)
    del judges
    gc.collect()

    assert reference() is None
    optimizer.step()


def test_weights_that_are_added_later_are_measured():
    """After the next sample, the judges follow what is trained."""
    network = nn.Sequential(nn.Linear(2, 2))
    judges = Judges(network, 2)
    network.append(nn.Linear(2, 2))
    weights = [judges.end_step(n, torch.ones(()), None, None).weights for n in (1, 2, 3)]
    assert [len(names) for names in weights] == [2, 2, 4]


def test_an_unknown_state_starts_empty_and_a_loaded_one_goes_on():
    """Usual norms follow the names of the groups."""
    first, later = Judges(None, 10), Judges(None, 10)
    assert all(map(math.isnan, judged_norms(first, 2.0, 5.0)))
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert judged_norms(later, 1.0, 1.0, 1.0) == pytest.approx([2.0, 5.0, math.nan], nan_ok=True)


def test_a_judge_that_was_not_used_keeps_its_state():
    """A run that ends before its first step saves what it has loaded."""
    first, later = Judges(None, 10), Judges(None, 10)
    judged_norms(first, 2.0)
    later.load_state_dict(first.state_dict())
    assert later.state_dict() == first.state_dict()


def test_each_rank_restores_its_own_norms(two_ranks):
    """States of all ranks are saved together; with more ranks than before, they are shared."""
    of_one = Judges(None, 10)
    judged_norms(of_one, 7.0, 8.0)
    ranks = two_ranks.run(save_usual_norms, of_one.state_dict())

    for rank, found in enumerate(ranks):
        assert found["restored"] == pytest.approx([7.0, 8.0])
        assert found["again"] == pytest.approx([1.0 + rank, 10.0 + rank])
        assert len(found["alone"]["of_ranks"]) == 1
        # A run that is resumed after its last step saves what it has loaded, of all ranks.
        assert found["kept"] == found["together"]
    assert ranks[0]["together"] == ranks[1]["together"]
