"""Draw random faults for a training, and check the record of each fault."""

import random
from typing import Any

from support.spoilt.blocks import NUM_BLOCKS, Fault, batches_of

__all__ = ["FAULTS_OF_A_RUN", "KINDS", "LASTING", "check_record", "random_faults"]

KINDS = ("activation", "gradient", "weight gradient", "data")
LASTING = ("blow-up", "drift")
"""Faults that change a weight permanently."""

FAULTS_OF_A_RUN = 5
_RECORDED_AS = {
    "activation": "loss_not_finite",
    "data": "loss_not_finite",
    "blow-up": "spike",
    "drift": "replicas_differ",
}


def random_faults(seed: int, num_ranks: int = 1) -> list[tuple[int, Fault]]:
    """Return the faults of one run of 30 steps as pairs of rank and fault, ordered by step."""
    dice = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    # Choose even steps, because only the first of two consecutive bad steps is replayed. Put the
    # last fault late in the run: it may be a spike, and the monitor needs a history of norms to
    # find a spike.
    steps = [*sorted(dice.sample(range(2, 21, 2), FAULTS_OF_A_RUN - 1)), 28 + dice.randrange(2)]
    kinds = [dice.choice(KINDS) for _ in steps]
    lasting = LASTING if num_ranks > 1 else LASTING[:1]
    kinds[-1] = dice.choice([dice.choice(KINDS), *lasting * 2])
    return [
        (
            dice.randrange(num_ranks),
            Fault(
                step,
                kind,
                block=dice.randrange(NUM_BLOCKS),
                value=dice.choice(["nan", "inf"]),
                micro_batch=dice.randrange(2),
                row=dice.randrange(6),
            ),
        )
        for step, kind in zip(steps, kinds, strict=True)
    ]


def check_record(
    record: dict[str, Any], fault: Fault, *, rank: int = 0, seed: int = 0, replayed: bool = True
) -> None:
    """Fail unless a record names the planted fault.

    Args:
        record: Record of the anomaly.
        fault: Planted fault.
        rank: Rank of the fault.
        seed: Seed of the batches of that rank.
        replayed: Whether the step was replayed.
    """
    layer = f"blocks.{fault.block}"
    weight = f"{layer}.linear.weight"
    assert (record["step"], record["ranks"]) == (fault.step, [rank])
    assert record["kind"] == _RECORDED_AS.get(fault.kind, "gradient_not_finite")
    if fault.kind in {"gradient", "weight gradient", *LASTING}:
        assert record["layer"] == layer
    if fault.kind == "drift":
        assert (record["where"], record["name"], record["num_groups"]) == ("weight", weight, 1)
        return
    assert record["skipped"] is (fault.kind != "blow-up")
    if fault.kind == "weight gradient":
        # The fault was in a hook that has been removed, so a replay does not reproduce it.
        assert [(one["name"], one["rank"]) for one in record["gradients"]] == [(weight, rank)]
        assert "where" not in record
    if fault.kind == "blow-up":
        assert record["name"] == record["weights"][0]["name"] == weight
        assert record["weights"][0]["norm"] > 1e3 * record["weights"][0]["norm_before"]
    if replayed and fault.kind in {"activation", "gradient", "data"}:
        assert record["is_replay_exact"]
        assert record["micro_batch"] == fault.micro_batch
        batch = batches_of(fault.step, seed, 2, [])[fault.micro_batch]
        assert record["indices"] == batch.indices.tolist()
        assert record["where"] == {"data": "input"}.get(fault.kind, fault.kind)
    if replayed and fault.kind == "activation":
        assert (record["layer"], record["name"]) == (layer, layer)
    if replayed and fault.kind == "data":
        assert (record["name"], record["rows"]) == ("inputs", [fault.row])
        (sample,) = record["samples"]
        assert (sample["rank"], sample["micro_batch"]) == (rank, fault.micro_batch)
        assert (sample["row"], sample["index"]) == (fault.row, record["indices"][fault.row])
    if replayed and fault.kind == "activation":
        # The fault is not in the data, so all rows are non-finite.
        assert "samples" not in record
    if fault.kind == "data" or (not replayed and fault.kind == "activation"):
        assert "layer" not in record
