"""Every schedule is in the table of names, and gives the rates of MindFormers."""

import pytest

from mfwrap.schedules import (
    SCHEDULES,
    ConstantWarmUpLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineWithRestartsAndWarmUpLR,
    CosineWithWarmUpLR,
    LinearWithWarmUpLR,
    PolynomialWithWarmUpLR,
    WarmUpStableDecayLR,
)
from support.schedules import SETTINGS, TEN, rates


def test_every_schedule_is_in_the_table():
    """The table lists every class under its name, and the tests cover every class."""
    assert set(SCHEDULES.values()) == SETTINGS.keys()
    assert all(name == kind.__name__ for name, kind in SCHEDULES.items())


RECORDED = {
    "cosine": (
        CosineWithWarmUpLR,
        {**TEN, "lr_end": 0.1},
        {0: 0, 1: 0.5, 2: 1, 6: 0.55, 9: 0.134254, 10: 0.1, 12: 0.1},
    ),
    "linear": (LinearWithWarmUpLR, TEN, {0: 0, 1: 0.5, 2: 1, 6: 0.5, 9: 0.125, 10: 0, 12: 0}),
    "polynomial": (
        PolynomialWithWarmUpLR,
        {**TEN, "lr_end": 0.1},
        {0: 0, 1: 0.5, 2: 1, 6: 0.55, 9: 0.2125, 10: 0.1, 12: 0.1},
    ),
    "restarts": (
        CosineWithRestartsAndWarmUpLR,
        {**TEN, "lr_end": 0.1, "num_cycles": 2},
        {0: 0, 1: 0.5, 2: 1, 4: 0.55, 6: 1, 9: 0.231802, 10: 0.1},
    ),
    "stable": (
        WarmUpStableDecayLR,
        {**TEN, "lr_end": 0.1, "decay_start_steps": 5},
        {0: 0, 1: 0.5, 2: 1, 5: 1, 7: 0.64, 10: 0.1},
    ),
}


TWENTY = {"warmup_steps": 10, "total_steps": 20}
PUBLISHED = {
    "constant": (ConstantWarmUpLR, TWENTY, {1: 0.0005, 15: 0.005}),
    "linear": (LinearWithWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0025}),
    "cosine": (CosineWithWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0024999997}),
    "restarts": (CosineWithRestartsAndWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0024999997}),
    "polynomial": (PolynomialWithWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0025000498}),
    "annealing": (
        CosineAnnealingLR,
        {"t_max": 10, "eta_min": 1e-7},
        {1: 0.0048776437, 15: 0.0025000498},
    ),
    "warm restarts": (
        CosineAnnealingWarmRestarts,
        {"t_0": 10, "t_mult": 2, "eta_min": 1e-7},
        {1: 0.0048776437, 15: 0.0042677815},
    ),
}


@pytest.mark.parametrize(("kind", "settings", "expected"), RECORDED.values(), ids=RECORDED)
def test_recorded_rates(kind, settings, expected):
    """Rates agree with MindFormers for a run of ten steps with a warm-up of two steps."""
    assert rates(kind, list(expected), **settings) == pytest.approx(
        list(expected.values()), abs=1e-6
    )


@pytest.mark.parametrize(("kind", "settings", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_rates(kind, settings, expected):
    """Rates agree with the float32 rates in MindFormers' documentation."""
    assert rates(kind, list(expected), lr=0.005, **settings) == pytest.approx(
        list(expected.values()), rel=2e-7
    )
