"""MindFormers' learning-rate schedules by their names, as torch schedulers.

The optimizer takes the place of ``learning_rate`` or ``base_lr``; the other arguments are
MindFormers' own, by keyword, with its defaults.

| schedule | arguments | with a warm-up |
| --- | --- | --- |
| ConstantWarmUpLR | ``total_steps=None`` | yes |
| ConstantWithCoolDownLR | ``keep_steps, decay_steps, lr_end1, final_steps, lr_end2`` | yes |
| LinearWithWarmUpLR | ``total_steps`` | yes |
| CosineWithWarmUpLR | ``total_steps, num_cycles=0.5, lr_end=0, decay_steps, decay_ratio`` | yes |
| CosineWithRestartsAndWarmUpLR | ``total_steps, num_cycles=1, lr_end=0, decay_steps`` | yes |
| PolynomialWithWarmUpLR | ``total_steps, lr_end=1e-7, power=1, decay_steps`` | yes |
| WarmUpStableDecayLR | ``total_steps, lr_end=1e-7, decay_start_steps or _ratio`` | yes |
| CosineAnnealingLR | ``t_max, eta_min=0`` | no |
| CosineAnnealingWarmRestarts | ``t_0, t_mult=1, eta_min=0`` | no |

Those with a warm-up also take ``warmup_steps`` or ``warmup_ratio``, and ``warmup_lr_init=0``; at
its default the first update has a rate of 0, here as there. Every formula is MindFormers', except
where it would leave the range between its ends:

| schedule | where | MindFormers | here |
| --- | --- | --- | --- |
| WarmUpStableDecayLR | first step without a warm-up | nan | the rate |
| WarmUpStableDecayLR | after `total_steps` | below 0 | `lr_end` |
| CosineWithWarmUpLR | after `total_steps` if `decay_steps` is later | rises again | `lr_end` |
| CosineWithRestartsAndWarmUpLR | after `total_steps` if `decay_steps` is later | 0 | `lr_end` |
| PolynomialWithWarmUpLR | after `decay_steps` | powers of negative numbers | `lr_end` |
| CosineAnnealingWarmRestarts | at some restarts, for rounding | `eta_min` | the rate |
"""

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
