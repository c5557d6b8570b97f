"""Tests of the judge of attention logits and the load of experts."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mfwrap.callbacks.culprit.judges.forward import ForwardJudge, ForwardRise

NUM_EXPERTS = 8


def noise(step: int, seed: int = 0) -> float:
    """Return a factor that varies by about 10 %."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return math.exp(0.1 * torch.randn((), generator=generator).item())


def logits(value: float) -> Tensor:
    """Return the largest logits of two heads."""
    return torch.tensor([value / 2, value])


def shares(num_used: int) -> Tensor:
    """Return shares of a load that is balanced over the first experts."""
    return (torch.arange(NUM_EXPERTS) < num_used).float() / num_used


def alarms(judge: ForwardJudge, values: Callable[[int], float], steps: range) -> list[int]:
    """Return the steps at which the logits of ``b`` alarm; those of ``a`` and ``c`` stay calm."""
    found = []
    for step in steps:
        calm = {name: logits(20 * noise(step, seed)) for seed, name in ((1, "a"), (2, "c"))}
        judge.add({**calm, "b": logits(values(step))}, {})
        summary = judge.take()
        assert summary is not None
        num_logits, num_loads = summary.tolist()
        assert num_loads == 0
        if num_logits:
            found.append(step)
    return found


def rise(judge: ForwardJudge) -> ForwardRise:
    """Return the only rise of the last step."""
    assert judge.last is not None
    (only,) = judge.last.rises()
    return only


def test_growth() -> None:
    """Logits that grow by 5 % a step alarm before they reach 200, and name the module."""
    judge = ForwardJudge()
    found = alarms(judge, lambda n: 12 * noise(n) * 1.05 ** max(0, n - 40), range(100))
    assert found
    assert 12 * 1.05 ** (found[0] - 40) < 200
    only = rise(judge)
    assert (only.kind, only.module, only.is_alone) == ("attention_logits", "b", True)
    assert only.num_steps in {16, 32, 64}
    assert only.now > 3 * only.before


def test_calm() -> None:
    """Logits that are high, that settle or that grow below the floor do not alarm."""
    high = alarms(ForwardJudge(), lambda n: 60 * noise(n), range(300))
    healthy = alarms(ForwardJudge(), lambda n: min(8 * 1.022**n, 36), range(300))
    settling = alarms(ForwardJudge(), lambda n: 1 + 24 * (1 - math.exp(-n / 50)), range(300))
    assert (high, healthy, settling) == ([], [], [])


def test_slow_growth_of_high_logits() -> None:
    """Growth by 2 % a step alarms only from about 100 on."""
    found = alarms(ForwardJudge(), lambda n: 20 * noise(n) * 1.02**n, range(160))
    assert 90 < 20 * 1.02 ** found[0] < 120


def test_jump() -> None:
    """A sudden rise alarms at its step, and is never taken for growth."""
    judge = ForwardJudge()
    found = alarms(judge, lambda n: noise(n) * (400 if n >= 40 else 10), range(41))
    assert found == [40]
    assert rise(judge).num_steps == 1
    later = alarms(judge, lambda n: noise(n) * 400, range(41, 140))
    assert all(step < 44 for step in later)


def test_all_layers_grow() -> None:
    """No module is at fault alone if the logits of all grow alike."""
    judge = ForwardJudge()
    for step in range(40):
        judge.add({name: logits(2 * 1.2**step) for name in "abc"}, {})
    assert judge.last is not None
    assert [each.is_alone for each in judge.last.rises()] == [False, False, False]


@pytest.mark.parametrize(("start", "is_found"), [(2, False), (40, True)])
def test_a_load_that_grows(start: int, *, is_found: bool) -> None:
    """Experts specialize in the first steps; later growth is an anomaly."""
    judge, found = ForwardJudge(), []
    for step in range(60):
        share = min(max(step - start, 0), 10) / 10
        judge.add({}, {"moe": (1 - share) * shares(NUM_EXPERTS) + share * shares(3)})
        summary = judge.take()
        assert summary is not None
        found += [step] if summary[1] > 0 else []
    assert bool(found) is is_found


def test_collapsed_router() -> None:
    """A load on two of eight experts alarms at its second step, and a single such step does not."""
    judge, found = ForwardJudge(), []
    for step in range(60):
        judge.add({}, {"moe": shares(2 if step == 30 or step >= 50 else NUM_EXPERTS)})
        summary = judge.take()
        assert summary is not None
        found += [step] if summary[1] > 0 else []
        if step == 51:
            only = rise(judge)
            assert (only.kind, only.module) == ("expert_load", "moe")
            assert math.isclose(only.now, 4, rel_tol=1e-4)
    assert found[0] == 51


def test_non_finite() -> None:
    """Logits that are not finite change nothing of what is usual."""
    judge, other = ForwardJudge(), ForwardJudge()
    for step in range(40):
        judge.add({"b": logits(10 * noise(step))}, {})
        other.add({"b": logits(10 * noise(step))}, {})
        other.add({"b": logits(math.nan if step % 2 else math.inf)}, {})
    assert judge.state_dict() == other.state_dict()


def test_names_come_and_go() -> None:
    """A module that is missing in some steps keeps its values, and a new one starts empty."""
    judge = ForwardJudge()
    for step in range(60):
        judge.add({"b": logits(10 * 1.1**step)} if step % 2 else {"new": logits(5.0)}, {})
    assert rise(judge).module == "b"


def test_state() -> None:
    """A judge that continues from a saved state alarms as the judge that was not interrupted."""

    def values(step: int) -> float:
        return 12 * noise(step) * 1.05**step

    whole, first, second = ForwardJudge(), ForwardJudge(), ForwardJudge()
    expected = [step for step in alarms(whole, values, range(60)) if step >= 20]
    alarms(first, values, range(20))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert alarms(second, values, range(20, 60)) == expected != []


def test_not_watched() -> None:
    """Without watched forwards since the last step there is no summary."""
    judge = ForwardJudge()
    judge.add({}, {})
    assert judge.take() is None
    judge.add({"b": logits(1.0)}, {})
    assert judge.take() is not None
    assert judge.take() is None
