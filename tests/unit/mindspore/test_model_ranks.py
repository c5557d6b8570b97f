"""Two ranks train and evaluate like one process on all data."""

import pytest
import torch
from torch import multiprocessing, nn

from mfwrap import Model
from support.model_ranks import NUM_RANKS, loader, run_rank
from support.model_runs import classifier, sgd
from support.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run both ranks; return the folder of their results."""
    path = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, args=(str(path), free_port()), nprocs=NUM_RANKS)
    return path


def test_two_ranks_train_as_one_process_on_the_whole_data(folder):
    """Two ranks with batches of 4 train like one process with batches of 8.

    Metrics count each sample once.
    """
    network = classifier()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network), metrics={"loss", "accuracy"})
    model.train(2, loader(32, 8))
    metrics = model.eval(loader(15, 15))

    for rank in range(NUM_RANKS):
        result = torch.load(folder / f"rank{rank}.pt")
        for ours, theirs in zip(result["weights"], network.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)
        assert result["metrics"] == pytest.approx(metrics, rel=1e-6)


def test_the_main_process_saves(folder):
    """Only the main process writes a checkpoint."""
    assert [(folder / f"rank{rank}").exists() for rank in range(NUM_RANKS)] == [True, False]
