"""Fingerprints are written and read exactly; a damaged record is an error that names the line."""

import math
import re

import pytest
import torch

from mfwrap.records.fingerprints import (
    Fingerprint,
    MicroBatch,
    encoded,
    encoded_floats,
    joined,
    read_fingerprints,
)
from mfwrap.tensors.fingerprints import as_floats, bitwise_hashes, fingerprints


def of(*tensors):
    """Return the fingerprints of tensors."""
    return [Fingerprint.from_values(row) for row in fingerprints(tensors).tolist()]


def start(names=("a", "b"), **others):
    """Return the record of the start of a training."""
    weights = encoded(of(*(torch.ones(2) for _ in names)))
    tensors = dict.fromkeys(names, "whole")
    return {"step": 0, "run": {"seed": 7}, "tensors": tensors, "weights": weights, **others}


def step(number, **others):
    """Return the record of a step without tensors."""
    return {"step": number, "random": {}, "micro_batches": [], "numbers": {}, **others}


def test_round_trip():
    """All that is written is read; the names of local norms hold until they are written again."""
    gradients = of(torch.randn(3), torch.tensor([math.nan]))
    micro_batch = {"inputs": {"x": "0f [2, 3]"}, "rows": ["01", "02"]}
    records = [
        start(),
        step(
            1,
            gradients=encoded(gradients),
            micro_batches=[micro_batch],
            random={"host": "ab"},
            numbers={"loss": 0.5},
            local_norm_names=["a", "b"],
            local_norms=encoded_floats([1.0, 2.5]),
        ),
        step(2, local_norms=encoded_floats([3.0, math.inf])),
    ]
    found = read_fingerprints(records, "f.jsonl")

    assert found.run == {"seed": 7}
    assert found.shares == {"a": "whole", "b": "whole"}
    assert found.starts == {0: dict(zip("ab", of(torch.ones(2), torch.ones(2)), strict=True))}
    assert found.steps[1].gradients["a"] == gradients[0]
    assert found.steps[1].gradients["b"].hash == gradients[1].hash
    assert found.steps[1].weights is None
    assert found.steps[1].random == {"host": "ab"}
    assert found.steps[1].micro_batches == (MicroBatch({"x": "0f [2, 3]"}, ("01", "02")),)
    assert found.steps[1].numbers == {"loss": 0.5, "local_norm": {"a": 1.0, "b": 2.5}}
    assert found.steps[2].numbers == {"local_norm": {"a": 3.0, "b": math.inf}}


def test_distance():
    """The distance is that of the tensors; it is infinite for a non-finite tensor."""
    one, twice, again, bad = of(
        torch.ones(1), torch.full((1,), 2.0), torch.ones(1), torch.tensor([math.nan])
    )

    assert one.relative_distance(twice) == pytest.approx(0.5)
    assert one.relative_distance(again) == 0
    assert one.relative_distance(bad) == math.inf
    assert bad.relative_distance(bad) == 0


def test_parts():
    """The fingerprints of parts add up, also beyond 64 bits."""
    high = Fingerprint(2**64 - 1, 1.0, (1.0, 2.0))

    assert high.plus(Fingerprint(3, 2.0, (0.5, 0.5))) == Fingerprint(2, 3.0, (1.5, 2.5))
    hashes = bitwise_hashes([torch.randn(5)])
    assert joined(as_floats(hashes)[0].tolist()) == hashes.item() % 2**64


@pytest.mark.parametrize(
    "record",
    [
        step(1, gradients="%%"),
        step(1, weights=encoded(of(torch.ones(1)))),
        step(1, weights="AAAA"),
        {"step": 1},
        step(1, micro_batches=[{"inputs": {}, "rows": [[]]}]),
        {"step": "x", "random": {}, "micro_batches": [], "numbers": {}},
        start() | {"tensors": 3},
    ],
)
def test_damage(record):
    """A record that cannot be read is named by its line."""
    with pytest.raises(ValueError, match=re.escape("f.jsonl:2: expected a record of fingerprints")):
        read_fingerprints([start(), record], "f.jsonl")
