"""Optimizers that MindFormers' configurations name and torch does not have."""

from mfwrap.optimizers.adam_weight_decay import AdamWeightDecay

__all__ = ["AdamWeightDecay"]
