"""On two ranks, one record names the rank at fault, and no rank hangs."""

import pytest

from mfwrap.records.json_lines import read_json_lines
from support.planted_faults import LASTING, check_record, random_faults
from support.spoilt.blocks import first_records_of, records_of
from support.spoilt.ranks import NUM_RANKS, RANK_FAULTS, run_planted, run_rank


def check_planted(folder, seed):
    """Check that a run has the records of its planted faults, and that a clean run has none."""
    planted = random_faults(seed, NUM_RANKS)
    records = first_records_of(folder / f"faults_{seed}")
    last = planted[-1][1]
    # A weight that has blown up or drifted spoils all later steps, so they are not compared.
    end = last.step if last.kind in LASTING else 30
    by_step = {}
    for record in records:
        if record["kind"] == "note":
            continue
        by_step.setdefault(record["step"], []).append(record)

    steps = sorted(step for step in by_step if step <= end)
    assert steps == [fault.step for _, fault in planted]
    for rank, fault in planted:
        *before, record = by_step[fault.step]
        check_record(record, fault, rank=rank, seed=rank)
        if fault.kind == "blow-up":
            # Only one rank's weight blows up, so a second record says that the replicas differ.
            (differ,) = before
            check_record(differ, fault._replace(kind="drift"), rank=rank)
        else:
            assert before == []
    for rank in range(1, NUM_RANKS):
        # A rank finds by itself that one of its weights has changed.
        own = [one for one in records_of(folder / f"faults_{seed}", rank) if "cause" in one]
        assert {(one["step"], one["kind"], one["name"]) for one in own} <= {
            (fault.step, "note", f"blocks.{fault.block}.linear.weight")
            for at, fault in planted
            if at == rank and fault.kind == "drift"
        }
    assert [records_of(folder / f"clean_{seed}", rank) for rank in range(NUM_RANKS)] == [[], []]


@pytest.mark.parametrize(
    "seeds",
    [(0,), pytest.param(range(1, 20), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["five", "ninety-five"],
)
def test_planted_faults(two_ranks, seeds, tmp_path):
    """Records name layer, rank, step and micro-batch of planted faults; clean runs have none."""
    two_ranks.run(run_planted, str(tmp_path), tuple(seeds))

    for seed in seeds:
        check_planted(tmp_path, seed)


@pytest.fixture(scope="module")
def runs(two_ranks, tmp_path_factory):
    """Return the folder with the files of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    two_ranks.run(run_rank, str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", RANK_FAULTS)
def test_each_fault_is_named_with_its_rank(run, runs):
    """The main process records step, rank, micro-batch and layer of each fault, in order."""
    faults = sorted((f.step, rank, f) for rank, fs in RANK_FAULTS[run].items() for f in fs)
    steps = sorted({step for step, _, _ in faults})
    records = records_of(runs / run)

    assert [record["step"] for record in records] == steps
    for record in records:
        of_step = [(rank, fault) for step, rank, fault in faults if step == record["step"]]
        assert record["ranks"] == [rank for rank, _ in of_step]
        fault = of_step[0][1]
        assert record["micro_batch"] == fault.micro_batch
        assert record["is_replay_exact"]
        assert record.get("layer") == (None if fault.kind == "data" else f"blocks.{fault.block}")
        assert len(record["losses"]) == NUM_RANKS
    assert records_of(runs / run, rank=1) == []


@pytest.mark.slow
def test_losses_are_each_ranks_own(runs):
    """Each rank writes its own losses to its own file."""
    first, second = (
        [record["local_loss"] for record in read_json_lines(runs / "none" / name)]
        for name in ("training_state.jsonl", "training_state_rank1.jsonl")
    )

    assert len(first) == len(second) == 24
    assert all(ours != theirs for ours, theirs in zip(first, second, strict=True))
