"""A process that a launcher started trains with the others, or says in one sentence why not."""

import socket
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator
from torch import distributed, nn

from mfwrap import MFTrainOneStepCell, TrainOneStepCell
from mfwrap.accelerate import attach
from mfwrap.collectives import refuse_lone_process, start_failure


@pytest.fixture
def _launched(monkeypatch):
    """Set the variables of a launcher that started two processes and connected neither."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")


ALONE = r"this process would train alone, but its launcher started 2 processes \(WORLD_SIZE=2\); "


@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize("kind", [MFTrainOneStepCell, TrainOneStepCell])
def test_a_cell_that_would_train_alone(kind):
    """A cell without a process group is refused under a launcher."""
    network = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=f"^{ALONE}call torch.distributed.init_process_group"):
        kind(network, torch.optim.SGD(network.parameters(), lr=0.1))


@pytest.mark.usefixtures("_launched")
def test_an_accelerator_that_would_train_alone():
    """An accelerator that has not connected the launched processes is refused."""
    with pytest.raises(ValueError, match=f"^{ALONE}on a CPU pass `cpu=True` to Accelerator"):
        attach(Accelerator())


@pytest.mark.parametrize("number", ["1", "", "many"])
def test_one_process(monkeypatch, number):
    """A launcher that started one process, or does not tell the number, is accepted."""
    monkeypatch.setenv("WORLD_SIZE", number)

    refuse_lone_process(1, "")


@pytest.mark.usefixtures("_launched")
def test_processes_that_are_connected():
    """Several processes are accepted if the training counts them, or if a group joins them."""
    refuse_lone_process(2, "")


def failure_to_join(**settings):
    """Return the error of a rank that cannot join its process group."""
    with pytest.raises(RuntimeError) as caught:
        distributed.init_process_group("gloo", **settings)
    assert not distributed.is_initialized()
    return start_failure(caught.value)


def test_a_peer_that_is_missing(monkeypatch):
    """A peer that has died before it could be connected: the address, the ranks and the cause."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    error = failure_to_join(store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.1))

    assert "\n" not in str(error)
    assert str(error).startswith(
        "rank 0 of 2 could not join the other ranks at 10.0.0.7:29500 (MASTER_ADDR and "
        "MASTER_PORT): "
    )
    assert "imeout" in str(error)


def test_an_address_that_is_taken(monkeypatch):
    """A port that another program listens at."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        error = failure_to_join(rank=0, world_size=2)

    assert f"at localhost:{port} " in str(error)
    assert "address already in use" in str(error)


def test_an_error_of_another_kind():
    """An error that does not come from joining a process group is left alone."""
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("many")

    assert start_failure(caught.value) is None
