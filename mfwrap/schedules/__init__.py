"""MindFormers' learning-rate schedules as torch schedulers; `mfwrap.schedules.names` lists them."""

from mfwrap.schedules.names import (
    SCHEDULES,
    ConstantWarmUpLR,
    ConstantWithCoolDownLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineWithRestartsAndWarmUpLR,
    CosineWithWarmUpLR,
    LinearWithWarmUpLR,
    PolynomialWithWarmUpLR,
    WarmUpStableDecayLR,
)

__all__ = [
    "SCHEDULES",
    "ConstantWarmUpLR",
    "ConstantWithCoolDownLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CosineWithRestartsAndWarmUpLR",
    "CosineWithWarmUpLR",
    "LinearWithWarmUpLR",
    "PolynomialWithWarmUpLR",
    "WarmUpStableDecayLR",
]
