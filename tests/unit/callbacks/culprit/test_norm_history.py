"""What norms are usual: on the host and on the device, against arithmetic in float64."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.callbacks.culprit.norm_history import GlobalNormHistory, RunningNorms

NAN, INF = math.nan, math.inf
norms = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([NAN, INF, 0.0]))


@given(steps=st.lists(st.tuples(norms, norms, st.booleans()), max_size=40))
def test_running_norms(steps):
    """A bias-corrected mean over applied, finite steps that counts a rise above four as four."""
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


def test_running_norms_of_a_step_stay():
    """What was usual before a step is not changed by it."""
    running = RunningNorms(["a"], torch.device("cpu"))
    running.add(torch.tensor([2.0]), torch.tensor(data=True))
    before = running.usual
    running.add(torch.tensor([4.0]), torch.tensor(data=True))

    assert before.tolist() == [2.0]
    assert running.usual.item() > 2.0


def test_running_norms_go_on_by_name():
    """Saved means are those of the groups of the same name; a new group begins anew."""
    running = RunningNorms(["a", "b"], torch.device("cpu"))
    running.add(torch.tensor([2.0, 3.0]), torch.tensor(data=True))
    saved = json.loads(json.dumps(running.state_dict()))
    later = RunningNorms(["b", "c"], torch.device("cpu"))
    later.load_state_dict(saved)

    assert later.usual.tolist() == pytest.approx([3.0, NAN], nan_ok=True)


def test_the_usual_global_norm_is_a_geometric_mean():
    """The first twenty norms count alike."""
    history = GlobalNormHistory(10.0)
    values = [2.0, 8.0, 4.0, 1.0]
    for value in values:
        history.add(value)

    assert history.usual == pytest.approx(np.exp(np.mean(np.log(values))))


def test_nothing_is_a_spike_at_the_begin():
    """There has to be a history of twenty steps."""
    history = GlobalNormHistory(10.0)
    for _ in range(19):
        history.add(1.0)
        assert not history.is_spike(1e6)
    history.add(1.0)

    assert history.is_spike(1e6)


@pytest.mark.parametrize(("norm", "is_spike"), [(9.9, False), (10.1, True), (0.0, False)])
def test_a_spike_is_a_factor_above(norm, is_spike):
    """Where norms hardly scatter, the factor decides."""
    history = GlobalNormHistory(10.0)
    for number in range(50):
        history.add(1.0 + 0.01 * (number % 2))

    assert history.is_spike(norm * history.usual) is is_spike


def test_where_norms_scatter_a_spike_is_six_deviations_away():
    """Norms that rise and fall by factors of ten all the time are no spikes."""
    history = GlobalNormHistory(10.0)
    for number in range(400):
        history.add(10.0 ** (number % 3 - 1))
    deviation = math.sqrt(2 / 3) * math.log(10)

    # The exponential mean follows the last of the values a little.
    assert not history.is_spike(history.usual * math.exp(5.7 * deviation))
    assert history.is_spike(history.usual * math.exp(6.3 * deviation))


@given(values=st.lists(norms, max_size=30))
def test_a_history_goes_on(values):
    """A saved history judges as the one that was not saved; what is not finite teaches nothing."""
    history, later = GlobalNormHistory(10.0), GlobalNormHistory(10.0)
    for value in values:
        history.add(value)
    later.load_state_dict(json.loads(json.dumps(history.state_dict())))

    assert later.usual == history.usual
    assert (history.usual is None) == (not any(0 < value < INF for value in values))
    assert [later.is_spike(x) for x in (1.0, 100.0)] == [history.is_spike(x) for x in (1.0, 100.0)]


def test_a_spike_does_not_become_usual():
    """One norm of a million moves the usual one by three hundredths."""
    history = GlobalNormHistory(10.0)
    for _ in range(100):
        history.add(1.0)
    history.add(1e6)

    assert history.usual < 1.03
