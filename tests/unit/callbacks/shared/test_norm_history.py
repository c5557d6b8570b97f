"""The usual global norm and the rises above it agree with arithmetic in float64."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.callbacks.shared.norm_history import GlobalNormHistory

NAN, INF = math.nan, math.inf
norms = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([NAN, INF, 0.0]))


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
