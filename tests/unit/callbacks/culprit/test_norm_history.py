"""Usual norms and the rises above them agree with arithmetic in float64."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfwrap.callbacks.culprit.norm_history import GlobalNormHistory, RunningNorms, WeightWatch
from support.ranks.monitors import save_usual_norms

NAN, INF = math.nan, math.inf
norms = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([NAN, INF, 0.0]))


@given(steps=st.lists(st.tuples(norms, norms, st.booleans()), max_size=40))
def test_running_norms(steps):
    """A usual norm is a bias-corrected mean of applied, finite norms, with rises capped at 4x."""
    running = RunningNorms(["a", "b"], torch.device("cpu"))
    expected: list[list[float]] = [[0.0, 0.0], [0.0, 0.0]]
    for *values, applied in steps:
        running.add(torch.tensor(values), torch.tensor(applied))
        for entry, value in zip(expected, np.float32(values).tolist(), strict=True):
            if applied and 0 < value < INF:
                limited = min(value, 4 * entry[0] / entry[1]) if entry[1] else value
                entry[0] = 0.98 * entry[0] + 0.02 * limited
                entry[1] = 0.98 * entry[1] + 0.02
    usual = [mean / weight if weight else NAN for mean, weight in expected]

    assert running.usual.tolist() == pytest.approx(usual, rel=1e-4, nan_ok=True)


def test_usual_norms_of_a_step_do_not_change_later():
    """The tensor that `usual` returns keeps its values when a later step is added."""
    running = RunningNorms(["a"], torch.device("cpu"))
    running.add(torch.tensor([2.0]), torch.tensor(data=True))
    before = running.usual
    running.add(torch.tensor([4.0]), torch.tensor(data=True))

    assert before.tolist() == [2.0]
    assert running.usual.item() > 2.0


def test_running_norms_are_restored_by_name():
    """Saved means are restored by group name; a group without a saved mean starts empty."""
    running = RunningNorms(["a", "b"], torch.device("cpu"))
    running.add(torch.tensor([2.0, 3.0]), torch.tensor(data=True))
    saved = json.loads(json.dumps(running.state_dict()))
    later = RunningNorms(["b", "c"], torch.device("cpu"))
    later.load_state_dict(saved)

    assert later.usual.tolist() == pytest.approx([3.0, NAN], nan_ok=True)


def test_usual_norms_of_several_ranks(two_ranks):
    """The gathered state restores each rank's norms; more ranks share the norms of fewer ranks."""
    of_one = {"names": ["a", "b"], "means": [[2.0, 3.0]], "weights": [[0.5, 0.5]]}
    of_three = {"names": ["b"], "means": [[1.0], [2.0], [3.0]], "weights": [[1.0], [1.0], [1.0]]}
    ranks = two_ranks.run(save_usual_norms, of_one)

    for rank, found in enumerate(ranks):
        assert found["own"] == found["again"] == pytest.approx([1.0 + rank, 10.0 + rank])
        assert found["restored"] == [4.0, 6.0]
        assert found["together"] == ranks[0]["together"]
        assert [found["together"]["means"][rank]] == found["alone"]["means"]
    again = RunningNorms(["b"], torch.device("cpu"))
    again.load_state_dict(ranks[1]["together"])
    assert again.usual.tolist() == pytest.approx([10.0])
    second = two_ranks.run(save_usual_norms, of_three)[1]
    assert second["restored"] == pytest.approx([NAN, 2.0], nan_ok=True)


def test_usual_norms_of_an_older_state():
    """A state of an older version, with the numbers of one rank, is restored on every rank."""
    running = RunningNorms(["a"], torch.device("cpu"))
    running.load_state_dict({"names": ["a"], "means": [3.0], "weights": [0.5]})

    assert running.usual.tolist() == [6.0]


def test_the_usual_global_norm_is_a_geometric_mean():
    """The usual norm is the geometric mean of the first norms, with equal weights."""
    history = GlobalNormHistory(10.0)
    values = [2.0, 8.0, 4.0, 1.0]
    for value in values:
        history.add(value)

    assert history.usual == pytest.approx(np.exp(np.mean(np.log(values))))


def test_the_first_twenty_steps_have_no_spike():
    """A spike is reported only after twenty norms have been learned."""
    history = GlobalNormHistory(10.0)
    for _ in range(19):
        history.add(1.0)
        assert not history.is_spike(1e6)
    history.add(1.0)

    assert history.is_spike(1e6)


@pytest.mark.parametrize(("norm", "is_spike"), [(9.9, False), (10.1, True), (0.0, False)])
def test_a_spike_is_a_factor_above_the_usual_norm(norm, is_spike):
    """If norms hardly vary, a norm above `factor` times the usual norm is a spike."""
    history = GlobalNormHistory(10.0)
    for number in range(50):
        history.add(1.0 + 0.01 * (number % 2))

    assert history.is_spike(norm * history.usual) is is_spike


def test_where_norms_scatter_a_spike_is_six_deviations_above():
    """If norms vary widely, a norm more than six standard deviations above usual is a spike."""
    history = GlobalNormHistory(10.0)
    for number in range(400):
        history.add(10.0 ** (number % 3 - 1))
    deviation = math.sqrt(2 / 3) * math.log(10)

    # Test with 5.7 and 6.3 deviations instead of exactly six, because the last values shift the
    # exponential mean.
    assert not history.is_spike(history.usual * math.exp(5.7 * deviation))
    assert history.is_spike(history.usual * math.exp(6.3 * deviation))


@given(values=st.lists(norms, max_size=30))
def test_a_restored_history_judges_alike(values):
    """A restored history gives the same answers; zero and non-finite norms are ignored."""
    history, later = GlobalNormHistory(10.0), GlobalNormHistory(10.0)
    for value in values:
        history.add(value)
    later.load_state_dict(json.loads(json.dumps(history.state_dict())))

    assert later.usual == history.usual
    assert (history.usual is None) == (not any(0 < value < INF for value in values))
    assert [later.is_spike(x) for x in (1.0, 100.0)] == [history.is_spike(x) for x in (1.0, 100.0)]


def test_a_spike_does_not_become_usual():
    """A single norm of 1e6 raises a usual norm of 1 by less than 3 percent."""
    history = GlobalNormHistory(10.0)
    for _ in range(100):
        history.add(1.0)
    history.add(1e6)

    assert history.usual < 1.03


def network() -> nn.Sequential:
    """Return three layers whose biases are zero."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in layers:
        nn.init.zeros_(layer.bias)
    return layers


@pytest.mark.parametrize("factor", [NAN, INF, 100.0, -5.0])
def test_a_weight_that_blows_up_is_named(factor):
    """A weight is named, with both norms, if it is non-finite or has risen more than fourfold."""
    model = network()
    watch = WeightWatch(model)
    before = model[1].weight.norm().item()
    with torch.no_grad():
        model[1].weight.mul_(factor)
        model[2].weight.mul_(3.0)
    (found,) = watch.changed()

    assert (found.name, found.norm_before) == ("1.weight", pytest.approx(before, rel=1e-6))
    assert found.norm == pytest.approx(abs(factor) * before, rel=1e-6, nan_ok=True)


def test_the_worst_weight_comes_first():
    """Weights are sorted by their rise; NaN counts as the largest."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        model[0].weight.mul_(10.0)
        model[2].weight.mul_(20.0)
        model[1].weight.fill_(NAN)

    assert [found.name for found in watch.changed()] == ["1.weight", "2.weight", "0.weight"]


def test_a_weight_that_began_at_zero():
    """A bias that began at zero is named only if it grows far beyond the size of the weights."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        model[0].bias.fill_(0.2)
    assert watch.changed() == []
    with torch.no_grad():
        model[0].bias.fill_(20.0)
    assert [found.name for found in watch.changed()] == ["0.bias"]


def test_a_change_of_all_weights_names_none():
    """If all weights are non-finite, none of them is named as the cause."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(NAN)

    assert watch.changed() == []


def test_a_new_look_forgets_earlier_rises():
    """A rise before the last call of `look` is not reported."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        model[0].weight.mul_(10.0)
    watch.look()

    assert watch.changed() == []
