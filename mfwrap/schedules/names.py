"""The table of MindFormers' schedules by name."""

from collections.abc import Mapping
from types import MappingProxyType

from mfwrap.schedules.cosine import (
    ConstantWithCoolDownLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineWithRestartsAndWarmUpLR,
    CosineWithWarmUpLR,
)
from mfwrap.schedules.formula import FormulaLR
from mfwrap.schedules.warm_up import (
    ConstantWarmUpLR,
    LinearWithWarmUpLR,
    PolynomialWithWarmUpLR,
    WarmUpStableDecayLR,
)

SCHEDULES: Mapping[str, type[FormulaLR]] = MappingProxyType(
    {
        schedule.__name__: schedule
        for schedule in (
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
    }
)
"""Every schedule by its name in MindFormers."""
