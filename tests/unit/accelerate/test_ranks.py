"""An attached loop on two ranks trains like one process on all of the data."""

import math

import pytest
import torch
from torch import Tensor, multiprocessing

from support.attached_ranks import NUM_RANKS, SETTINGS, STOP, run_rank
from support.attached_runs import FACTORS, AttachedRun
from support.training_state import assert_same_state

pytestmark = pytest.mark.slow

OURS = {"mfwrap_step.json", "mfwrap_step.safetensors"}
SKIPS = [math.isnan(factor) for factor in FACTORS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the results and checkpoints of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(folder),), nprocs=NUM_RANKS)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """Return the results of each rank."""
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


def files_in(folder):
    """Return the names of all files in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_train_as_one_process_on_the_whole_batch(ranks, name):
    """Two ranks end in the same state as one process that trains on the whole batches.

    Some losses are NaN on the second rank. The mean over ranks is rounded once more than the mean
    over a whole batch. In float32 this rounding changes a gradient by up to 6e-8 of its size, and
    each of the six updates is at most 0.1 (measured difference of the weights: 3e-8). In bf16 the
    gradients of half a batch are rounded before the reduction. This changes a gradient by up to
    2**-9 of its size, and all gradients are below 1.
    """
    run = AttachedRun(SETTINGS[name])
    run.train(0, len(FACTORS))
    expected = {key.replace("/module.", "/"): value for key, value in run.state().items()}
    tolerance = 2**-9 if name == "bf16" else 1e-6

    for rank in ranks:
        state = rank["trained"][name]["state"]
        actual = {key.replace("/module.", "/"): value for key, value in state.items()}
        assert sorted(actual) == sorted(expected)
        for key, value in expected.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                torch.testing.assert_close(actual[key], value, rtol=0, atol=tolerance)
            else:
                assert actual[key] == value, key


@pytest.mark.parametrize("name", SETTINGS)
def test_an_overflow_on_one_rank_skips_on_both(ranks, name):
    """Both ranks skip an update that overflows on one rank, and end in the same state."""
    first, second = (rank["trained"][name] for rank in ranks)

    assert first["skipped"] == second["skipped"] == SKIPS
    assert_same_state(first["state"], second["state"])
    assert not any(loss.isnan() for loss in first["losses"])
    assert [norm.isnan().item() for norm in first["norms"]] == SKIPS


def test_clipping_returns_the_norm_of_the_reduced_gradients(ranks):
    """On both ranks clipping returns the norm that a single process computes on all data."""
    run = AttachedRun(SETTINGS["fused"])
    for update in range(len(FACTORS)):
        run.train(update, update + 1)
        expected = run.step.last_output.global_norm
        for rank in ranks:
            norm = rank["trained"]["fused"]["norms"][update]
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["saved", "each node"])
def test_a_checkpoint_brings_both_ranks_back(ranks, way):
    """A checkpoint that was saved right after a skip restores the whole state on both ranks."""
    for rank in ranks:
        assert_same_state(rank[way]["saved"], rank[way]["loaded"])
        assert_same_state(rank[way]["end"], rank[way]["end again"])
        assert rank[way]["saved"]["/step/updates/0/consecutive_skips"] == 2
        applied = SKIPS[:STOP].count(False)
        assert rank[way]["saved"]["/step/updates/0/applied_updates"] == applied


def test_the_main_process_writes_for_all(folder, ranks):
    """If each rank saves to its own folder, only the main process writes model and step state."""
    first, second = (files_in(folder / f"saved by {rank}") for rank in range(NUM_RANKS))

    assert first >= OURS | {"model.safetensors"}
    assert not second & (OURS | {"model.safetensors"})


def test_if_asked_to_one_process_writes_on_each_node(folder, ranks):
    """``save_on_each_node`` makes the main process of each node write mfwrap's files."""
    for rank in range(NUM_RANKS):
        assert files_in(folder / f"node{rank}") >= OURS | {"model.safetensors"}
