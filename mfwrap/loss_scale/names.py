"""List the loss-scale update cells by name."""

from collections.abc import Mapping
from types import MappingProxyType

from mfwrap.loss_scale.adaptive import AdaptiveLossScaleUpdateCell
from mfwrap.loss_scale.cells import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)

UPDATE_CELLS: Mapping[str, type[LossScaleUpdateCell]] = MappingProxyType(
    {
        cell.__name__: cell
        for cell in (
            AdaptiveLossScaleUpdateCell,
            DynamicLossScaleUpdateCell,
            FixedLossScaleUpdateCell,
        )
    }
)
"""Every update cell by its name in MindSpore or MindFormers."""
