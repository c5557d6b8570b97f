"""When a rank fails, the other ranks exit in time, and no training state is lost."""

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from mfwrap.sharded_checkpoint import load_sharded
from support.paths import TESTS
from support.ranks import deaths as rank_deaths
from support.ranks.deaths import FailingClassifier, new_training
from support.small_networks import labelled_batches
from support.training_state import assert_same_state

pytestmark = pytest.mark.slow

FAILURES = ("killed", "raises", "raises and stays")
WAYS = ("replicated", "sharded")
CASES = list(itertools.product(FAILURES, WAYS))
HANGS_SECONDS = 200
"""Time limit for a rank: longer than the timeout of its process group, even on a slow machine."""


class Ended(NamedTuple):
    """Folder, exit statuses and error output of two ranks."""

    folder: Path
    statuses: list[int]
    errors: list[str]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Start the ranks of all cases at once; yield the folder and the processes by case."""
    started = {}
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for failure, way in CASES:
        folder = tmp_path_factory.mktemp("ranks")
        ranks = [
            subprocess.Popen(
                [sys.executable, rank_deaths.__file__, failure, way, str(rank), str(folder)],
                env=environment,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        started[failure, way] = folder, ranks
    yield started
    for _, ranks in started.values():
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def ended(request, started):
    """Wait for both ranks of a case; return its failure and results, or fail if a rank hangs."""
    folder, ranks = started[request.param]
    errors = [rank.communicate(timeout=HANGS_SECONDS)[1] for rank in ranks]
    return request.param[0], Ended(folder, [rank.returncode for rank in ranks], errors)


def first_error(errors):
    """Return the first line of a rank's output that names an exception, without torch's prefix."""
    lines = (re.sub(r"^\[rank\d\]: ", "", line) for line in errors.splitlines())
    return next(line for line in lines if line.partition(":")[0].endswith("Error"))


def test_every_rank_ends(ended):
    """After a rank fails, every other rank exits with an error instead of hanging."""
    failure, ranks = ended

    assert ranks.statuses[0] == 1
    assert ranks.statuses[1] == (-signal.SIGKILL if failure == "killed" else 1)


def test_the_own_error_comes_first(ended):
    """Each rank first prints the error that was raised on that rank, not a later error."""
    failure, ranks = ended

    assert first_error(ranks.errors[0]).startswith("RuntimeError")
    if failure != "killed":
        assert first_error(ranks.errors[1]) == "ValueError: this rank's batch is damaged"


def test_half_a_step_changes_nothing(ended):
    """An interrupted step leaves the complete training state of surviving ranks unchanged."""
    failure, ranks = ended
    for rank in range(1 if failure == "killed" else 2):
        states = torch.load(ranks.folder / f"rank{rank}.pt")
        assert_same_state(states["before"], states["after"])


def test_the_checkpoint_goes_on(ended):
    """The checkpoint from before the failure is intact, and one process resumes from it."""
    _, ranks = ended
    cell, parts = new_training(FailingClassifier())
    load_sharded(ranks.folder / "checkpoint", cell)
    before = [weight.clone() for weight in parts[0].parameters()]

    [batch] = labelled_batches(1)
    cell(*batch)

    assert cell.last_report.applied_updates.item() == rank_deaths.GOOD_STEPS + 1
    assert not any(map(torch.equal, before, parts[0].parameters()))
