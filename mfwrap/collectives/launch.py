"""Check that the processes of a launcher train together, and explain why a rank could not start."""

import os
from types import TracebackType

from mfwrap.collectives.calls import num_ranks

_NUM_PROCESSES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which launchers (torchrun, MPI) tell the number of processes, as accelerate reads
them."""


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
    text = " ".join(str(error).split()) or "no reason given"
    if not _comes_from_joining(error.__traceback__) and "MASTER_ADDR" not in text:
        return None
    rank, number, address, port = (
        os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    return ConnectionError(
        f"rank {rank} of {number} could not join the other ranks at {address}:{port} (MASTER_ADDR "
        f"and MASTER_PORT): {type(error).__name__}: {text}; check that all ranks were started, are "
        "still running and can reach this address and each other"
    )


def _comes_from_joining(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "init_process_group":
            return True
        traceback = traceback.tb_next
    return False
