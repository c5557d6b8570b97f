"""Prepare ranks to join, check that they train together, and explain why a rank could not join."""

import contextlib
import logging
import os
import socket
import threading
import time
import traceback
import uuid
from typing import Any

from torch import distributed

from mfwrap.collectives.calls import num_ranks, this_rank

_logger = logging.getLogger("mfwrap")

_NUM_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which launchers (torchrun, MPI) tell the number of processes, as accelerate reads
them."""

_AGENT_HOSTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_STORE_OF_START = "mfwrap/launch/store"
_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_TO_CONNECT = 5.0

_own_store: Any = None
"""Server of `leave_shared_store`, which runs as long as this object exists."""


def leave_shared_store() -> None:
    """Give the ranks of this start of torchrun a key-value store of their own.

    The agent of torchrun hosts one store for all its starts of the workers. After a restart, a rank
    would find the addresses of killed ranks in it, and wait for them until the timeout (see issue
    135712 of PyTorch). So rank 0 hosts a new store, and the variables that
    ``init_process_group`` reads are changed to it. ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` in the
    environment of torchrun has the same effect.

    Call it on all ranks, before the process group is set up. Does nothing without torchrun, or if
    there is a process group already.

    Raises:
        ConnectionError: If rank 0 cannot be reached.
    """
    global _own_store  # noqa: PLW0603  (one process group per process)
    if os.environ.get(_AGENT_HOSTS_STORE) != str(True) or distributed.is_initialized():
        return
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        shared = _tcp_store(address, port, is_master=False)
        _own_store = store_of_start(shared, address, is_host=os.environ.get("RANK") == "0")
    except (distributed.DistError, KeyError, ValueError) as error:
        raise _failure(error) from error
    os.environ |= {"MASTER_PORT": str(_own_store.port), _AGENT_HOSTS_STORE: str(False)}


def warn_of_shared_store() -> None:
    """Log a warning if ranks that torchrun starts again would share a store with killed ranks."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if os.environ.get(_AGENT_HOSTS_STORE) == str(True) and restarts != "0" and this_rank() == 0:
        _logger.warning(
            "torchrun may restart the ranks (--max-restarts=%s), but they would then find the "
            "addresses of killed ranks in its key-value store and hang; set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun",
            restarts,
        )


def store_of_start(shared: Any, address: str, *, is_host: bool) -> Any:
    """Host a new ``TCPStore``, or connect to the one that another rank of this start hosts.

    Args:
        shared: ``TCPStore`` that all starts share. It may name stores of earlier starts.
        address: Address of the host.
        is_host: Whether this rank hosts the store.

    Raises:
        DistError: If there is no new store within the timeout of `shared`.
    """
    if is_host:
        # `multi_tenant` lets `init_process_group` share this server.
        own = _tcp_store(address, 0, is_master=True, multi_tenant=True)
        mark = uuid.uuid4().hex
        own.set(mark, "")
        shared.set(_STORE_OF_START, f"{own.port} {mark}")
        return own
    deadline = time.monotonic() + shared.timeout.total_seconds()
    while time.monotonic() < deadline:
        port, _, mark = shared.get(_STORE_OF_START).decode().partition(" ")
        if _listens(address, int(port)) and (own := _marked_store(address, int(port), mark)):
            return own
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    msg = f"rank 0 has not started within {shared.timeout}"
    raise distributed.DistStoreError(msg)


def _marked_store(address: str, port: int, mark: str) -> Any | None:
    """Connect to the store at a port; ``None`` if it lacks a key, or the port is not a store's."""
    found: list[Any] = []

    def connect() -> None:
        with contextlib.suppress(distributed.DistError):
            own = _tcp_store(address, port, is_master=False)
            if own.check([mark]):
                found.append(own)

    # If a program that is not a store has got the port of an earlier start, torch waits for its
    # answer without a timeout. Python does not wait for a daemon thread at its end.
    thread = threading.Thread(target=connect, name="mfwrap-store-of-start", daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_CONNECT)
    return found[0] if found else None


def _tcp_store(address: str, port: int, **settings: bool) -> Any:
    kind: Any = distributed.TCPStore  # type: ignore[attr-defined]  # (missing in torch's stubs)
    return kind(address, port, wait_for_workers=False, **settings)


def _listens(address: str, port: int) -> bool:
    """Return whether a port can be connected to; torch would log each failure."""
    try:
        socket.create_connection((address, port), _SECONDS_TO_CONNECT).close()
    except OSError:
        return False
    return True


def refuse_lone_process(num_processes: int, remedy: str) -> None:
    """Raise an error if a launcher started several processes but this one trains alone.

    Each process would train a copy of its own, and all copies would write to the same files.

    Args:
        num_processes: Number of processes that the training has by its own count.
        remedy: What to do, as the end of the message.

    Raises:
        ValueError: If the launcher's environment names more than one process, but
            `num_processes` is 1 and there is no process group.
    """
    if num_processes > 1 or num_ranks() > 1:
        return
    for name in _NUM_PROCESSES:
        launched = os.environ.get(name, "")
        if launched.isdecimal() and int(launched) > 1:
            msg = (
                f"this process would train alone, but its launcher started {launched} processes "
                f"({name}={launched}); {remedy}, or unset {name} to train alone on purpose"
            )
            raise ValueError(msg)


def start_failure(error: BaseException) -> ConnectionError | None:
    """Return an error that says which rank could not join which process group, and why.

    Args:
        error: Any error.

    Returns:
        The error to raise instead; ``None`` if `error` was not raised while
        ``torch.distributed`` set up a process group.
    """
    frames = traceback.walk_tb(error.__traceback__)
    is_joining = any(frame.f_code.co_name == "init_process_group" for frame, _ in frames)
    if not is_joining and "MASTER_ADDR" not in str(error):
        return None
    return _failure(error)


def _failure(error: BaseException) -> ConnectionError:
    text = " ".join(str(error).split()) or "no reason given"
    rank, number, address, port = (
        os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    if "MASTER_ADDR" not in os.environ:
        return ConnectionError(
            f"rank {rank} of {number} could not join the other ranks: MASTER_ADDR is not set; "
            "start with torchrun, or unset RANK and WORLD_SIZE"
        )
    return ConnectionError(
        f"rank {rank} of {number} could not join the other ranks at {address}:{port} (MASTER_ADDR "
        f"and MASTER_PORT): {type(error).__name__}: {text}; check that all ranks were started, are "
        "still running and can reach this address and each other"
    )
