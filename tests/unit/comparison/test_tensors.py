"""Tensors that runs divide differently are compared as a whole."""

from pathlib import Path

import pytest
import torch

from mfwrap.comparison.differences import Difference
from mfwrap.comparison.recorded_run import RecordedRun
from mfwrap.comparison.tensors import compare_gradients, compare_starts, compare_weights
from mfwrap.records.fingerprints import Fingerprint, RankFingerprints, StepFingerprints
from mfwrap.tensors.fingerprints import fingerprints


def run(*parts, share, starts=()):
    """Return a run whose ranks have these parts of a tensor after step 1."""
    found = {}
    for rank, part in enumerate(parts):
        begin = 0 if share != "part" else sum(each.numel() for each in parts[:rank])
        one = {"w": Fingerprint.from_values(fingerprints([part], [begin])[0].tolist())}
        step = StepFingerprints({}, (), None, one, {})
        at_start = dict.fromkeys(starts, one)
        found[rank] = RankFingerprints({}, {"w": share}, {1: step}, at_start)
    return RecordedRun(Path("r"), len(parts), {}, {}, {}, found)


def test_parts():
    """Shards have the bits of the whole tensor, and a change in one shard is found."""
    tensor = torch.randn(8, 3)
    whole, sharded = run(tensor, share="whole"), run(*tensor.split([5, 3]), share="part")
    changed = tensor.clone()
    changed[7, 1] += 1
    other = run(*changed.split([5, 3]), share="part")

    assert compare_weights(whole, sharded, 1, 0.0) == {"weight": None}
    assert compare_weights(whole, other, 1, 0.0)["weight"].name == "w"
    # With the same division, the rank of the shard is known.
    assert compare_weights(sharded, other, 1, 0.0)["weight"].ranks == (1,)


def test_parts_that_cannot_be_added():
    """Parts that are not contiguous are compared with the same rank's part only."""
    parts = torch.randn(8, 4).chunk(2, dim=1)
    local = run(*parts, share="local")

    assert compare_weights(local, run(*parts, share="local"), 1, 0.0) == {"weight": None}
    assert compare_weights(local, run(torch.cat(parts, dim=1), share="whole"), 1, 0.0) == {}


def test_start_against_a_step():
    """Weights at a resume are compared with the other run's weights after that step."""
    tensor = torch.randn(4)
    whole = run(tensor, share="whole")

    assert compare_starts(whole, run(tensor, share="whole", starts=(1,)), 1, 0.0) is None
    found = compare_starts(whole, run(tensor + 1, share="whole", starts=(1,)), 1, 0.0)
    assert (found.step, found.name, found.at_start) == (1, "w", True)


def with_gradients(*gradients, are_unscaled):
    """Return a run of one rank that has recorded these gradients at step 1."""
    found = {
        f"w{number}": Fingerprint.from_values(fingerprints([gradient])[0].tolist())
        for number, gradient in enumerate(gradients)
    }
    step = StepFingerprints({}, (), found, None, {}, are_unscaled)
    rank = RankFingerprints({}, dict.fromkeys(found, "whole"), {1: step}, {})
    return RecordedRun(Path("r"), 1, {}, {}, {}, {0: rank})


def test_other_loss_scales():
    """With other loss scales, only gradients that were divided by the scale are compared."""
    scale = Difference(step=1, kind="loss scale")
    one, other = torch.ones(3), torch.zeros(3)
    scaled = [with_gradients(each, are_unscaled=False) for each in (one, other)]
    unscaled = [with_gradients(each, are_unscaled=True) for each in (one, other)]

    assert compare_gradients(*scaled, 1, 0.0, {"loss scale": scale}) == {}
    found = compare_gradients(*unscaled, 1, 0.0, {"loss scale": scale})
    assert found["gradient"].name == "w0"
    assert compare_gradients(scaled[0], unscaled[1], 1, 0.0, {}) == {}


def test_norms_name_the_gradient_where_clipping_changed_all():
    """If all gradients differ and the local norms name one, their result counts."""
    runs = [with_gradients(torch.ones(3) * x, torch.ones(2) * x, are_unscaled=True) for x in (1, 2)]
    norms = Difference(step=1, kind="gradient", name="w1", num_differing=1, num_compared=2)
    global_norm = Difference(step=1, kind="gradient", name="global_norm")

    assert compare_gradients(*runs, 1, 0.0, {"loss": None, "gradient": norms}) == {}
    found = compare_gradients(*runs, 1, 0.0, {"loss": None, "gradient": global_norm})
    assert (found["gradient"].name, found["gradient"].num_differing) == (None, 2)


def test_gradients_that_are_zero_but_for_rounding():
    """Within a tolerance, a tiny gradient may be another one; a small layer's gradient may not."""
    large, tiny = torch.full((4,), 0.5), torch.full((3,), 1e-9)
    plain = with_gradients(large, tiny, are_unscaled=True)
    other = with_gradients(large, -tiny, are_unscaled=True)
    small = with_gradients(large, torch.full((3,), 1e-3), are_unscaled=True)
    double = with_gradients(large, torch.full((3,), 2e-3), are_unscaled=True)

    assert compare_gradients(plain, other, 1, 1e-3, {}) == {"gradient": None}
    assert compare_gradients(plain, other, 1, 0.0, {})["gradient"].name == "w1"
    assert compare_gradients(small, double, 1, 1e-3, {})["gradient"].name == "w1"
    # A gradient that is not finite does not hide the others.
    infinite = with_gradients(large * torch.inf, torch.full((3,), 1.0), are_unscaled=True)
    found = compare_gradients(plain, infinite, 1, 1e-3, {})["gradient"]
    assert found.num_differing == 2


def test_the_size_of_a_difference():
    """Of all gradients, the largest difference is told that is not one of rounding alone."""
    runs = [
        with_gradients(torch.full((4,), 0.5) * x, torch.full((3,), 1e-9) * y, are_unscaled=True)
        for x, y in ((1, 1), (1.001, -1))
    ]
    found = compare_gradients(*runs, 1, 0.0, {})["gradient"]

    assert found.name is None
    assert found.relative == pytest.approx(1e-3, rel=0.5)
