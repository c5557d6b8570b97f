"""Name the layer of parameters, modules and groups of gradients."""

import math
from collections.abc import Sequence
from typing import final

from torch import nn

from mfwrap.callbacks.culprit.judges.step import LIMITS
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence
from mfwrap.tensors.norm_groups import layer_of, layer_of_module
from mfwrap.tensors.wrappers import plain_name, unwrapped_network

_FEWEST_LAYERS = 3
_LEAST_RISE = 4.0
_LEAST_SCORE = LIMITS["local_norm"] / 2
_CALM = 2.0
"""Largest rise of the norm of all other gradients together that is ordinary."""


@final
class LayerNames:
    """Name the layer of a parameter, a module or a group of gradients.

    Args:
        network: Network with or without wrappers; ``None`` if unknown. Names are then taken as
            names of parameters: by default each group of gradients has only one parameter.
    """

    def __init__(self, network: nn.Module | None) -> None:
        self._network = network

    def of(self, name: str) -> str:
        """Return the layer of a parameter, a module or a group of gradients."""
        if self._network is None:
            return layer_of(name)
        named = unwrapped_network(self._network).named_parameters(remove_duplicate=False)
        is_parameter = any(name == plain_name(parameter) for parameter, _ in named)
        return layer_of(name) if is_parameter else layer_of_module(name)

    def common(self, names: Sequence[str]) -> str | None:
        """Return the layer that all names are in; ``None`` if they are in several."""
        layers = {self.of(name) for name in names}
        return layers.pop() if len(layers) == 1 else None


def layer_of_rise(layers: LayerNames, evidence: RankEvidence) -> str | None:
    """Return the only layer whose gradients have risen.

    A factor in the loss, bad data and bad weights lift the gradients of many layers, each by
    another factor. The layer with the highest rise is then not at fault, so none is named.

    Returns:
        ``None`` if gradients of several layers have risen, or if fewer than three layers are known.
    """
    layer_of_group = [layers.of(name) for name in evidence.names]
    rises: dict[str, float] = {}
    scores: dict[str, float] = {}
    for number in range(len(evidence.scores)):
        if evidence.is_judged(number):
            layer = layer_of_group[number]
            rises[layer] = max(rises.get(layer, 0.0), evidence.rise(number))
            scores[layer] = max(scores.get(layer, -math.inf), evidence.scores[number])
    if len(rises) < _FEWEST_LAYERS:
        return None
    first, second = sorted(rises, key=lambda layer: -rises[layer])[:2]
    # The others must be clearly calm: the square root of the rise separates the two on a log scale.
    is_alone = rises[first] > _LEAST_RISE and rises[second] < math.sqrt(rises[first])
    others = [number for number, layer in enumerate(layer_of_group) if layer != first]
    is_alone &= _rise_of(evidence, others) < _CALM
    return first if is_alone and scores[first] > _LEAST_SCORE else None


def _rise_of(evidence: RankEvidence, groups: Sequence[int]) -> float:
    """Return the ratio of the norm of several groups together to the usual one; 0 if unknown."""
    known = [number for number in groups if evidence.usual_norms[number] > 0]
    usual = math.hypot(*(evidence.usual_norms[number] for number in known))
    now = math.hypot(*(evidence.norms[number] for number in known))
    return now / usual if usual > 0 else 0.0
