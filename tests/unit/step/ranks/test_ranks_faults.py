"""A fault on one rank makes all ranks skip, and the ranks stay equal."""

import math

import pytest
import torch

from support.ranks.faults import CASES, NUM_STEPS, OPTIMIZERS, meet, train_fixture
from support.training_state import assert_same_state, assert_unchanged


@pytest.fixture(scope="module", params=OPTIMIZERS)
def met(request, two_ranks):
    """Train all cases with one optimizer, and return the records of both ranks."""
    return two_ranks.run(meet, request.param)


with_case = pytest.mark.parametrize("name", CASES)


@with_case
def test_all_ranks_decide_the_same(met, name):
    """Flags, loss scale and counts are the same on all ranks in every step."""
    case = CASES[name]
    overflows = [case.overflows and step == case.step for step in range(NUM_STEPS)]
    for rank in met:
        assert rank[name]["overflows"] == overflows
        scales = [512.0 if any(overflows[: step + 1]) else 1024.0 for step in range(NUM_STEPS)]
        assert rank[name]["scales"] == scales
        assert rank[name]["counts"] == [NUM_STEPS - case.skips, int(case.skips)]


@with_case
def test_a_skipped_update_changes_nothing(met, name):
    """A skipped update changes no training state, and an applied update changes all weights."""
    case = CASES[name]
    for rank in met:
        for step in range(NUM_STEPS):
            before, after = rank[name]["states"][step : step + 2]
            if case.skips and step == case.step:
                assert_unchanged(before, after)
            else:
                weights = [key for key in before if key.startswith("/network")]
                assert not any(torch.equal(before[key], after[key]) for key in weights)
                assert all(after[key].isfinite().all() for key in weights)


@with_case
def test_ranks_stay_together(met, name):
    """After every step the training state is bitwise the same on all ranks."""
    first, second = (rank[name]["states"] for rank in met)
    for left, right in zip(first, second, strict=True):
        assert_same_state(left, right)


@with_case
def test_local_norms_tell_whose_gradients_they_were(met, name):
    """Only ranks with a fault have a non-finite local norm after an overflow."""
    case = CASES[name]
    for is_bad, rank in zip(case.bad_ranks, met, strict=True):
        assert rank[name]["norms"][case.step].isfinite().item() is not case.overflows
        assert rank[name]["local_norms"][case.step].isfinite().all().item() is not is_bad


@with_case
def test_norms_around_the_reduction_are_those_of_this_rank_and_of_all(met, name):
    """The report has the norm of the rank's own gradients, and that of the reduced ones."""
    for rank in met:
        own = rank[name]["local_norms"].norm(dim=1)
        expected = torch.stack((own, rank[name]["norms"]), dim=1)
        torch.testing.assert_close(rank[name]["reduction_norms"], expected, equal_nan=True)


def test_a_rank_without_targets_adds_nothing(met):
    """A rank without targets has local norms of 0 and does not change the update."""
    name = "no targets on one"
    step = CASES[name].step
    first, second = (rank[name] for rank in met)

    assert second["local_norms"][step].eq(0).all()
    # The mean is over both ranks' targets, and only the first rank has targets.
    own_norm = first["local_norms"][step].square().sum().sqrt()
    torch.testing.assert_close(first["norms"][step], own_norm, rtol=1e-5, atol=0)


def test_the_recorded_steps(two_ranks):
    """Steps agree with those recorded with MindSpore 2.10 on two ranks.

    MindSpore's local norm is the square of the norm, so squares are compared.
    """
    first, second = two_ranks.run(train_fixture)

    assert [first["losses"][0], second["losses"][0]] == [5.0, 11.0]
    assert first["overflows"] == second["overflows"] == [False, True]
    assert first["scales"] == second["scales"] == [8.0, 4.0]
    assert first["norms"] == second["norms"] == [pytest.approx(3.6056, abs=1e-4), math.inf]
    assert first["squares"] == pytest.approx([5.0, 5.0])
    assert second["squares"] == [pytest.approx(25.0), math.inf]
    for rank in (first, second):
        assert [each.tolist() for each in rank["weights"]] == [[-1.0, -1.0]] * 2
