"""MindFormers' learning-rate schedules by their names, as torch schedulers.

The first argument is the optimizer, whose learning rates replace MindFormers' ``learning_rate`` or
``base_lr``. All other arguments have MindFormers' names and defaults and are passed by keyword.

| schedule | arguments | has a warm-up |
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

`GroupedLR` gives each parameter group a schedule of its own. `BatchGrowth` is no schedule of
learning rates: it is that of a batch that grows.

Schedules with a warm-up also take ``warmup_steps`` or ``warmup_ratio``, and ``warmup_lr_init=0``.
With ``warmup_lr_init=0`` the first update of a warm-up has a rate of 0, as in MindFormers. The
formulas are MindFormers', except in these cases:

| schedule | where | MindFormers | mfwrap |
| --- | --- | --- | --- |
| WarmUpStableDecayLR | first step without a warm-up | nan | the group's rate |
| WarmUpStableDecayLR | after `total_steps` | below 0 | `lr_end` |
| CosineWithWarmUpLR | after `total_steps` if `decay_steps` is later | rises again | `lr_end` |
| CosineWithRestartsAndWarmUpLR | after `total_steps` if `decay_steps` is later | 0 | `lr_end` |
| PolynomialWithWarmUpLR | after `decay_steps` | powers of negative numbers | `lr_end` |
| CosineAnnealingWarmRestarts | at some restarts, by rounding | `eta_min` | the group's rate |
"""

from mfwrap.schedules.batch_growth import BatchGrowth
from mfwrap.schedules.cosine import (
    ConstantWithCoolDownLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineWithRestartsAndWarmUpLR,
    CosineWithWarmUpLR,
)
from mfwrap.schedules.grouped import GroupedLR
from mfwrap.schedules.names import SCHEDULES
from mfwrap.schedules.warm_up import (
    ConstantWarmUpLR,
    LinearWithWarmUpLR,
    PolynomialWithWarmUpLR,
    WarmUpStableDecayLR,
)

__all__ = [
    "SCHEDULES",
    "BatchGrowth",
    "ConstantWarmUpLR",
    "ConstantWithCoolDownLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CosineWithRestartsAndWarmUpLR",
    "CosineWithWarmUpLR",
    "GroupedLR",
    "LinearWithWarmUpLR",
    "PolynomialWithWarmUpLR",
    "WarmUpStableDecayLR",
]
