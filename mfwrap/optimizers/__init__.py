"""Optimizers that torch lacks, and several optimizers as one."""

from mfwrap.optimizers.adam_weight_decay import AdamWeightDecay
from mfwrap.optimizers.chained import ChainedOptimizer
from mfwrap.optimizers.expert_bias import ExpertBias
from mfwrap.optimizers.muon import Muon, hidden_matrices
from mfwrap.optimizers.qk_clip import QKClip

__all__ = ["AdamWeightDecay", "ChainedOptimizer", "ExpertBias", "Muon", "QKClip", "hidden_matrices"]
