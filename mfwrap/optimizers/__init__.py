"""Optimizers that torch lacks, and several optimizers as one."""

from mfwrap.optimizers.adam_weight_decay import AdamWeightDecay
from mfwrap.optimizers.chained import ChainedOptimizer
from mfwrap.optimizers.muon import hidden_matrices

__all__ = ["AdamWeightDecay", "ChainedOptimizer", "hidden_matrices"]
