"""A single bit that differs between replicas is found, and its rank is named."""

import re

import pytest
import torch
from torch import multiprocessing, nn
from transformers import TrainerControl, TrainerState

from mfwrap.callbacks import ReplicaCheck
from mfwrap.callbacks.replica_check import _fault, _Hashes
from mfwrap.checkpoints.written_files import LIST
from support.replica_ranks import NUM_RANKS, run_rank
from support.spoilt.blocks import records_of


def test_one_process(tmp_path):
    """With one process, nothing is compared or written."""
    callback = ReplicaCheck(1, gradients=True, stop=True, folder=tmp_path)
    state, control = TrainerState(global_step=1), TrainerControl()
    for event in ("on_train_begin", "on_pre_optimizer_step", "on_step_end", "on_train_end"):
        getattr(callback, event)(None, state, control, model=nn.Linear(2, 2))

    assert [path.name for path in tmp_path.iterdir()] == [LIST]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"step_interval": 0}, ValueError, "`step_interval` must be >= 1, got 0"),
        ({"step_interval": 1.0}, TypeError, "`step_interval` must be an int, got 1.0"),
        ({"gradients": 1}, TypeError, "`gradients` must be a bool, got 1"),
        ({"stop": None}, TypeError, "`stop` must be a bool, got None"),
        ({"folder": 1}, TypeError, "`folder` must be a path or None, got 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(settings, error, message):
    """A wrong argument raises an error that names the argument."""
    with pytest.raises(error, match=re.escape(message)):
        ReplicaCheck(**settings)


@pytest.mark.parametrize(
    ("now", "before", "at_fault", "cause"),
    [
        ([1, 1, 2], [1, 1, 1], (2,), "weight_changed"),
        ([1, 1, 2], None, (2,), "rank_differs"),
        ([5, 5, 6], [1, 2, 3], (2,), "rank_differs"),
        ([1, 2], None, (0, 1), "unknown"),
        ([1, 2, 3], None, (0, 1, 2), "unknown"),
    ],
)
def test_the_ranks_at_fault(now, before, at_fault, cause):
    """A rank whose weight has changed by itself, or else the minority; two ranks have none."""
    # Another weight differs on other ranks, which are not those of the weight that is named.
    columns = [
        None if each is None else torch.tensor([each, range(len(each))]).t()
        for each in (now, before)
    ]
    hashes = _Hashes(4, "weight", ("w", "other"), *columns)
    ranks, found, explanation = _fault(hashes, "w")
    assert (ranks, found) == (at_fault, cause)
    assert ("unknown which differ" in explanation) == (cause == "unknown")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the folder of a run on three ranks, and the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=NUM_RANKS)
    return folder, [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.slow
def test_replicas_that_are_the_same(ranks):
    """If the replicas are identical, nothing is written and no rank stops."""
    folder, results = ranks

    assert records_of(folder / "same") == []
    assert [result["same"] for result in results] == [[1, 2, 3, 4, 5, 6]] * NUM_RANKS


@pytest.mark.slow
@pytest.mark.parametrize(("case", "rank"), [("weight", 2), ("gradient", 1)])
def test_a_bit_on_one_rank(case, rank, ranks):
    """A flipped bit on one rank gives one record with step, weight and rank."""
    folder, _ = ranks
    (record,) = records_of(folder / case)
    expected = {"step": 4, "kind": "replicas_differ", "ranks": [rank], "layer": "1"}
    assert "not the same on all ranks" in record.pop("suggestion")
    assert record.pop("explanation") == "1.weight is the same on most ranks, and differs here"
    place = {"where": case, "name": "1.weight", "num_groups": 1, "cause": "rank_differs"}
    # Weights are compared before and after each update, gradients every second step.
    expected |= {"since": 3} if case == "gradient" else {}
    assert record == expected | place


@pytest.mark.slow
def test_stop(ranks):
    """With ``stop=True`` all ranks raise before the next update."""
    _, results = ranks

    assert [result["stop"] for result in results] == [
        (
            "step 4: replicas differ in layer 1 on rank 0: 1.weight differs, 1.weight is the same "
            "on most ranks, and differs here. All ranks must have bitwise identical weights and "
            "gradients; resume from a checkpoint of an earlier step"
        )
    ] * NUM_RANKS


@pytest.mark.slow
def test_time_is_the_main_processs(ranks):
    """All ranks request checkpoints at the steps that the main process's clock determines."""
    _, results = ranks

    assert [result["saves"] for result in results] == [[4, 8, 12]] * NUM_RANKS
