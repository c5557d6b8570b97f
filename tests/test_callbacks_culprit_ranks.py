"""On two ranks the one at fault is named, in one record, and nobody waits for nobody."""

import pytest
from torch import multiprocessing

from mfwrap.callbacks.json_lines import read_json_lines
from spoilt_blocks import records_of
from spoilt_ranks import NUM_RANKS, RANK_FAULTS, run_rank

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder with what both ranks have written."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=NUM_RANKS)
    return folder


@pytest.mark.parametrize("run", RANK_FAULTS)
def test_each_fault_is_named_with_its_rank(run, runs):
    """Step, rank, micro-batch and layer, in the order of the steps; in the main process's file."""
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


def test_losses_are_each_ranks_own(runs):
    """Each rank has its file of numbers, and its own data in it."""
    first, second = (
        [record["local_loss"] for record in read_json_lines(runs / "none" / name)]
        for name in ("training_state.jsonl", "training_state_rank1.jsonl")
    )

    assert len(first) == len(second) == 24
    assert all(ours != theirs for ours, theirs in zip(first, second, strict=True))
