"""A process that a launcher started trains with the others, or says in one sentence why not."""

import functools
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap import MFTrainOneStepCell, TrainOneStepCell
from mfwrap.accelerate import attach
from mfwrap.collectives import launch, leave_shared_store, refuse_lone_process, start_failure
from mfwrap.collectives.launch import store_of_start, warn_of_shared_store
from support.one_rank import one_rank
from support.versions import needs


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


@needs("accelerate", "1.13", "`Accelerator()` itself joins processes that train on a CPU")
@pytest.mark.usefixtures("_launched")
def test_an_accelerator_that_would_train_alone():
    """An accelerator that has not connected the launched processes is refused."""
    with pytest.raises(ValueError, match=f"^{ALONE}on a CPU pass `cpu=True` to Accelerator"):
        attach(Accelerator())


@pytest.mark.parametrize("number", ["1", "", "many"])
def test_one_process(monkeypatch, number):
    """A launcher that started one process, or does not tell the number, is accepted."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=ALONE):
        refuse_lone_process(1, "")
    monkeypatch.setenv("WORLD_SIZE", number)

    refuse_lone_process(1, "")


@pytest.mark.usefixtures("_launched")
def test_processes_that_are_connected():
    """Several processes are accepted if the training counts them, or if a group joins them."""
    refuse_lone_process(2, "")

    with pytest.raises(ValueError, match=f"^{ALONE}do this, or unset WORLD_SIZE"):
        refuse_lone_process(1, "do this")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        refuse_lone_process(1, "do this")
    finally:
        distributed.destroy_process_group()


def failure_to_join(**settings):
    """Return the error of a rank that cannot join its process group.

    torch names groups by a counter, which also counts failures, and which starts again when a
    group is destroyed. torch 2.9 reuses the meshes of earlier DTensors with the group names of that
    time, so a mesh with a higher number would break the tests that run later in this process.
    """
    with pytest.raises(RuntimeError) as caught:
        distributed.init_process_group("gloo", **settings)
    assert not distributed.is_initialized()
    with one_rank():
        pass
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


def stores_of_starts(shared, *, early):
    """Return the stores of both ranks; with `early`, rank 1 looks before rank 0 has begun."""
    with ThreadPoolExecutor(2) as ranks:
        join = functools.partial(ranks.submit, store_of_start, address="localhost")
        order = [False, True] if early else [True, False]
        joined = {is_host: join(shared.clone(), is_host=is_host) for is_host in order}
        return joined[True].result(), joined[False].result()


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("early", [True, False])
def test_a_store_for_each_start(early, monkeypatch):
    """Ranks that are started again do not meet in a store of an earlier start."""
    monkeypatch.setattr(launch, "_SECONDS_TO_CONNECT", 0.3)
    shared = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("", 0)) as closed:
        gone = closed.getsockname()[1]
    # Another program may listen where the store of an earlier start was.
    other = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("", 0)) as silent:
        for port in (gone, other.port, silent.getsockname()[1]):
            shared.set("mfwrap/launch/store", f"{port} mark")
            hosted, joined = stores_of_starts(shared, early=early)
            hosted.set("key", "value")

            assert joined.get("key") == b"value"
            assert joined.port != port


def test_without_torchrun(monkeypatch):
    """Without torchrun's shared store, nothing is changed."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    leave_shared_store()

    assert os.environ["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(
    ("shared", "restarts", "warns"),
    [("True", "3", True), ("True", "0", False), ("False", "3", False)],
)
def test_a_restart_that_would_hang(monkeypatch, caplog, shared, restarts, warns):
    """A warning names the switch of torchrun, before the first restart."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    warn_of_shared_store()

    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warns


def test_a_shared_store_that_cannot_be_reached(monkeypatch):
    """Variables that are missing are an error that names rank and address."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    with pytest.raises(ConnectionError, match="other ranks: MASTER_ADDR is not set; start with"):
        leave_shared_store()
