"""Layers of names, and the only layer whose gradients have risen."""

import pytest
from torch import nn

from mfwrap.callbacks.culprit.layers import LayerNames, layer_of_rise
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence

NAMES = ("wte.weight", "h.0.a.weight", "h.0.b.weight", "h.1.a.weight", "h.1.b.weight", "head.bias")


def evidence(*rises: float) -> RankEvidence:
    """Return a rank whose groups have risen by these factors."""
    return RankEvidence(
        rank=0,
        loss=1.0,
        names=NAMES,
        norms=tuple(rises),
        usual_norms=(1.0,) * len(rises),
        scores=tuple(5.0 * (rise - 1) for rise in rises),
    )


@pytest.mark.parametrize(
    ("rises", "layer"),
    [
        ((1, 1, 1, 100, 1, 1), "h.1"),
        ((1, 1, 1, 100, 40, 1), "h.1"),
        ((1, 2, 1, 100, 1, 1), "h.1"),
        ((1, 20, 1, 100, 1, 1), None),
        ((3, 3, 3, 100, 1, 1), None),
        ((3, 1, 1, 100, 1, 1), "h.1"),
        ((100, 100, 100, 100, 100, 1000), None),
        ((1, 1, 1, 1, 1, 1), None),
    ],
)
def test_only_a_layer_that_stands_out_is_named(rises, layer):
    """A fault that lifts several layers has no layer."""
    assert layer_of_rise(LayerNames(None), evidence(*rises)) == layer


def test_names_of_parameters_and_of_modules():
    """The layer of a parameter and that of a module are the same."""
    network = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])})
    layers = LayerNames(network)

    assert layers.of("h.1.weight") == layers.of("h.1") == "h.1"
    assert layers.common(["h.1.weight", "h.1.bias"]) == "h.1"
    assert layers.common(["h.0.weight", "h.1.bias"]) is None
    assert LayerNames(None).of("h.1.weight") == "h.1"
