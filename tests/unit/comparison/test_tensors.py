"""Tensors that runs divide differently are compared as a whole."""

from pathlib import Path

import torch

from mfwrap.comparison.recorded_run import RecordedRun
from mfwrap.comparison.tensors import compare_starts, compare_weights
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
