"""`is_explained_by_scale` distinguishes a loss scale that is too high from a fault."""

import math

import pytest

from mfwrap.callbacks.culprit.anomaly_log import GroupNorm, StateNorm
from mfwrap.callbacks.culprit.rank_evidence import (
    RankEvidence,
    is_explained_by_scale,
    is_scale_alone,
)

INF, NAN = math.inf, math.nan
FLOAT16 = 65504.0


def evidence(**fields) -> RankEvidence:
    """Return the evidence of a rank whose second group has overflowed."""
    defaults = {
        "rank": 0,
        "loss": 1.0,
        "names": ("a", "b"),
        "norms": (2.0, INF),
        "usual_norms": (2.0, 3.0),
    }
    return RankEvidence(**{**defaults, **fields})


def test_groups_of_a_rank():
    """`bad_groups` has the numbers of non-finite groups; `rise` is the ratio to the usual norm."""
    rank = evidence(norms=(8.0, NAN), usual_norms=(2.0, NAN), rank=3)

    assert rank.bad_groups == [1]
    assert rank.group(0) == GroupNorm(name="a", rank=3, norm=8.0, usual_norm=2.0)
    assert (rank.rise(0), rank.rise(1)) == (4.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "has_fault"),
    [
        ({"norms": (2.0, 3.0)}, False),
        ({}, True),
        ({"norms": (2.0, 3.0), "loss": NAN}, True),
        ({"names": (), "norms": (), "usual_norms": ()}, True),
    ],
    ids=["all finite", "gradient", "loss", "no local norms"],
)
def test_a_rank_with_a_fault(fields, has_fault):
    """`has_fault` is true for a non-finite loss or local norm, or if there are no local norms."""
    assert evidence(**fields).has_fault is has_fault


@pytest.mark.parametrize(
    ("scale", "explained"),
    [(None, False), (1.0, False), (FLOAT16 / 64 / 3.0 * 0.99, False), (FLOAT16 / 64 / 3.0, True)],
)
def test_a_scale_that_is_too_high(scale, explained):
    """A scale explains an overflow if scale * 64 * usual norm reaches the limit of the dtype."""
    assert is_explained_by_scale([evidence(loss_scale=scale)], FLOAT16) is explained


@pytest.mark.parametrize(
    ("fields", "usual_global_norm", "threshold"),
    [
        ({"usual_norms": (NAN, NAN)}, None, FLOAT16 / 2e4),
        ({"usual_norms": (NAN, NAN), "norms": (INF, INF)}, 5.0, FLOAT16 / 64 / 5.0),
        ({"names": (), "norms": (), "usual_norms": ()}, 5.0, FLOAT16 / 64 / 5.0),
    ],
    ids=["another group", "the global norm", "no local norms"],
)
def test_a_group_without_a_usual_norm(fields, usual_global_norm, threshold):
    """A group without a usual norm is judged by 1e4 times the largest finite norm.

    Without finite norms it is judged by 64 times the usual global norm.
    """
    for factor, explained in ((0.99, False), (1.01, True)):
        rank = evidence(
            loss_scale=factor * threshold, usual_global_norm=usual_global_norm, **fields
        )
        assert is_explained_by_scale([rank], FLOAT16) is explained


def test_without_any_usual_norm_every_scale_explains_an_overflow():
    """As long as no usual norm is known, every loss scale above 1 explains an overflow."""
    unknown = evidence(names=(), norms=(), usual_norms=(), loss_scale=2.0)

    assert is_explained_by_scale([unknown], FLOAT16)


@pytest.mark.parametrize("in_float16", [False, True])
def test_a_network_that_computes_in_float16(in_float16):
    """Its numbers are smaller than the loop knows."""
    ranks = [evidence(loss_scale=2.0**16, usual_global_norm=1.0, in_float16=in_float16)]

    assert is_explained_by_scale(ranks, 1e38) is in_float16


@pytest.mark.parametrize("is_explained", [False, True])
@pytest.mark.parametrize(
    ("norms", "is_alone"),
    [
        ((2.0, None), True),
        ((63.0, 9e9), True),
        ((65.0, None), False),
        ((NAN, None), False),
        ((math.inf, None), False),
    ],
)
def test_a_replay_without_the_scale(norms, is_alone, is_explained):
    """The scale is at fault if the gradients of the rank at fault are ordinary without it.

    The replay decides, whatever the size of the scale explains.
    """
    ranks = [
        evidence(usual_global_norm=1.0),
        evidence(rank=1, norms=(2.0, 3.0), usual_global_norm=1.0),
    ]

    assert is_scale_alone(ranks, norms, is_explained=is_explained) is is_alone
    first = evidence(usual_global_norm=None)
    assert not is_scale_alone([first], (math.inf,), is_explained=is_explained)


@pytest.mark.parametrize("is_explained", [False, True])
def test_ranks_without_a_replay(is_explained):
    """Where no replay tells, the size of the scale does; a weight that has grown is a fault."""
    both = [evidence(), evidence(rank=1)]

    assert is_scale_alone(both, (2.0, 2.0), is_explained=is_explained)
    assert is_scale_alone(both, (2.0, None), is_explained=is_explained) is is_explained
    calm = [evidence(norms=(2.0, 3.0))]
    assert is_scale_alone(calm, (None,), is_explained=is_explained) is is_explained
    grown = evidence(states=(risen("b"),), num_weights=8)
    assert not is_scale_alone([grown], (2.0,), is_explained=is_explained)


def risen(name: str, kind: str = "weight") -> StateNorm:
    """Return a norm that is nine times the one before."""
    return StateNorm(kind=kind, name=name, norm=9.0, norm_before=1.0, rise=9.0)


def test_most_weights_are_no_culprits():
    """A few risen weights are named; if most have risen, that is a consequence of the fault."""
    few = evidence(states=(risen("a"), risen("a", "exp_avg")), num_weights=4)
    most = evidence(states=(risen("a"), risen("b"), risen("c")), num_weights=4)

    assert few.weights == (risen("a"),)
    assert (few.has_moved, most.has_moved, most.weights) == (False, True, ())


@pytest.mark.parametrize(
    "fields",
    [{"loss": INF}, {"states": (risen("a"),), "num_weights": 4}],
    ids=["loss", "weight"],
)
def test_a_fault_that_no_scale_explains(fields):
    """No scale explains an overflow if any rank has a non-finite loss or a grown weight."""
    ranks = [evidence(loss_scale=2.0**40), evidence(rank=1, **fields)]

    assert not is_explained_by_scale(ranks, FLOAT16)
